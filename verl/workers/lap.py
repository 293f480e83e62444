"""The small facts of one lap: what goes down to the workers and what comes back up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from verl.seats import MiniBatch, Seats


@dataclass(frozen=True)
class Mean:
    """A rank's part of a mean: sum and number of its own values."""

    total: float
    count: float

    @staticmethod
    def of(values: Tensor) -> Mean:
        return Mean(values.double().sum().item(), values.numel())


@dataclass(frozen=True)
class Most:
    """A rank's part of a maximum: the largest of its own values; None: it has none."""

    value: float | None

    @staticmethod
    def of(values: Tensor) -> Most:
        return Most(values.max().item() if len(values) else None)


Metric = float | Mean | Most | None
"""A plain number is the same on every rank."""


def merged(parts: Sequence[Mapping[str, Metric]]) -> dict[str, float | None]:
    """The metrics of one op, a part from each of its ranks: means and maxima over the values of all ranks (None where
    there are none), and plain numbers as the first part that has them says."""
    found: dict[str, float | None] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        if means := [value for value in values if isinstance(value, Mean)]:
            count = sum(mean.count for mean in means)
            found[name] = sum(mean.total for mean in means) / count if count else None
        elif mosts := [value for value in values if isinstance(value, Most)]:
            found[name] = max((most.value for most in mosts if most.value is not None), default=None)
        else:
            found[name] = next(value for value in values if not isinstance(value, Mean | Most))
    return found


@dataclass
class Lap:
    """One lap's decisions, as one rank of an op sees them: the seats hold that rank's rows alone, by their places in
    its batch, and the totals of all ranks. An op that has all rows together has no seats.

    ``forward`` seats every row for passes without gradients, ``update`` the trained rows. An op that sees all rows
    says in ``trained`` which of them have a loss.
    """

    step: int  # 1-based
    kl_coef: float
    forward: Seats | None = None
    update: Seats | None = None  # mini-batches of all epochs, in order
    kl_per_response: float | None = None  # nats, what kl_target aims at
    metrics: dict[str, Metric] = field(default_factory=dict)
    trained: list[bool] | None = None  # by row

    @property
    def micro_batches(self) -> list[list[int]]:
        """Of the passes without gradients."""
        return self._forward.rows(0)

    @property
    def forward_steps(self) -> list[MiniBatch]:
        """All rows as one optimizer step, for a model that learns from every row of the lap."""
        return self._forward.mini_batches

    @property
    def _forward(self) -> Seats:
        if self.forward is None:
            raise RuntimeError("rows are seated after collecting; no op may run before")
        return self.forward

    @property
    def mini_batches(self) -> list[MiniBatch]:
        """Of the updates."""
        if self.update is None:
            raise RuntimeError("rows are seated for the update before it starts")
        return self.update.mini_batches
