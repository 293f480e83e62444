"""G07: equal rewards carry no signal: the advantage is exactly 0, on every path, in float32 and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.algorithms.facts import GROUPED, NUMBERS, per_token
from verl.algorithms.advantages import grpo
from verl.algorithms.reduce import masked_whiten

# Every estimator with a group baseline, and two more readings of the rewards: undivided, and against a greedy answer.
PATHS = {name: (name, {}) for name in GROUPED} | {"dr-grpo": ("grpo", {"scale": "none"}), "remax": ("remax", {})}


def advantages(path: str, scores: torch.Tensor, group: torch.Tensor | None = None, tokens: int = 1) -> torch.Tensor:
    """Per token, of rows of ``tokens`` tokens each; all token rewards are those of the row's score."""
    name, numbers = PATHS[path]
    n = len(scores)
    row = torch.arange(n).repeat_interleave(tokens)
    facts: dict[str, Any] = {
        "scores": scores, "greedy_scores": scores[:1].expand(n), "per_reward": {"a": scores, "b": scores},
        "group": torch.zeros(n, dtype=torch.int64) if group is None else group,
        "lengths": torch.full((n,), tokens), "token_rewards": scores[row],
        "mask": torch.ones(n * tokens, dtype=torch.bool), "row": row, "n_rows": n,
    }  # fmt: skip
    return per_token(name, NUMBERS | facts | numbers)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("reward", "n"), [(0.2, 8), (0.7, 12), (1 / 3, 1000)])
def test_equal_rewards(path, dtype, reward, n):
    got = advantages(path, torch.full((n,), reward, dtype=dtype), tokens=3)
    assert (got == 0).all()
    assert (masked_whiten(got, torch.ones_like(got, dtype=torch.bool)) == 0).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_outlier_is_bounded(path, dtype):
    scores = torch.tensor([0.35] * 7 + [0.95], dtype=dtype)
    got = advantages(path, scores)
    assert got.abs().max() <= 10
    if path == "rloo":
        assert got[-1].item() == pytest.approx(0.6, abs=1e-6)
    assert (got[:7] == got[0]).all() and got[-1] > got[0]


@pytest.mark.parametrize("path", GROUPED)
def test_a_flat_group_stays_flat_beside_others(path):
    scores = torch.tensor([0.2, 1.0, 0.2, 0.0, 0.2], dtype=torch.float32)
    got = advantages(path, scores, torch.tensor([4, 9, 4, 9, 4]))
    if path == "pass_k":  # one right of two, k = 2: the only pair succeeds
        assert (got == 0).all()
    else:
        assert (got[[0, 2, 4]] == 0).all() and (got[[1, 3]] != 0).all()


def test_a_small_spread_is_a_signal():
    assert (grpo(torch.tensor([0.2, 0.2001]), torch.zeros(2, dtype=torch.int64)) != 0).all()
