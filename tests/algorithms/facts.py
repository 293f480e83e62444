"""All that estimators and policy losses may read, by argument name, for random ragged rows.

A new entry of ``ESTIMATORS`` or ``POLICY_LOSSES`` is called with these like the others; what it reads besides, goes
here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.algorithms.ragged import Rows
from verl.algorithms.advantages import ESTIMATORS, TokenAdvantages, broadcast
from verl.algorithms.named import call
from verl.algorithms.policy import POLICY_LOSSES, PolicyLoss
from verl.algorithms.reduce import row_counts

NUMBERS: dict[str, Any] = {
    "gamma": 0.9, "lam": 0.8, "scale": "std", "allow_singletons": False, "pass_k": 2, "reward_weights": [1.0, 0.5],
    "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05,
    "dppo_threshold": 0.15, "kl_cov_coef": 0.7,
}  # fmt: skip


def loss_facts(rows: Rows, spread: float = 0.5, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """``spread``: how far new and old log-probabilities are apart. One advantage per row; NaN outside the mask."""
    old = -rows.values(2).abs()
    per_row = torch.randn(rows.n, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    chosen = torch.rand(len(rows.row), generator=torch.Generator().manual_seed(4)) < 0.3
    tokens = {
        "logprobs": torch.minimum(old + spread * rows.values(1), torch.tensor(-1e-3, dtype=torch.float64)),
        "old_logprobs": old,
        "advantages": torch.where(rows.mask, per_row[rows.row], torch.nan),
    }
    return (
        NUMBERS
        | {name: values.to(dtype) for name, values in tokens.items()}
        | {"mask": rows.mask, "row": rows.row, "n_rows": rows.n, "covariance_tokens": chosen}
    )


def estimator_facts(rows: Rows, group: Tensor | None = None, seed: int = 0) -> dict[str, Any]:
    """Two groups of rows one after the other, unless ``group`` is given; NaN outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    scores, greedy, other = (torch.randn(rows.n, generator=generator, dtype=torch.float64) for _ in range(3))
    names = ("rewards", "values", "token_rewards", "old_logprobs", "sampled_logprobs", "teacher_logprobs")
    return (
        NUMBERS
        | {name: rows.values(10 * seed + i) for i, name in enumerate(names)}
        | {
            "scores": scores, "greedy_scores": greedy, "per_reward": {"right": scores, "short": other},
            "mask": rows.mask, "row": rows.row, "n_rows": rows.n,
            "lengths": row_counts(rows.mask, rows.row, rows.n),
            "group": torch.arange(rows.n) * 2 // rows.n if group is None else group,
        }
    )  # fmt: skip


def cut(facts: dict[str, Any], rows: Rows, first: int, last: int) -> dict[str, Any]:
    """The facts of rows ``first`` to ``last - 1`` alone."""
    part, mask, row, n = rows.cut(first, last)
    tokens = {k: v[part] for k, v in facts.items() if isinstance(v, Tensor) and v.shape == rows.row.shape}
    return facts | tokens | {"mask": mask, "row": row, "n_rows": n}


def loss_of(name: str, facts: dict[str, Any]) -> PolicyLoss:
    return call(POLICY_LOSSES[name], facts)


def per_token(name: str, facts: dict[str, Any]) -> Tensor:
    """The estimator's advantages ``[T]``, whichever form it returns."""
    got = call(ESTIMATORS[name], facts)
    return got.advantages if isinstance(got, TokenAdvantages) else broadcast(got, facts["mask"], facts["row"])


def reads(name: str) -> set[str]:
    """What the estimator of that name takes."""
    function = ESTIMATORS[name]
    return set(function.__code__.co_varnames[: function.__code__.co_argcount])


GROUPED = [name for name in ESTIMATORS if "group" in reads(name)]
PER_TOKEN = [name for name in ESTIMATORS if "mask" in reads(name)]
