"""The doors of the data room: data sets of prompts, pairs, labelled rows and chats.

A data set is raw rows and needs no tokenizer; it reads nothing before its first use. ``prompts`` and ``examples``
(everything tokenised at once) or ``feed`` and ``example_feed`` (in training order) bring in tokenizer and limits::

    feed = PromptDataset("prompts.jsonl").feed(tokenizer, max_prompt_length=512, seed=0)
    for prompt in feed.take(8): ...
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from verl.config.errors import DataError
from verl.data import chat
from verl.data.examples import Completion, Example, ExampleEncoder, ExampleFeed, Examples
from verl.data.feeds import OrderedFeed, StreamFeed
from verl.data.live import LiveFeed, LiveSource, is_live
from verl.data.order import PromptOrder
from verl.data.policies import BadRowPolicy, BadRows, Numbered, Overlong
from verl.data.procedural import TOY_PROMPTS
from verl.data.prompts import Prompt, PromptEncoder, PromptFeed, Prompts
from verl.data.rows import Kind, Layout, side_of
from verl.data.sources import Broken, Row, Source, open_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

__all__ = [
    "TOY_PROMPTS",
    "ChatDataset",
    "Completion",
    "Example",
    "ExampleFeed",
    "Examples",
    "LabelledDataset",
    "PreferenceDataset",
    "Prompt",
    "PromptDataset",
    "PromptFeed",
    "PromptOrder",
    "Prompts",
    "open_example_set",
    "open_examples",
    "open_prompts",
]

TOKENISING = 4  # raise it when the same row and tokenizer give other ids or facts, so that caches are made anew


class PromptDataset(Sequence[dict[str, Any]]):
    """Rows with a ``prompt``; the other columns stay as they are.

    ``source``: see ``sources.open_source``; or a live one, see ``live.LiveSource``. ``columns``: ``{ours: theirs}`` for
    unusual names. ``cache_dir``: where hub data sets and tokenised rows are kept between runs. ``ds[i]`` is row ``i``,
    counted from 0, in our form. DataError names file, row and column of what can't be used; with ``bad_rows: drop``
    such rows are left out when the set is iterated or tokenised (``len`` counts them).
    """

    kind: Kind = "prompts"

    def __init__(
        self,
        source: Any,
        columns: Mapping[str, str] | None = None,
        *,
        cache_dir: str | Path | None = None,
        bad_rows: BadRowPolicy = "error",
    ) -> None:
        self.source, self.columns, self.cache_dir = source, dict(columns or {}), cache_dir
        self.bad_rows: BadRowPolicy = bad_rows
        self._noted = False

    @classmethod
    def of(
        cls,
        source: Any,
        columns: Mapping[str, str] | None = None,
        *,
        cache_dir: str | Path | None = None,
        bad_rows: BadRowPolicy | None = None,
    ) -> Self:
        """``source`` itself where it is such a data set already, else one made of it."""
        if not isinstance(source, PromptDataset):
            return cls(source, columns, cache_dir=cache_dir, bad_rows=bad_rows or "error")
        if isinstance(source, cls) and not columns and cache_dir is None and bad_rows in (None, source.bad_rows):
            return source
        made = type(source) if isinstance(source, cls) else cls
        return made(
            source.source,
            {**source.columns, **(columns or {})},
            cache_dir=cache_dir or source.cache_dir,
            bad_rows=bad_rows or source.bad_rows,
        )

    @property
    def name(self) -> str:
        return self._open.name

    @cached_property
    def _open(self) -> Source:
        return LiveSource.of(self.source).open() if is_live(self.source) else open_source(self.source, self.cache_dir)

    @cached_property
    def _rows(self) -> Sequence[Row | Broken]:
        rows = self._open.load()
        if not len(rows):
            raise DataError(f"{self.name} has no rows")
        if self.bad_rows == "error" and isinstance(rows, list):
            bad = BadRows(self.name)
            for number, row in enumerate(rows):
                if isinstance(row, Broken):
                    bad.add(number, row.reason)
            bad.check()
        return rows

    @cached_property
    def _layout(self) -> Layout:
        named = getattr(self._rows, "column_names", None)
        present = (
            set(named)
            if named is not None
            else {name for row in self._rows if not isinstance(row, Broken) for name in row}
        )
        return self._layout_of(present)

    def _layout_of(self, present: set[str]) -> Layout:
        layout = Layout(present, self.columns, self.name, self.kind)
        if layout.unread and not self._noted:
            log.warning("%s: columns that don't go into the prompt: %s", self.name, ", ".join(layout.unread))
            self._noted = True
        return layout

    @property
    def field_names(self) -> set[str]:
        """The columns of the first row in our form; reads that row only, unless all are loaded already.

        Those of a live source that has no row yet: ``prompt``.
        """
        if "_rows" in self.__dict__:
            return set(self[0])
        first = next(self._streamed(BadRows(self.name, self.bad_rows)), None)
        return set(first[1]) if first is not None else {"prompt"}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        row = self._rows[number]
        if isinstance(row, Broken):
            raise DataError(f"{self.name}, row {number}: {row.reason}")
        return self._layout.read(row, number)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (row for _, row in self._numbered(BadRows(self.name, self.bad_rows)))

    def _numbered(self, bad: BadRows, split: bool = False) -> Iterator[Numbered]:
        """All rows with their numbers; the first few bad ones are told in one DataError.

        ``split``: a row that stands for several examples comes as those.
        """
        layout = self._layout
        for number, row in enumerate(self._rows):
            parts = self._parts(layout, row, number, bad, split)
            if bad.clean:
                yield from parts
        bad.check()

    def _streamed(self, bad: BadRows, split: bool = False) -> Iterator[Numbered]:
        """The rows as they come, none of them kept; a bad one is told as soon as it is read."""
        layout = None
        number = -1
        for number, row in enumerate(self._open.iterate()):
            if layout is None and not isinstance(row, Broken):
                layout = self._layout_of(set(row))
            yield from self._parts(layout, row, number, bad, split)
            bad.check()
        if number < 0 and not is_live(self.source):
            raise DataError(f"{self.name} has no rows")

    def _arrived(self, row: Row | Broken, number: int, bad: BadRows, split: bool = False) -> list[Numbered]:
        """One event of a live source; it may have other columns than the one before."""
        try:
            layout = None if isinstance(row, Broken) else self._layout_of(set(row))
        except DataError as error:
            bad.add(number, error)
            return []
        return self._parts(layout, row, number, bad, split)

    def _parts(
        self, layout: Layout | None, row: Row | Broken, number: int, bad: BadRows, split: bool
    ) -> list[Numbered]:
        if isinstance(row, Broken):
            bad.add(number, row.reason)
            return []
        assert layout is not None, "there is one since the first row that isn't broken"
        try:
            read = layout.read(row, number)
        except DataError as error:
            bad.add(number, str(error).removeprefix(f"{self.name}, row {number}: "))
            return []
        return layout.parts(number, read) if split else [(str(number), read)]

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
        encoder = PromptEncoder(tokenizer, max_prompt_length, overlong, self._finite(), self.bad_rows)
        key = self._fingerprint(self.content, encoder)
        return Prompts.encode(self._numbered, lambda id: self[int(id)], encoder, key, self.cache_dir)

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
        encoder = PromptEncoder(tokenizer, max_prompt_length, overlong, self.name, self.bad_rows)
        if is_live(self.source):
            key = self._fingerprint(self._stream_name, encoder)
            return LiveFeed(LiveSource.of(self.source), self._arrived, encoder, key, seed, shuffle)
        if streaming:
            return StreamFeed(self._streamed, encoder, self._fingerprint(self._stream_name, encoder), seed, shuffle)
        return OrderedFeed(
            self.prompts(tokenizer, max_prompt_length=max_prompt_length, overlong=overlong), seed, shuffle
        )

    def chosen(
        self,
        rows: Sequence[int],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_length: int,
        overlong: Overlong = "truncate",
    ) -> list[Prompt]:
        """The prompts of these rows alone, just as ``prompts`` would give them; none may be one that it leaves out."""
        encoder = PromptEncoder(tokenizer, max_prompt_length, overlong, self._finite(), self.bad_rows)
        return encoder([(str(row), self[row]) for row in rows])

    @property
    def _stream_name(self) -> str:
        return f"stream of {self.name} {sorted(self.columns.items())}"

    def _finite(self) -> str:
        """The data set's name; DataError for a live source, which has no end."""
        if is_live(self.source):
            raise DataError(f"{self.name} has no end: it is trained on, not evaluated on or measured")
        return self.name

    def _fingerprint(self, content: str, encoder: PromptEncoder | ExampleEncoder) -> str:
        parts = [TOKENISING, content, chat.fingerprint(encoder.tokenizer), *encoder.settings]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def open_prompts(
    source: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    overlong: Overlong = "truncate",
    columns: Mapping[str, str] | None = None,
    cache_dir: str | Path | None = None,
    bad_rows: BadRowPolicy | None = None,
) -> Prompts:
    """The tokenised prompts of anything that ``PromptDataset`` takes, or of a data set made before."""
    dataset = PromptDataset.of(source, columns, cache_dir=cache_dir, bad_rows=bad_rows)
    return dataset.prompts(tokenizer, max_prompt_length=max_prompt_length, overlong=overlong)


