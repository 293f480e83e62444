"""What a training engine does: forward without gradients, one optimizer step, and giving its state away and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from verl.batch import Batch, Ragged
from verl.layout import Piece

Stats = Mapping[str, Tensor | float]
LossFn = Callable[[dict[str, Tensor], Batch], tuple[Tensor, Stats]]
"""``(outputs, micro-batch) -> (loss, statistics)``.

Outputs are flat ``[R]``, the micro-batch's rows in order; its token columns lie beside them, row columns where the
batch has them (on the host). The loss is already divided by the mini-batch's global totals, so the engine only adds.
Statistics are added too, or maximised where their name ends in ``_max``.

Statistics are numbers or detached scalars on the outputs' device. A loss function asks that device for nothing (no
``item``, ``tolist``, ``nonzero``, indexing by a mask): who asks waits until the forward is computed, and the backward
isn't queued meanwhile.
"""


@dataclass
class UpdateReport:
    """One optimizer step. ``skipped``: ``"empty"`` (no token carries loss), ``"nonfinite"`` (the gradient isn't
    finite), or ``None``. A skipped step changes no weight and no optimizer state; ``grad_norm`` is before clipping."""

    stats: dict[str, float] = field(default_factory=dict)
    grad_norm: float = 0.0
    lr: float = 0.0
    skipped: Literal["empty", "nonfinite"] | None = None

    def add(self, stats: Mapping[str, float]) -> None:
        """Statistics of one more micro-batch."""
        for name, value in stats.items():
            old = self.stats.get(name)
            if old is None:
                self.stats[name] = float(value)
            else:
                self.stats[name] = max(old, float(value)) if name.endswith("_max") else old + float(value)


def counted(parts: Sequence[Stats]) -> dict[str, float]:
    """Statistics of micro-batches together, as numbers: here, once, somebody waits for the device."""
    tensors = [value.double() for stats in parts for value in stats.values() if isinstance(value, Tensor)]
    found, report = iter(torch.stack(tensors).tolist() if tensors else ()), UpdateReport()
    for stats in parts:
        report.add({name: next(found) if isinstance(value, Tensor) else value for name, value in stats.items()})
    return report.stats


class TrainEngine(Protocol):
    """With several ranks, each has such an engine, with rows of its own, and all call the same methods together.

    Computes on rows of a batch: columns ``prompt_ids``, ``response_ids``, ``response_mask`` and, where rows share
    their prompt, ``group``. ``micro_batches`` are row numbers; rows of one micro-batch are computed together."""

    def forward(
        self, batch: Batch, micro_batches: Sequence[Sequence[int]], want: frozenset[str], temperature: float
    ) -> dict[str, Ragged]:
        """Outputs of every row, in batch order, one run of response tokens per row, without gradients.

        ``micro_batches`` must hold each row once, else ``ValueError``.
        """

    def update(
        self,
        batch: Batch,
        micro_batches: Sequence[Sequence[int]],
        loss_fn: LossFn,
        want: frozenset[str],
        temperature: float,
    ) -> UpdateReport:
        """One optimizer step on the sum of the micro-batches' losses, over all ranks; all get the same report."""

    def total(self, values: Sequence[float]) -> list[float]:
        """Each value added up over the ranks that hold different rows; every rank gives equally many, and all get the
        same sums."""

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        """The trained model's weights under Hugging Face's names (with LoRA the adapter's): whole tensors, one at a
        time, or the parameters themselves where they are whole already. Every rank iterates to the end."""

    def saved(self, optimizer: bool) -> tuple[Iterator[Piece], Iterator[Piece], dict[str, Any]]:
        """What this rank saves of ``shards`` and, if asked for, of the optimizer: its tensors by ``kind/parameter
        name``, and what JSON can hold. Of all ranks together, each tensor once. Every rank iterates the first to its
        end, then the second."""

    def restore(self, shards: Mapping[str, Any], tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Take back what any number of ranks ``saved``, put together. Every rank is given all of it: tensors, or what
        gives parts of one when it is indexed with slices. On as many ranks training goes on bit for bit (with
        ``adamw8bit``: to its rounding)."""
