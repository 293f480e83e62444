"""The doors of the data room: ``PromptDataset`` and ``PreferenceDataset``.

A data set is raw rows and needs no tokenizer; it reads nothing before its first use. ``prompts`` (everything
tokenised at once) or ``feed`` (prompts in training order) bring in the tokenizer and the limits::

    feed = PromptDataset("prompts.jsonl").feed(tokenizer, max_prompt_length=512, seed=0)
    for prompt in feed.take(8): ...
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.errors import DataError
from verl.data import chat
from verl.data.order import PromptOrder
from verl.data.pairs import Pair, encode_pair
from verl.data.procedural import TOY_PROMPTS
from verl.data.prompts import (
    MOST_PROBLEMS,
    Numbered,
    OrderedFeed,
    Overlong,
    Prompt,
    PromptEncoder,
    PromptFeed,
    Prompts,
    StreamFeed,
    encode_all,
    raise_problems,
)
from verl.data.rows import Layout
from verl.data.sources import Row, Source, open_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "TOY_PROMPTS",
    "Pair",
    "Pairs",
    "PreferenceDataset",
    "Prompt",
    "PromptDataset",
    "PromptFeed",
    "PromptOrder",
    "Prompts",
    "open_prompts",
]

TOKENISING = 1  # raise it when the same row and tokenizer give other ids, so that caches are made anew


class PromptDataset(Sequence[dict[str, Any]]):
    """Rows with a ``prompt``; the other columns stay as they are.

    ``source``: see ``sources.open_source``. ``columns``: ``{ours: theirs}`` for unusual names. ``cache_dir``: where
    hub data sets and tokenised rows are kept between runs. ``ds[i]`` is row ``i``, counted from 0, in our form.
    DataError names file, row and column of what can't be used.
    """

    pairs_wanted = False

    def __init__(
        self, source: Any, columns: Mapping[str, str] | None = None, *, cache_dir: str | Path | None = None
    ) -> None:
        self.source, self.columns, self.cache_dir = source, dict(columns or {}), cache_dir

    @classmethod
    def of(
        cls, source: Any, columns: Mapping[str, str] | None = None, *, cache_dir: str | Path | None = None
    ) -> PromptDataset:
        """``source`` itself where it is a data set of ours already, else one made of it."""
        if not isinstance(source, PromptDataset):
            return cls(source, columns, cache_dir=cache_dir)
        if not columns and cache_dir is None:
            return source
        return type(source)(
            source.source, {**source.columns, **(columns or {})}, cache_dir=cache_dir or source.cache_dir
        )

    @property
    def name(self) -> str:
        return self._open.name

    @cached_property
    def _open(self) -> Source:
        return open_source(self.source, self.cache_dir)

    @cached_property
    def _rows(self) -> Sequence[Row]:
        rows = self._open.load()
        if not len(rows):
            raise DataError(f"{self.name} has no rows")
        return rows

    @cached_property
    def _layout(self) -> Layout:
        named = getattr(self._rows, "column_names", None)
        present = set(named) if named is not None else {name for row in self._rows for name in row}
        return Layout(present, self.columns, self.name, self.pairs_wanted)

    @property
    def field_names(self) -> set[str]:
        """The columns of the first row in our form; reads that row only, unless all are loaded already."""
        return set(self[0] if "_rows" in self.__dict__ else next(self._streamed())[1])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        return self._layout.read(self._rows[number], number)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (row for _, row in self._numbered())

    def _numbered(self) -> Iterator[Numbered]:
        """All rows with their numbers; the first few bad ones are told in one DataError."""
        problems: list[str] = []
        for number, row in enumerate(self._rows):
            try:
                read = self._layout.read(row, number)
            except DataError as error:
                problems.append(str(error).removeprefix(f"{self.name}, "))
                if len(problems) == MOST_PROBLEMS:
                    break
                continue
            if not problems:
                yield number, read
        raise_problems(self.name, problems)

    def _streamed(self) -> Iterator[Numbered]:
        """The rows as they come, none of them kept."""
        layout = None
        for number, row in enumerate(self._open.iterate()):
            layout = layout or Layout(row.keys(), self.columns, self.name, self.pairs_wanted)
            yield number, layout.read(row, number)
        if layout is None:
            raise DataError(f"{self.name} has no rows")

    @cached_property
    def content(self) -> str:
        """SHA-256 of all rows and of the column names in use."""
        digest = hashlib.sha256(json.dumps(self.columns, sort_keys=True).encode())
        for row in self._rows:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()

    def prompts(
        self, tokenizer: PreTrainedTokenizerBase, *, max_prompt_length: int, overlong: Overlong = "truncate"
    ) -> Prompts:
        """Every prompt, tokenised; with ``overlong: error`` a too long one raises here, before any step."""
        encoder = PromptEncoder(tokenizer, max_prompt_length, overlong, self.name)
        key = self._fingerprint(self.content, encoder)
        return encode_all(self._numbered, lambda i: self[i], encoder, key, self.cache_dir)

    def feed(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_length: int,
        overlong: Overlong = "truncate",
        seed: int = 0,
        shuffle: bool = True,
        streaming: bool = False,
    ) -> PromptFeed:
        """Prompts in training order. ``streaming``: read and tokenised while training, never all held."""
        if not streaming:
            prompts = self.prompts(tokenizer, max_prompt_length=max_prompt_length, overlong=overlong)
            return OrderedFeed(prompts, seed, shuffle)
        encoder = PromptEncoder(tokenizer, max_prompt_length, overlong, self.name)
        key = self._fingerprint(f"stream of {self.name} {sorted(self.columns.items())}", encoder)
        return StreamFeed(self._streamed, encoder, key, seed, shuffle)

    def _fingerprint(self, content: str, encoder: PromptEncoder) -> str:
        parts = [TOKENISING, content, chat.fingerprint(encoder.tokenizer), encoder.max_length, encoder.overlong]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def open_prompts(
    source: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    overlong: Overlong = "truncate",
    columns: Mapping[str, str] | None = None,
    cache_dir: str | Path | None = None,
) -> Prompts:
    """The tokenised prompts of anything that ``PromptDataset`` takes, or of a data set made before."""
    dataset = PromptDataset.of(source, columns, cache_dir=cache_dir)
    return dataset.prompts(tokenizer, max_prompt_length=max_prompt_length, overlong=overlong)


@dataclass(frozen=True)
class Pairs:
    """Tokenised preference pairs and what the length policy did: kept, filtered, truncated."""

    pairs: list[Pair]
    counts: dict[str, int]


class PreferenceDataset(PromptDataset):
    """Rows with ``prompt``, ``chosen`` and ``rejected``; also a source of prompts.

    hh-rlhf (two whole dialogues), UltraFeedback binarised and TRL's standard and conversational forms are recognised.
    """

    pairs_wanted = True

    def pairs(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, overlong: Overlong = "truncate") -> Pairs:
        """Every pair as ids; ``max_length`` counts prompt and completion together."""
        pairs: list[Pair] = []
        for number, row in self._numbered():
            pair = encode_pair(tokenizer, row, max_length, overlong, f"{self.name}, row {number}")
            if pair is not None:
                pairs.append(pair)
        filtered = len(self) - len(pairs)
        if not pairs:
            raise DataError(f"{self.name}: 0 rows after filtering: all {filtered} pairs are longer than {max_length}")
        truncated = sum(pair.truncated for pair in pairs)
        return Pairs(pairs, {"kept": len(pairs), "filtered": filtered, "truncated": truncated})