class ExampleDataset(PromptDataset):
    """Rows that an offline algorithm trains on; also a source of prompts."""

    def examples(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_length: int,
        max_response_length: int,
        overlong: Overlong = "truncate",
    ) -> Examples:
        """Every example, tokenised. The two limits together are the limit of prompt and completion together."""
        limit = max_prompt_length + max_response_length
        encoder = ExampleEncoder(tokenizer, self.kind, limit, overlong, self._finite(), self.bad_rows)
        key = self._fingerprint(self.content, encoder)
        return Examples.encode(partial(self._numbered, split=True), self._example_row, encoder, key, self.cache_dir)

    def example_feed(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_length: int,
        max_response_length: int,
        overlong: Overlong = "truncate",
        seed: int = 0,
        shuffle: bool = True,
        streaming: bool = False,
    ) -> ExampleFeed:
        """Examples in training order. ``streaming``: read and tokenised while training, never all held."""
        limit = max_prompt_length + max_response_length
        encoder = ExampleEncoder(tokenizer, self.kind, limit, overlong, self.name, self.bad_rows)
        key = self._fingerprint(self._stream_name, encoder)
        if is_live(self.source):
            arrived = partial(self._arrived, split=True)
            return LiveFeed(LiveSource.of(self.source), arrived, encoder, key, seed, shuffle)
        if streaming:
            return StreamFeed(partial(self._streamed, split=True), encoder, key, seed, shuffle)
        limits: Any = {"max_prompt_length": max_prompt_length, "max_response_length": max_response_length}
        return OrderedFeed(self.examples(tokenizer, overlong=overlong, **limits), seed, shuffle)

    def _example_row(self, id: str) -> dict[str, Any]:
        number, _, side = id.partition("/")
        return side_of(self[int(number)], side) if side else self[int(number)]


