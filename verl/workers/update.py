"""The optimizer steps of one lap, and what they amounted to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl.batch import Batch
from verl.engines.base import LossFn, TrainEngine, UpdateReport
from verl.models.packing import send
from verl.seats import MiniBatch


@dataclass
class Steps:
    """Sums over the lap's mini-batches; ``norms``: gradient norms of the steps that were made."""

    sums: dict[str, float] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    lr: float = 0.0
    empty: int = 0
    bad: int = 0

    def mean(self, name: str, count: str) -> float | None:
        """``name / count``; None when nothing was counted."""
        return self.sums[name] / self.sums[count] if self.sums.get(count) else None

    @property
    def loss(self) -> float:
        """Mean over the steps that were made."""
        return self.sums.get("loss", 0.0) / max(1, len(self.norms))

    @property
    def grad_norm(self) -> float:
        return sum(self.norms) / len(self.norms) if self.norms else 0.0

    def policy_metrics(self) -> dict[str, float | None]:
        return {
            "policy/loss": self.loss,
            "policy/grad_norm": self.grad_norm,
            "policy/lr": self.lr,
            "policy/optimizer_steps": len(self.norms),
            "policy/empty_steps": self.empty,
            "policy/bad_steps": self.bad,
        }


def mask_and_row(rows: Batch) -> tuple[Tensor, Tensor]:
    """Of each response token, whether it is in the loss, and its row's number: both ``[R]`` where the mask lies, of
    which nothing is asked."""
    column = rows.ragged("response_mask")
    row = torch.arange(len(rows)).repeat_interleave(column.lengths, output_size=len(column.values))
    return column.values, send(row, column.values.device)


def run_steps(
    engine: TrainEngine,
    batch: Batch,
    mini_batches: Sequence[MiniBatch],
    loss_of: Callable[[MiniBatch], LossFn],
    want: set[str],
    temperature: float = 1.0,
) -> Steps:
    """One optimizer step per mini-batch. ``loss_of`` is asked when its mini-batch's turn comes, before the step."""
    steps, report = Steps(), UpdateReport()
    for mini in mini_batches:
        done = engine.update(batch, mini.ranks[0], loss_of(mini), frozenset(want), temperature)
        report.add(done.stats)
        steps.lr = done.lr
        if done.skipped is None:
            steps.norms.append(done.grad_norm)
        steps.empty += done.skipped == "empty"
        steps.bad += done.skipped == "nonfinite"
    steps.sums = report.stats
    return steps
