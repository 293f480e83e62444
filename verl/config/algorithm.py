"""The algorithm's own numbers; everything else (KL, batch sizes) belongs to the run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from verl.config.model import Section

AlgorithmName = Literal["ppo", "grpo", "rloo"]
Reduction = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


class AlgorithmConfig(Section):
    """See docs/algorithms.md for each formula."""

    name: AlgorithmName
    update_epochs: int = Field(1, ge=1)  # passes over each lap's batch
    clip_ratio: float | None = Field(None, gt=0, lt=1)  # symmetric clip; default 0.2
    clip_ratio_low: float | None = Field(None, gt=0, lt=1)  # asymmetric clip needs both
    clip_ratio_high: float | None = Field(None, gt=0)
    dual_clip: float | None = Field(None, gt=1)  # c of min(., -cA) for A < 0
    entropy_coef: float = Field(0.0, ge=0)
    loss_reduction: Reduction = "token-mean"
    scale: Literal["std", "none"] = "std"  # GRPO: divide by the group's standard deviation, or not (Dr.GRPO)
    allow_singletons: bool = False  # a group of one row gets advantage 0 instead of an error
    kl_in: Literal["reward", "loss"] | None = None  # default: reward for ppo and rloo, loss for grpo
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] = "k3"  # for KL in the loss and for the metric
    gamma: float = Field(1.0, ge=0, le=1)
    lam: float = Field(1.0, ge=0, le=1)
    whiten_advantages: bool = True  # ppo only
    value_clip: float | None = Field(0.5, gt=0)

    @property
    def clip_range(self) -> tuple[float, float]:
        """``(eps_low, eps_high)`` of the ratio's clip."""
        if self.clip_ratio_low is not None and self.clip_ratio_high is not None:
            return self.clip_ratio_low, self.clip_ratio_high
        both = 0.2 if self.clip_ratio is None else self.clip_ratio
        return both, both

    @property
    def kl_place(self) -> Literal["reward", "loss"]:
        """Where the KL penalty acts."""
        return self.kl_in or ("loss" if self.name == "grpo" else "reward")

    @property
    def needs_groups(self) -> bool:
        return self.name in ("grpo", "rloo")

    @property
    def needs_critic(self) -> bool:
        return self.name == "ppo"