class PreferenceDataset(ExampleDataset):
    """Rows with ``prompt``, ``chosen`` and ``rejected``.

    hh-rlhf (two whole dialogues), UltraFeedback binarised and TRL's standard and conversational forms are recognised.
    """

    kind = "pairs"


class LabelledDataset(ExampleDataset):
    """Rows with ``prompt``, ``completion`` and a bool ``label``; of a set of pairs, each row's two sides."""

    kind = "labelled"


class ChatDataset(ExampleDataset):
    """Conversations of which the assistant's turns are trained: ``messages``, or ``prompt`` and ``completion``."""

    kind = "chats"


DATASETS: dict[Kind, type[ExampleDataset]] = {d.kind: d for d in (PreferenceDataset, LabelledDataset, ChatDataset)}


def open_examples(
    source: Any,
    tokenizer: PreTrainedTokenizerBase,
    kind: Kind,
    *,
    max_prompt_length: int,
    max_response_length: int,
    overlong: Overlong = "truncate",
    columns: Mapping[str, str] | None = None,
    cache_dir: str | Path | None = None,
    bad_rows: BadRowPolicy | None = None,
    seed: int = 0,
    shuffle: bool = True,
    streaming: bool = False,
) -> ExampleFeed:
    """Examples of ``kind`` ("pairs", "labelled" or "chats") in training order.

    ``source``: anything that ``PromptDataset`` takes, or a data set made before, also one of another kind.
    """
    dataset = DATASETS[kind].of(source, columns, cache_dir=cache_dir, bad_rows=bad_rows)
    return dataset.example_feed(
        tokenizer,
        max_prompt_length=max_prompt_length,
        max_response_length=max_response_length,
        overlong=overlong,
        seed=seed,
        shuffle=shuffle,
        streaming=streaming,
    )


def open_example_set(
    source: Any,
    tokenizer: PreTrainedTokenizerBase,
    kind: Kind,
    *,
    max_prompt_length: int,
    max_response_length: int,
    overlong: Overlong = "truncate",
    columns: Mapping[str, str] | None = None,
    cache_dir: str | Path | None = None,
    bad_rows: BadRowPolicy | None = None,
) -> Examples:
    """All examples of ``kind`` with random access, in the data set's order; see ``open_examples``."""
    dataset = DATASETS[kind].of(source, columns, cache_dir=cache_dir, bad_rows=bad_rows)
    return dataset.examples(
        tokenizer, max_prompt_length=max_prompt_length, max_response_length=max_response_length, overlong=overlong
    )
