"""Tokenised prompts: the length policy, a compact table of ids, and the two ways to draw from a data set."""

from __future__ import annotations

import json
import os
import random
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from verl.config.errors import DataError
from verl.data import chat
from verl.data.order import PromptOrder

if TYPE_CHECKING:
    import pyarrow
    from transformers import PreTrainedTokenizerBase

Overlong = Literal["truncate", "filter", "error"]
Numbered = tuple[int, dict[str, Any]]
MOST_PROBLEMS = 5  # bad rows told in one message


@dataclass(frozen=True)
class Prompt:
    """One prompt as the policy gets it."""

    id: str  # its row number in the data set, from 0
    ids: tuple[int, ...]  # template, header and BOS included
    text: str  # what ``ids`` say
    fields: dict[str, Any]  # every column of the row; ``prompt`` is the raw text or messages


@dataclass
class PromptEncoder:
    """Renders and tokenises rows under a length policy and counts what happens to them.

    A prompt's length is that of the rendered template, in tokens. Longer than ``max_length``: ``truncate`` keeps the
    last ``max_length`` ids, so the generation header survives; ``filter`` leaves the row out; ``error`` raises.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    overlong: Overlong = "truncate"
    where: str = "the data set"
    counts: dict[str, int] = field(default_factory=lambda: {"kept": 0, "filtered": 0, "truncated": 0})

    def __post_init__(self) -> None:
        header = chat.header_ids(self.tokenizer)
        if self.max_length <= len(header):
            raise DataError(f"max_prompt_length {self.max_length} has no room beside the {len(header)}-token header")

    def __call__(self, rows: Sequence[Numbered]) -> list[Prompt]:
        """The prompts of the rows that stay, in order. DataError names every row that can't be used."""
        problems: list[str] = []
        texts: list[str] = []
        rendered: list[Numbered] = []
        for number, row in rows:
            try:
                texts.append(chat.render_text(self.tokenizer, row["prompt"]))
                rendered.append((number, row))
            except DataError as error:
                problems.append(f"row {number}: {error}")
        prompts = []
        for (number, row), text, ids in zip(rendered, texts, chat.encode(self.tokenizer, texts), strict=True):
            if not ids:
                problems.append(f"row {number}: the tokenizer makes no token of prompt {text!r:.40}")
            elif len(ids) <= self.max_length:
                prompts.append(Prompt(str(number), tuple(ids), text, row))
            elif self.overlong == "error":
                problems.append(f"row {number}: prompt has {len(ids)} tokens, max_prompt_length is {self.max_length}")
            elif self.overlong == "filter":
                self.counts["filtered"] += 1
            else:
                self.counts["truncated"] += 1
                ids = ids[-self.max_length :]
                text = str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
                prompts.append(Prompt(str(number), tuple(ids), text, row))
        self.counts["kept"] += len(prompts)
        raise_problems(self.where, problems)
        return prompts

    def nothing_left(self) -> DataError:
        return DataError(
            f"{self.where}: 0 rows after filtering: all {self.counts['filtered']} prompts have more than "
            f"max_prompt_length {self.max_length} tokens"
        )


def raise_problems(where: str, problems: Sequence[str]) -> None:
    """One DataError for all bad rows; the first few in words."""
    if problems:
        more = f"; and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
        raise DataError(f"{where}: " + "; ".join(problems[:MOST_PROBLEMS]) + more)


class Prompts(Sequence[Prompt]):
    """All prompts of a data set that passed the length policy, tokenised once.

    ``table`` has ``row`` (int64, number in the data set), ``ids`` (list of int32) and ``text``; ``fields`` reads a
    row's columns. ``counts``: kept, filtered, truncated. ``fingerprint`` changes with data, template, tokenizer
    and limits; a checkpoint keeps it to know its data again.
    """

    def __init__(
        self, table: pyarrow.Table, fields: Callable[[int], dict[str, Any]], counts: dict[str, int], fingerprint: str
    ) -> None:
        self._table, self._fields, self.counts, self.fingerprint = table, fields, counts, fingerprint

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row, ids, text = (self._table.column(name)[index].as_py() for name in ("row", "ids", "text"))
        return Prompt(str(row), tuple(ids), text, self._fields(row))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        import pyarrow.compute

        return pyarrow.compute.list_value_length(self._table.column("ids")).to_pylist()


def encode_all(
    rows: Callable[[], Iterable[Numbered]],
    fields: Callable[[int], dict[str, Any]],
    encoder: PromptEncoder,
    fingerprint: str,
    cache_dir: str | Path | None,
) -> Prompts:
    """Tokenise every row, or read the table that an earlier run left in ``cache_dir`` for the same fingerprint."""
    import pyarrow

    file = Path(cache_dir) / f"prompts-{fingerprint}.arrow" if cache_dir is not None else None
    if file is not None and file.exists():
        try:
            table = pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).read_all()
        except pyarrow.ArrowException as error:
            raise DataError(f"the cached prompts in {file} can't be read ({error}): delete the file") from error
        return Prompts(table, fields, json.loads(table.schema.metadata[b"counts"]), fingerprint)
    schema = pyarrow.schema(
        [("row", pyarrow.int64()), ("ids", pyarrow.list_(pyarrow.int32())), ("text", pyarrow.large_string())]
    )
    parts = []
    for chunk in _chunks(rows(), 1000):
        prompts = encoder(chunk)
        columns = [[int(p.id) for p in prompts], [p.ids for p in prompts], [p.text for p in prompts]]
        parts.append(pyarrow.table(columns, schema=schema))
    table = pyarrow.concat_tables(parts) if parts else schema.empty_table()
    if not table.num_rows:
        raise encoder.nothing_left()
    table = table.combine_chunks().replace_schema_metadata({"counts": json.dumps(encoder.counts)})
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{uuid.uuid4().hex}.partial")
        with pyarrow.ipc.new_file(str(partial), table.schema) as writer:
            writer.write_table(table)
        os.replace(partial, file)  # whole or not at all, also when two runs write it
    return Prompts(table, fields, dict(encoder.counts), fingerprint)


