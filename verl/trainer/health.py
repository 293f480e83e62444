"""When optimizer steps are skipped one after another: the count, and the rows as a file to look at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.data.examples import Example
from verl.metrics.sinks import JsonLines
from verl.runtime.collect import Collected

ROLES = {
    "policy": "actor",
    "critic": "critic",
    "process_reward": "process_reward",
}  # whose steps, by how their metrics begin


class SkippedSteps:
    """Optimizer steps in a row that were skipped for a gradient that isn't finite, over laps.

    A lap tells how many were skipped and whether one was made, not in which order: one that was made ends the row.
    """

    def __init__(self) -> None:
        self.by_role = dict.fromkeys(ROLES.values(), 0)

    def see(self, metrics: Mapping[str, float | None]) -> None:
        for family, role in ROLES.items():
            if metrics.get(f"{family}/grad_norm"):  # of the steps that were made; 0 where none was
                self.by_role[role] = 0
            else:
                self.by_role[role] += int(metrics.get(f"{family}/bad_steps") or 0)


def write_rows(path: Path, step: int, rows: Iterable[dict[str, Any]]) -> None:
    """A file of JSON lines, in place of an older one; numbers that JSON lacks are texts."""
    lines = JsonLines(path)
    try:
        for row in rows:
            lines.append({"step": step, **row})
    finally:
        lines.close()


def sampled_rows(collected: Collected, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
    """All rows of a lap; the response's text and ids of those whose tokens were told."""
    scores = collected.scores
    for i, row in enumerate(collected.rows):
        told, prompt = collected.shown.get(i), row.draw.prompt
        yield {
            "row_id": row.id,
            "prompt": prompt.text,
            "response": None if told is None else told.text(tokenizer),
            "reward": _number(scores.totals[i]),
            "rewards": {name: _number(values[i]) for name, values in (scores.per_reward | scores.extra).items()},
            "length": row.length,
            "finish_reason": row.finish_reason,
            "logprob": _number(row.logprobs),
            "version": row.version,
            "prompt_ids": list(prompt.ids),
            "response_ids": None if told is None else told.ids.tolist(),
        }


def example_rows(examples: Sequence[Example]) -> Iterator[dict[str, Any]]:
    """Rows of the data set, one for each completion."""
    for example in examples:
        sides = ("chosen", "rejected") if len(example.completions) == 2 else ("completion",)
        for side, said in zip(sides, example.completions, strict=True):
            yield {
                "row_id": example.id,
                "side": side,
                "prompt": example.prompt_text,
                "response": said.text,
                "label": example.label,
                "margin": _number(example.margin),
                "length": len(said.ids),
                "prompt_ids": list(example.prompt_ids),
                "response_ids": list(said.ids),
            }


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
