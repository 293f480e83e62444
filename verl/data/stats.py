"""Token lengths of a data set, and the limits that they suggest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data import chat
from verl.data.loader import PromptDataset
from verl.data.prompts import PromptEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESPONSES = ("response", "completion", "chosen", "rejected", "output")  # never `answer`: mostly a bare result


@dataclass(frozen=True)
class Lengths:
    """Tokens per text: percentiles are lengths that occur, the next one above."""

    count: int
    p50: int
    p90: int
    p95: int
    max: int

    @staticmethod
    def of(lengths: Sequence[int]) -> Lengths:
        p50, p90, p95 = (int(np.percentile(lengths, q, method="higher")) for q in (50, 90, 95))
        return Lengths(len(lengths), p50, p90, p95, max(lengths))


@dataclass(frozen=True)
class DataStats:
    """Lengths of the rendered prompts, and of the responses (end-of-sequence token included) where the set has any."""

    prompts: Lengths
    responses: Lengths | None

    @property
    def max_prompt_length(self) -> int:
        """Suggested: one prompt in twenty is longer."""
        return self.prompts.p95

    @property
    def max_response_length(self) -> int | None:
        """Suggested: one response in ten is longer; None without responses."""
        return self.responses.p90 if self.responses else None


def token_stats(source: Any, tokenizer: PreTrainedTokenizerBase, columns: Mapping[str, str] | None = None) -> DataStats:
    """Measure a data set (anything ``PromptDataset`` takes).

    Responses are the columns ``response``, ``completion``, ``chosen``, ``rejected`` and ``output``; others by
    ``columns``, e.g. ``{response: solution}``.
    """
    data = PromptDataset.of(source, columns)
    prompts: list[int] = []
    responses: list[int] = []
    rows = [(str(number), row) for number, row in enumerate(data)]
    encoder = PromptEncoder(tokenizer, max_length=2**31, where=data.name)
    for start in range(0, len(rows), 1000):
        part = rows[start : start + 1000]
        prompts += [len(prompt.ids) for prompt in encoder(part)]
        texts = [
            chat.render_completion(tokenizer, row["prompt"], said)
            for _, row in part
            for name in RESPONSES
            if (said := _said(row.get(name)))
        ]
        if texts:
            ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            responses += [len(i) + (i[-1:] != [tokenizer.eos_token_id]) for i in ids]
    return DataStats(Lengths.of(prompts), Lengths.of(responses) if responses else None)


def _said(value: Any) -> str | None:
    """The response's text; of messages, the last one's."""
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        value = value[-1].get("content")
    return value if isinstance(value, str) else None
