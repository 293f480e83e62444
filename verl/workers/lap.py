"""The small facts of one lap: what goes down to the workers and what comes back up."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.seats import MiniBatch, Seats


@dataclass
class Lap:
    """One lap's decisions. ``forward`` seats every row for passes without gradients, ``update`` the trained rows."""

    step: int  # 1-based
    kl_coef: float
    forward: Seats | None = None
    update: Seats | None = None  # mini-batches of all epochs, in order
    kl_per_response: float | None = None  # nats, what kl_target aims at
    metrics: dict[str, float | None] = field(default_factory=dict)

    @property
    def micro_batches(self) -> list[list[int]]:
        """Of the passes without gradients."""
        if self.forward is None:
            raise RuntimeError("rows are seated after collecting; no op may run before")
        return self.forward.rows(0)

    @property
    def forward_steps(self) -> list[MiniBatch]:
        """All rows as one optimizer step, for a model that learns from every row of the lap."""
        if self.forward is None:
            raise RuntimeError("rows are seated after collecting; no op may run before")
        return self.forward.mini_batches

    @property
    def mini_batches(self) -> list[MiniBatch]:
        """Of the updates."""
        if self.update is None:
            raise RuntimeError("rows are seated for the update before it starts")
        return self.update.mini_batches
