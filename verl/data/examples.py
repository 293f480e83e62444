"""What an offline algorithm trains on: a prompt with one completion, or with a chosen and a rejected one, as ids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl.config.errors import DataError
from verl.data import chat
from verl.data.feeds import Feed
from verl.data.masks import encode_chat
from verl.data.pairs import TooLong, encode_completions, room_for
from verl.data.policies import BadRowPolicy, BadRows, Numbered, Overlong
from verl.data.rows import SIDES, Kind
from verl.data.tables import Encoded

if TYPE_CHECKING:
    import pyarrow
    from transformers import PreTrainedTokenizerBase


Side = tuple[list[int], list[bool]]


@dataclass(frozen=True)
class Completion:
    """What follows the prompt; ends with an end-of-sequence token unless it was cut. ``ids`` and ``mask``: ``[R]``."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]  # True on tokens that are trained, at least one
    text: str  # what ``ids`` say, special tokens left off


@dataclass(frozen=True)
class Example:
    """One row of an offline algorithm. Pairs have two completions, chosen first; both continue the same prompt ids."""

    id: str  # its row number, from 0; ``7/chosen`` and ``7/rejected`` where a pair is read as two labelled rows
    prompt_ids: tuple[int, ...]  # template, header and BOS included
    prompt_text: str  # as rendered
    completions: tuple[Completion, ...]  # one, or (chosen, rejected)
    label: bool | None  # labelled rows: whether the completion is desirable
    margin: float | None  # pairs: by how much chosen is better, from the column ``margin`` and no other
    fields: dict[str, Any]  # every column of the row


ExampleFeed = Feed[Example]


@dataclass
class ExampleEncoder:
    """Renders and tokenises rows of one kind under a length policy and counts what happens to them.

    ``max_length`` counts prompt and completion together: ``truncate`` cuts the end of a completion, never the prompt;
    a row of which no trained token would be left is filtered; ``filter`` leaves out what is too long; ``error`` raises.
    """

    tokenizer: PreTrainedTokenizerBase
    kind: Kind
    max_length: int
    overlong: Overlong = "truncate"
    where: str = "the data set"
    bad_rows: BadRowPolicy = "error"
    counts: dict[str, int] = field(default_factory=lambda: {"kept": 0, "filtered": 0, "truncated": 0})

    def __post_init__(self) -> None:
        self.bad = BadRows(self.where, self.bad_rows, self.counts)

    @property
    def settings(self) -> list[Any]:
        """What a fingerprint covers beside data and tokenizer."""
        return [self.kind, self.max_length, self.overlong, self.bad_rows]

    def __call__(self, rows: Sequence[Numbered]) -> list[Example]:
        """The examples of the rows that stay, in order. DataError names the rows that can't be used."""
        examples = []
        for number, row in rows:
            try:
                example = self._encode(number, row)
            except TooLong as error:
                self.bad.refuse(number, error)
            except DataError as error:
                self.bad.add(number, error)
            else:
                examples += [example] if example is not None else []
        self.counts["kept"] += len(examples)
        self.bad.check()
        return examples

    def nothing_left(self) -> DataError:
        bad = self.counts.get("bad", 0)
        return DataError(
            f"{self.where}: 0 rows after filtering: all {self.counts['filtered']} rows are longer than "
            f"{self.max_length} tokens, prompt and completion together"
            + (f"; {bad} bad rows were left out" if bad else "")
        )

    def _encode(self, number: str, row: Mapping[str, Any]) -> Example | None:
        """None: the length policy leaves the row out."""
        text, prompt, sides = self._sides(row)
        margin = _margin(row) if self.kind == "pairs" else None
        longest = max(len(ids) for ids, _ in sides.values())
        room = room_for(
            len(prompt), {name: len(ids) for name, (ids, _) in sides.items()}, self.max_length, self.overlong
        )
        if room is None or not all(any(mask[:room]) for _, mask in sides.values()):
            self.counts["filtered"] += 1
            return None
        self.counts["truncated"] += longest > room
        completions = tuple(self._cut(ids[:room], mask[:room]) for ids, mask in sides.values())
        label = row["label"] if self.kind == "labelled" else None
        return Example(number, tuple(prompt), text, completions, label, margin, dict(row))

    def _cut(self, ids: list[int], mask: list[bool]) -> Completion:
        end = len(mask) - mask[::-1].index(True)  # what a cut leaves of the turns of others teaches nothing
        text = self.tokenizer.decode(ids[:end], skip_special_tokens=True)
        return Completion(tuple(ids[:end]), tuple(mask[:end]), str(text))

    def _sides(self, row: Mapping[str, Any]) -> tuple[str, list[int], dict[str, Side]]:
        """Prompt text and ids, and by its column each completion's ids and mask."""
        if self.kind == "chats" and "completion" not in row:
            return self._turns({"completion": row["messages"]})
        names = SIDES if self.kind == "pairs" else ("completion",)
        said = [row[name] for name in names]
        if any(isinstance(turns, list) and (len(turns) > 1 or turns[0].get("weight") == 0) for turns in said):
            return self._turns({name: chat.as_messages(row[name]) for name in names}, chat.as_messages(row["prompt"]))
        text = chat.render_text(self.tokenizer, row["prompt"])
        prompt, *sides = encode_completions(self.tokenizer, row["prompt"], said)
        return text, prompt, {name: (ids, [True] * len(ids)) for name, ids in zip(names, sides, strict=True)}

    def _turns(
        self, chats: Mapping[str, list[chat.Message]], before: Sequence[chat.Message] = ()
    ) -> tuple[str, list[int], dict[str, Side]]:
        """Conversations that begin alike: the prompt ends before the first token that one of them trains."""
        encoded = {name: encode_chat(self.tokenizer, messages, before) for name, messages in chats.items()}
        first = min(mask.index(True) for _, mask, _ in encoded.values())
        if len(chats) > 1:
            first = min(first, chat.shared_start(*(ids for ids, _, _ in encoded.values())))
        sides = {name: (ids[first:], mask[first:]) for name, (ids, mask, _) in encoded.items()}
        ids, _, text = next(iter(encoded.values()))
        return text, ids[:first], sides


def _margin(row: Mapping[str, Any]) -> float | None:
    """The column ``margin``. Scores are on a scale of their own and would change the objective unasked."""
    value = row.get("margin")
    if value in (None, ""):
        return None
    try:
        margin = float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise DataError(f"margin: {value!r:.40}, not a finite number")
    return margin


class Examples(Encoded[Example]):
    """All examples of a data set; see ``Encoded``."""

    @staticmethod
    def _schema() -> pyarrow.Schema:
        import pyarrow as pa

        ids, text = pa.large_list(pa.int32()), pa.large_string()
        completion = pa.struct([("ids", ids), ("mask", pa.large_list(pa.bool_())), ("text", text)])
        columns = {"id": pa.string(), "prompt_ids": ids, "prompt_text": text, "completions": pa.large_list(completion)}
        return pa.schema([*columns.items(), ("label", pa.bool_()), ("margin", pa.float64())])

    @classmethod
    def _columns(cls, items: Sequence[Example]) -> list[list[Any]]:
        return [
            [[vars(c) for c in e.completions] if name == "completions" else getattr(e, name) for e in items]
            for name in cls._schema().names
        ]

    def _item(self, row: dict[str, Any]) -> Example:
        sides = tuple(Completion(tuple(c["ids"]), tuple(c["mask"]), c["text"]) for c in row.pop("completions"))
        row["prompt_ids"] = tuple(row["prompt_ids"])
        return Example(**row, completions=sides, fields=self._fields(row["id"]))
