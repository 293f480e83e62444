"""The algorithm's own numbers; everything else (KL, batch sizes) belongs to the run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from verl.config.section import Section

AlgorithmName = Literal["ppo", "grpo", "rloo"]
Reduction = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

# Keys that only some algorithms read; set to something else than the default elsewhere, the start says so.
READ_ONLY_BY: dict[str, tuple[AlgorithmName, ...]] = {
    "scale": ("grpo",),
    "allow_singletons": ("grpo", "rloo"),
    "gamma": ("ppo",),
    "lam": ("ppo",),
    "whiten_advantages": ("ppo",),
    "value_clip": ("ppo",),
}


class AlgorithmConfig(Section):
    """See docs/algorithms.md for each formula."""

    name: AlgorithmName = Field("ppo", description="how rewards become advantages; ppo has a critic")
    update_epochs: int = Field(1, ge=1, description="passes over each lap's batch")
    clip_ratio: float | None = Field(None, gt=0, lt=1, description="symmetric clip of the ratio; default 0.2")
    clip_ratio_low: float | None = Field(None, gt=0, lt=1, description="asymmetric clip, needs clip_ratio_high too")
    clip_ratio_high: float | None = Field(None, gt=0, description="asymmetric clip, needs clip_ratio_low too")
    dual_clip: float | None = Field(None, gt=1, description="c of min(., -cA) where A < 0; null: off")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    loss_reduction: Reduction = Field("token-mean", description="how token losses become one number per mini-batch")
    scale: Literal["std", "none"] = Field(
        "std", description="grpo: divide by the group's standard deviation, or not (Dr.GRPO)"
    )
    allow_singletons: bool = Field(
        False, description="grpo, rloo: a group of one row gets advantage 0 instead of an error"
    )
    kl_in: Literal["reward", "loss"] | None = Field(
        None, description="where the KL penalty acts; default: reward for ppo and rloo, loss for grpo"
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] = Field("k3", description="for KL in the loss and for the metric")
    gamma: float = Field(1.0, ge=0, le=1, description="ppo: discount per token")
    lam: float = Field(1.0, ge=0, le=1, description="ppo: lambda of GAE")
    whiten_advantages: bool = Field(True, description="ppo: mean 0 and variance 1 over the batch's tokens")
    value_clip: float | None = Field(0.5, gt=0, description="ppo: most that a value may move in one lap; null: off")

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
