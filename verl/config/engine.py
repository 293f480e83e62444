"""The generation engine and the run's housekeeping sections."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from verl.config.model import Section


class RolloutConfig(Section):
    """How responses are sampled."""

    engine: Literal["auto", "native"] = "auto"  # native: the trainer's own parameters generate
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)  # 0: off
    stop: list[str] = Field(default_factory=list)
    max_rows: int = Field(256, ge=1)  # rows decoded side by side


class CheckpointConfig(Section):
    """``checkpoints/step_N`` every ``every_steps`` laps (0: only at the end and on a signal); the newest ``keep`` stay."""

    every_steps: int = Field(50, ge=0)
    keep: int = Field(2, ge=1)


class EvalConfig(Section):
    """Greedy answers on held-out prompts, scored by the run's own rewards, before, during and after training."""

    dataset: str | dict | None = None
    every_steps: int = Field(0, ge=0)  # 0: only before the first and after the last lap
    limit: int | None = Field(None, ge=1)  # first prompts of the set


class ClusterConfig(Section):
    """Where workers run. ``local``: in this process."""

    backend: Literal["local"] = "local"
