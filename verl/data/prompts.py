"""Tokenised prompts: the length policy and a compact table of ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from verl.config.errors import DataError
from verl.data import chat
from verl.data.feeds import Feed
from verl.data.policies import BadRowPolicy, BadRows, Numbered, Overlong
from verl.data.tables import Encoded

if TYPE_CHECKING:
    import pyarrow
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """One prompt as the policy gets it."""

    id: str  # its row number in the data set, from 0
    ids: tuple[int, ...]  # template, header and BOS included
    text: str  # what ``ids`` say
    fields: dict[str, Any]  # every column of the row; ``prompt`` is the raw text or messages


PromptFeed = Feed[Prompt]


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
    bad_rows: BadRowPolicy = "error"
    counts: dict[str, int] = field(default_factory=lambda: {"kept": 0, "filtered": 0, "truncated": 0})
    kind: ClassVar[str] = "prompts"

    def __post_init__(self) -> None:
        header = chat.header_ids(self.tokenizer)
        if self.max_length <= len(header):
            raise DataError(f"max_prompt_length {self.max_length} has no room beside the {len(header)}-token header")
        self.bad = BadRows(self.where, self.bad_rows, self.counts)

    @property
    def settings(self) -> list[Any]:
        """What a fingerprint covers beside data and tokenizer."""
        return [self.max_length, self.overlong, self.bad_rows]

    def __call__(self, rows: Sequence[Numbered]) -> list[Prompt]:
        """The prompts of the rows that stay, in order. DataError names the rows that can't be used."""
        texts: list[str] = []
        rendered: list[Numbered] = []
        for number, row in rows:
            try:
                texts.append(chat.render_text(self.tokenizer, row["prompt"]))
                rendered.append((number, row))
            except DataError as error:
                self.bad.add(number, error)
        prompts = []
        for (number, row), text, ids in zip(rendered, texts, chat.encode(self.tokenizer, texts), strict=True):
            if not ids:
                self.bad.add(number, f"the tokenizer makes no token of prompt {text!r:.40}")
            elif len(ids) <= self.max_length:
                prompts.append(Prompt(number, tuple(ids), text, row))
            elif self.overlong == "error":
                self.bad.refuse(number, f"prompt has {len(ids)} tokens, max_prompt_length is {self.max_length}")
            elif self.overlong == "filter":
                self.counts["filtered"] += 1
            else:
                self.counts["truncated"] += 1
                ids = ids[-self.max_length :]
                text = str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
                prompts.append(Prompt(number, tuple(ids), text, row))
        self.counts["kept"] += len(prompts)
        self.bad.check()
        return prompts

    def nothing_left(self) -> DataError:
        bad = self.counts.get("bad", 0)
        return DataError(
            f"{self.where}: 0 rows after filtering: all {self.counts['filtered']} prompts have more than "
            f"max_prompt_length {self.max_length} tokens" + (f"; {bad} bad rows were left out" if bad else "")
        )


class Prompts(Encoded[Prompt]):
    """All prompts of a data set; see ``Encoded``."""

    @staticmethod
    def _schema() -> pyarrow.Schema:
        import pyarrow

        ids = pyarrow.list_(pyarrow.int32())
        return pyarrow.schema([("row", pyarrow.int64()), ("ids", ids), ("text", pyarrow.large_string())])

    @classmethod
    def _columns(cls, items: Sequence[Prompt]) -> list[list[Any]]:
        return [[int(p.id) for p in items], [p.ids for p in items], [p.text for p in items]]

    def _item(self, row: dict[str, Any]) -> Prompt:
        return Prompt(str(row["row"]), tuple(row["ids"]), row["text"], self._fields(str(row["row"])))
