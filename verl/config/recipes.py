"""What each ``algorithm.name`` is made of. A new algorithm is a pure function and one line of this table.

``advantage`` names a function of ``algorithms/advantages.py``, ``loss`` one of ``algorithms/policy.py`` (answers are
sampled) or of ``algorithms/preference.py``; their argument names say what they read. What the flow must contain is
``needs``; docs/adding-an-algorithm.md goes through it. ``python -m verl.config.recipes`` prints the table of
docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Kind = Literal["prompts", "pairs", "labelled", "chats"]
Need = Literal["reward", "group", "values", "greedy", "reference", "teacher", "process_reward"]


@dataclass(frozen=True)
class Recipe:
    """``data``: prompts whose answers are sampled, or rows that are trained on as they are: preference pairs, labelled
    answers, chats. ``trains``: a causal LM, or a scorer (reward model). ``needs`` beside these: a reward, a *group* of
    answers per prompt, values of a critic, a greedy answer per prompt, the reference's, a teacher's or a process
    reward model's log-probabilities. ``defaults``: keys of the algorithm's section, and ``init_kl_coef``."""

    about: str
    advantage: str | None = None
    loss: str = "ppo"
    needs: frozenset[Need] = frozenset()
    data: Kind = "prompts"
    trains: Literal["policy", "scorer"] = "policy"
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> bool:
        """Whether answers are sampled while training."""
        return self.data == "prompts"

    @property
    def pairs_sampled(self) -> bool:
        """Whether sampled answers of a group become preference pairs, instead of getting advantages."""
        return self.samples and self.advantage is None


def _rl(about: str, advantage: str, *needs: Need, loss: str = "ppo", **defaults: Any) -> Recipe:
    return Recipe(about, advantage, loss, frozenset({"reward", *needs}), defaults=defaults)


def _pairs(about: str, loss: str, *needs: Need, **defaults: Any) -> Recipe:
    return Recipe(about, None, loss, frozenset(needs), "pairs", defaults=defaults)


_WHITE: dict[str, Any] = {"whiten_advantages": True}
_ROW_MEAN: dict[str, Any] = {"loss_reduction": "seq-mean-token-mean"}
_DAPO: dict[str, Any] = {
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.28,
    "dynamic_sampling": True,
    "overlong_share": 0.2,
}

RECIPES: dict[str, Recipe] = {
    # answers are sampled: how rewards become advantages, and which policy loss
    "ppo": _rl("GAE from a critic's values", "gae", "values", init_kl_coef=0.1, **_WHITE),
    "grpo": _rl("group mean and deviation", "grpo", "group", kl_in="loss"),
    "rloo": _rl("leave one out", "rloo", "group"),
    "reinforce_plus_plus": _rl("reward-to-go, whitened over the batch", "reinforce_plus_plus", **_WHITE),
    "reinforce_plus_plus_baseline": _rl(
        "group mean, whitened over the batch", "reinforce_plus_plus_baseline", "group", kl_in="loss", **_WHITE
    ),
    "remax": _rl("minus the greedy answer's reward", "remax", "greedy"),
    "opo": _rl("length-weighted group mean", "opo", "group"),
    "gpg": _rl("group mean, REINFORCE", "gpg", "group", loss="reinforce", kl_in="loss"),
    "pass_k": _rl("analytic advantage of pass@k", "pass_k", "group", kl_in="loss"),
    "gdpo": _rl("each reward normalised by itself", "gdpo", "group", kl_in="loss", **_WHITE),
    "dapo": _rl("clip-higher, dynamic sampling, overlong penalty", "grpo", "group", kl_in="loss", **_DAPO),
    "gspo": _rl(
        "sequence ratio", "grpo", "group", loss="gspo", kl_in="loss", clip_ratio_low=3e-4, clip_ratio_high=4e-4,
        **_ROW_MEAN,
    ),
    "cispo": _rl(
        "clipped importance weight, no token loses its gradient", "grpo", "group", loss="cispo", kl_in="loss",
        clip_ratio_low=1.0, clip_ratio_high=0.28,
    ),
    "sapo": _rl("soft gate instead of a clip", "grpo", "group", loss="sapo", kl_in="loss", **_ROW_MEAN),
    "gmpo": _rl(
        "geometric mean of ratios", "grpo", "group", loss="gmpo", kl_in="loss", clip_ratio_low=0.33,
        clip_ratio_high=0.49, **_ROW_MEAN,
    ),
    "dppo": _rl("mask by total variation", "grpo", "group", loss="dppo", kl_in="loss", old_logprobs="sampler"),
    "clip_cov": _rl("no gradient on tokens of high covariance", "grpo", "group", loss="clip_cov", kl_in="loss"),
    "kl_cov": _rl("KL on tokens of high covariance", "grpo", "group", loss="kl_cov", kl_in="loss"),
    "prime": _rl("implicit process reward, trained online", "prime", "group", "process_reward"),
    "distill": Recipe(
        "reverse KL to a teacher on the student's own tokens", "distill", needs=frozenset({"teacher"}),
        defaults={"kl_in": "loss"},
    ),
    "online_dpo": Recipe(
        "best and worst sampled answer are a pair", None, "dpo", frozenset({"reward", "group", "reference"})
    ),
    # rows are trained on as they are
    "dpo": _pairs("preference pairs", "dpo", "reference"),
    "ipo": _pairs("preference pairs, squared", "ipo", "reference"),
    "cpo": _pairs("preference pairs without a reference", "cpo"),
    "orpo": _pairs("likelihood and odds ratio", "orpo"),
    "simpo": _pairs("mean log-probabilities and a margin", "simpo", beta=2.0),
    "kto": Recipe("answers labelled good or bad", None, "kto", frozenset({"reference"}), "labelled"),
    "sft": Recipe("the assistant's turns of chats", None, "sft", data="chats"),
    "reward_model": Recipe("a reward model from pairs", None, "pairwise", data="pairs", trains="scorer"),
    "verifier": Recipe("a reward model from labels", None, "outcome", data="labelled", trains="scorer"),
}  # fmt: skip


def table() -> str:
    """The table of docs/algorithms.md."""
    lines = [
        "| `algorithm.name` | what it is | advantage | loss | needs | its own defaults |",
        "|---|---|---|---|---|---|",
    ]
    for name, recipe in RECIPES.items():
        needs = [recipe.data, *(need.replace("_", " ") for need in get_args(Need) if need in recipe.needs)]
        defaults = (f"`{key}: {str(value).lower()}`" for key, value in recipe.defaults.items())
        advantage = f"`{recipe.advantage}`" if recipe.advantage else ""
        cells = (f"`{name}`", recipe.about, advantage, f"`{recipe.loss}`", ", ".join(needs), ", ".join(defaults))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
