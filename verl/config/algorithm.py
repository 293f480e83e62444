"""The algorithm's own numbers; everything else (KL, batch sizes) belongs to the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator

from verl.config.recipes import RECIPES, Recipe
from verl.config.section import Section

Reduction = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
Correction = Literal["none", "tis", "tis_sequence", "icepop", "reject"]


BUILT_IN = frozenset(RECIPES)  # of which we know who reads which key


def _added_later(name: Any, in_table: ValidatorFunctionWrapHandler) -> str:
    """Recipes may join the table after this import; the others are refused with the list."""
    return name if isinstance(name, str) and name in RECIPES else in_table(name)


if TYPE_CHECKING:
    AlgorithmName = str
else:
    AlgorithmName = Annotated[Literal[tuple(RECIPES)], WrapValidator(_added_later)]


def read_only_by() -> dict[str, tuple[str, ...]]:
    """Keys that only some algorithms read; set to something else than the default elsewhere, the start says so."""

    def where(reads: Callable[[Recipe], bool]) -> tuple[str, ...]:
        return tuple(name for name, recipe in RECIPES.items() if reads(recipe))

    def by(*, advantage: tuple[str, ...] = (), loss: tuple[str, ...] = ()) -> tuple[str, ...]:
        return where(lambda r: r.advantage in advantage or r.loss in loss)

    sampled = where(lambda r: r.samples)
    updated = where(lambda r: r.advantage is not None)  # by a loss of algorithms/policy.py
    paired = where(lambda r: r.advantage is None and r.trains == "policy" and r.data in ("prompts", "pairs"))
    return {
        "clip_ratio": by(loss=("ppo", "gspo", "cispo", "gmpo", "clip_cov")),
        "clip_ratio_low": by(loss=("ppo", "gspo", "cispo", "gmpo", "clip_cov")),
        "clip_ratio_high": by(loss=("ppo", "gspo", "cispo", "gmpo", "clip_cov")),
        "dual_clip": by(loss=("ppo",)),
        "entropy_coef": updated,
        "loss_reduction": (*updated, "sft"),
        "scale": by(advantage=("grpo",)),
        "allow_singletons": where(lambda r: "group" in r.needs),
        "kl_in": updated,
        "kl_estimator": updated,
        "gamma": by(advantage=("gae", "reinforce_plus_plus", "prime")),
        "lam": by(advantage=("gae",)),
        "whiten_advantages": updated,
        "value_clip": by(advantage=("gae",)),
        "pass_k": by(advantage=("pass_k",)),
        "dppo_threshold": by(loss=("dppo",)),
        "sapo_tau_positive": by(loss=("sapo",)),
        "sapo_tau_negative": by(loss=("sapo",)),
        "covariance_share": by(loss=("clip_cov", "kl_cov")),
        "covariance_low": by(loss=("clip_cov",)),
        "covariance_high": by(loss=("clip_cov",)),
        "kl_cov_coef": by(loss=("kl_cov",)),
        "correction": updated,
        "correction_cap": updated,
        "correction_floor": updated,
        "old_logprobs": updated,
        "dynamic_sampling": sampled,
        "max_refills": sampled,
        "overlong_share": sampled,
        "overlong_factor": sampled,
        "mask_truncated": sampled,
        "prime_beta": ("prime",),
        "beta": (*paired, "kto"),
        "label_smoothing": by(loss=("dpo",)),
        "simpo_margin": ("simpo",),
        "cpo_alpha": ("cpo",),
        "desirable_weight": ("kto",),
        "undesirable_weight": ("kto",),
        "center_coef": ("reward_model",),
    }


DEFAULT: Any = None  # of keys whose default is the recipe's


class AlgorithmConfig(Section):
    """See docs/algorithms.md for each formula. Keys without a number here have the algorithm's own default."""

    name: AlgorithmName = Field("ppo", description="which recipe; see docs/algorithms.md")
    update_epochs: int = Field(1, ge=1, description="passes over each lap's batch")
    # the policy loss
    clip_ratio: float | None = Field(
        None, gt=0, le=1, description="symmetric clip of the ratio; default: the algorithm's, else 0.2"
    )
    clip_ratio_low: float | None = Field(None, gt=0, le=1, description="asymmetric clip, needs clip_ratio_high too")
    clip_ratio_high: float | None = Field(None, gt=0, description="asymmetric clip, needs clip_ratio_low too")
    dual_clip: float | None = Field(None, gt=1, description="c of min(., -cA) where A < 0; null: off")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    loss_reduction: Reduction = Field(
        DEFAULT,
        description="how token losses become one number per mini-batch; default: the algorithm's, else token-mean",
    )
    sapo_tau_positive: float = Field(1.0, gt=0, description="sapo: temperature of the gate where A > 0")
    sapo_tau_negative: float = Field(1.05, gt=0, description="sapo: temperature of the gate where A < 0")
    dppo_threshold: float = Field(0.15, gt=0, lt=1, description="dppo: largest change of a token's probability")
    covariance_share: float = Field(2e-4, ge=0, le=1, description="clip_cov, kl_cov: share of tokens chosen")
    covariance_low: float = Field(1.0, description="clip_cov: tokens are chosen from this covariance on")
    covariance_high: float = Field(5.0, description="clip_cov: and up to this one")
    kl_cov_coef: float = Field(1.0, ge=0, description="kl_cov: weight of the KL on the chosen tokens")
    # advantages
    scale: Literal["std", "none"] = Field(
        "std", description="grpo: divide by the group's standard deviation, or not (Dr.GRPO)"
    )
    allow_singletons: bool = Field(False, description="a group of one row gets advantage 0 instead of an error")
    gamma: float = Field(1.0, ge=0, le=1, description="discount per token")
    lam: float = Field(1.0, ge=0, le=1, description="lambda of GAE")
    whiten_advantages: bool = Field(
        DEFAULT, description="mean 0 and variance 1 over the batch's tokens; default: the algorithm's, else false"
    )
    pass_k: int = Field(4, ge=1, description="pass_k: k")
    value_clip: float | None = Field(0.5, gt=0, description="most that a value may move in one lap; null: off")
    prime_beta: float = Field(0.05, gt=0, description="prime: scale of the implicit reward")
    # KL to the starting policy; its coefficient is init_kl_coef
    kl_in: Literal["reward", "loss"] = Field(
        DEFAULT, description="where the KL penalty acts; default: the algorithm's, else reward"
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] = Field("k3", description="for KL in the loss and for the metric")
    # sampler and trainer
    old_logprobs: Literal["trainer", "sampler"] = Field(
        DEFAULT, description="whose log-probabilities the ratio starts from; sampler: no pass of the trainer's own; "
        "default: the algorithm's, else trainer",
    )  # fmt: skip
    correction: Correction = Field(
        "none", description="importance weights where sampler and trainer differ, see docs/algorithms.md"
    )
    correction_cap: float = Field(2.0, gt=0, description="largest weight; icepop, reject: largest ratio kept")
    correction_floor: float = Field(0.5, ge=0, description="icepop, reject: smallest ratio kept")
    # which rows
    dynamic_sampling: bool = Field(
        DEFAULT, description="replace groups whose rows all got the same reward; default: the algorithm's, else false"
    )
    max_refills: int = Field(
        10, ge=1, description="dynamic_sampling: at most so many times the lap's groups are sampled beyond them"
    )
    overlong_share: float | None = Field(
        None, ge=0, le=1, description="last part of max_response_length that costs reward, 0: none; default: the "
        "algorithm's, else 0",
    )  # fmt: skip
    overlong_factor: float = Field(1.0, gt=0, description="penalty at the very end of that part")
    mask_truncated: bool = Field(False, description="rows cut by max_response_length leave the loss")
    # preference
    beta: float = Field(DEFAULT, gt=0, description="scale of the implicit reward; default: simpo 2, else 0.1")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="dpo: share of pairs taken to be labelled wrongly")
    simpo_margin: float = Field(1.0, ge=0, description="simpo: target margin")
    cpo_alpha: float = Field(1.0, ge=0, description="cpo: weight of the chosen answer's likelihood")
    desirable_weight: float = Field(1.0, gt=0, description="kto: weight of good answers")
    undesirable_weight: float = Field(1.0, gt=0, description="kto: weight of bad answers")
    center_coef: float = Field(0.0, ge=0, description="reward_model: pulls the sum of both scores to 0")

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.name]

    @property
    def filled(self) -> AlgorithmConfig:
        """With the recipe's defaults in the keys that weren't given."""
        defaults: dict[str, Any] = {
            "loss_reduction": "token-mean", "whiten_advantages": False, "kl_in": "reward", "dynamic_sampling": False,
            "overlong_share": 0.0, "beta": 0.1, "old_logprobs": "trainer",
        } | dict(self.recipe.defaults)  # fmt: skip
        if self.clip_ratio is not None or self.clip_ratio_low is not None or self.clip_ratio_high is not None:
            defaults = {key: value for key, value in defaults.items() if not key.startswith("clip_ratio")}
        given = {key for key in self.model_fields_set if getattr(self, key) is not None}
        mine = type(self).model_fields.keys() - given
        return self.model_copy(update={key: value for key, value in defaults.items() if key in mine})

    @property
    def clip_range(self) -> tuple[float, float]:
        """``(eps_low, eps_high)`` of the ratio's clip."""
        if self.clip_ratio_low is not None and self.clip_ratio_high is not None:
            return self.clip_ratio_low, self.clip_ratio_high
        both = 0.2 if self.clip_ratio is None else self.clip_ratio
        return both, both

    @property
    def needs_groups(self) -> bool:
        return "group" in self.recipe.needs

    @property
    def needs_critic(self) -> bool:
        return "values" in self.recipe.needs