def _chunks(rows: Iterable[Numbered], size: int) -> Iterator[list[Numbered]]:
    chunk: list[Numbered] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


class PromptFeed(Protocol):
    """Prompts in training order; the position is part of a checkpoint."""

    fingerprint: str

    @property
    def counts(self) -> Mapping[str, int]:
        """Rows kept, filtered, truncated."""

    @property
    def size(self) -> int | None:
        """Prompts per epoch; None when only the end of a stream could tell."""

    @property
    def epoch(self) -> float:
        """Epochs drawn so far; whole ones only when the size is not known."""

    def take(self, k: int) -> list[Prompt]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class OrderedFeed:
    """Draws from tokenised prompts in a ``PromptOrder``."""

    def __init__(self, prompts: Prompts, seed: int, shuffle: bool) -> None:
        self.prompts, self.order = prompts, PromptOrder(len(prompts), seed, shuffle)
        self.fingerprint = prompts.fingerprint

    @property
    def counts(self) -> Mapping[str, int]:
        return self.prompts.counts

    @property
    def size(self) -> int | None:
        return len(self.prompts)

    @property
    def epoch(self) -> float:
        return self.order.epoch

    def take(self, k: int) -> list[Prompt]:
        return [self.prompts[i] for i in self.order.take(k)]

    def state(self) -> dict[str, Any]:
        return self.order.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.order.restore(state)


class StreamFeed:
    """Reads the data set anew each epoch and tokenises what is drawn; at most ``buffer`` rows are held.

    Shuffling is that of a buffer: a random row of it leaves when the next one comes in, as a function of
    ``(seed, epoch)``. ``restore`` reads up to the saved position again without tokenising. Row errors and
    ``overlong: error`` can only show up when the row is drawn.
    """

    def __init__(
        self,
        rows: Callable[[], Iterable[Numbered]],
        encoder: PromptEncoder,
        fingerprint: str,
        seed: int,
        shuffle: bool,
        buffer: int = 1000,
    ) -> None:
        self._rows, self._encoder, self.fingerprint = rows, encoder, fingerprint
        self.seed, self.shuffle, self.buffer = seed, shuffle, buffer
        self._epoch, self._drawn = 0, 0  # whole epochs; rows drawn in this one, filtered ones too
        self._kept_before = 0  # `kept` when the epoch began
        self._left: Iterator[Numbered] | None = None

    @property
    def counts(self) -> Mapping[str, int]:
        return self._encoder.counts

    @property
    def size(self) -> int | None:
        return None

    @property
    def epoch(self) -> float:
        return float(self._epoch)

    def take(self, k: int) -> list[Prompt]:
        """The next ``k`` prompts; may cross into the next epoch."""
        prompts: list[Prompt] = []
        while len(prompts) < k:
            drawn = self._draw(k - len(prompts))
            if drawn:
                prompts += self._encoder(drawn)
                continue
            if self._encoder.counts["kept"] == self._kept_before:
                raise self._encoder.nothing_left()
            self._epoch, self._drawn, self._left = self._epoch + 1, 0, None
            self._kept_before = self._encoder.counts["kept"]
        return prompts

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "drawn": self._drawn,
            "kept_before": self._kept_before,
            "counts": dict(self._encoder.counts),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "buffer": self.buffer,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken; DataError for another seed or buffer, or when the stream got shorter."""
        for name in ("seed", "shuffle", "buffer"):
            if state[name] != getattr(self, name):
                raise DataError(
                    f"the saved data position is for {name} {state[name]}, this run has {getattr(self, name)}"
                )
        self._epoch, self._drawn, self._left = int(state["epoch"]), 0, None
        self._draw(int(state["drawn"]), keep=False)
        if self._drawn != int(state["drawn"]):
            raise DataError(
                f"{self._encoder.where} ends after {self._drawn} rows, the saved position is {state['drawn']}"
            )
        self._kept_before = int(state["kept_before"])
        self._encoder.counts.update(state["counts"])

    def _draw(self, k: int, keep: bool = True) -> list[Numbered]:
        if self._left is None:
            self._left = self._shuffled() if self.shuffle else iter(self._rows())
        drawn = []
        for _ in range(k):
            row = next(self._left, None)
            if row is None:
                break
            self._drawn += 1
            if keep:
                drawn.append(row)
        return drawn

    def _shuffled(self) -> Iterator[Numbered]:
        rng = random.Random(f"{self.seed}/{self._epoch}")
        held: list[Numbered] = []
        for row in self._rows():
            if len(held) < self.buffer:
                held.append(row)
                continue
            place = rng.randrange(self.buffer)
            held[place], row = row, held[place]
            yield row
        rng.shuffle(held)
        yield from held
