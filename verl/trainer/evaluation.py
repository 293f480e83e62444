"""What the policy makes of held-out rows: greedy answers, scored, or the loss's numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.data.loader import Prompt
from verl.metrics.names import member
from verl.metrics.record import mean_present
from verl.runtime.collect import Collected, Sampler
from verl.runtime.controller import Controller
from verl.workers.rollout import Draw


@dataclass
class Answer:
    """A held-out prompt and its greedy answer."""

    prompt: str
    response: str
    reward: float | None


@dataclass
class Evaluation:
    """Greedy answers on the held-out set after ``step`` laps; metrics are named as in docs/metrics.md."""

    step: int
    metrics: dict[str, float]
    answers: list[Answer] = field(repr=False)


async def evaluate(controller: Controller, rows: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> Evaluation:
    """Of prompts greedy answers by the newest weights, scored as the run does; of other rows the loss's numbers."""
    start = time.perf_counter()
    answers: list[Answer] = []
    if isinstance(sampler := controller.source, Sampler):
        await controller.publish()
        collected = await sampler.sample([Draw(i, prompt) for i, prompt in enumerate(rows)], 1, sampler.greedy)
        shown = await sampler.show(collected.rows)
        await controller.crew.everywhere("empty_pool")
        metrics = _metrics(collected)
        answers = [
            Answer(_question(row.draw.prompt), told.text(tokenizer), total)
            for row, told, total in zip(collected.rows, shown, collected.scores.totals, strict=True)
        ]
    else:
        judged = await controller.judge(rows)
        metrics = {f"eval/{name.rpartition('/')[2]}": value for name, value in judged.items()}
        metrics["eval/rows"] = float(len(rows))
    metrics["time/eval"] = time.perf_counter() - start
    return Evaluation(controller.step, metrics, answers)


def _question(prompt: Prompt) -> str:
    """The prompt as its author wrote it; of a dialogue the last turn."""
    asked = prompt.fields.get("prompt", prompt.text)
    return asked if isinstance(asked, str) else str(asked[-1]["content"])


def _metrics(collected: Collected) -> dict[str, float]:
    rows, totals = collected.rows, collected.scores.totals
    reward, scored = mean_present(totals)
    metrics: dict[str, float | None] = {
        "eval/reward_mean": reward,
        "eval/accuracy": sum(t is not None and t >= 1 for t in totals) / scored if scored else None,
        "eval/length_mean": sum(row.length for row in rows) / len(rows),
        "eval/truncated": sum(row.finish_reason == "length" for row in rows) / len(rows),
        "eval/rows": len(rows),
    }
    for name, values in (collected.scores.per_reward | collected.scores.extra).items():
        metrics[member("eval/<name>", name)] = mean_present(values)[0]
    return {name: float(value) for name, value in metrics.items() if value is not None}
