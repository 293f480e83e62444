"""G07: equal rewards carry no signal: the advantage is exactly 0, on every path, in float32 and float64."""

from __future__ import annotations

import functools

import pytest
import torch

from verl.algorithms.advantages import broadcast, grpo, rloo

PATHS = {"grpo": grpo, "dr-grpo": functools.partial(grpo, scale="none"), "rloo": rloo}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("reward", "n"), [(0.2, 8), (0.7, 12), (1 / 3, 1000)])
def test_equal_rewards(path, dtype, reward, n):
    group = torch.zeros(n, dtype=torch.int64)
    advantages = PATHS[path](torch.full((n,), reward, dtype=dtype), group)
    assert (advantages == 0).all()
    assert (broadcast(advantages, torch.ones(n, dtype=torch.bool), torch.arange(n)) == 0).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_outlier_is_bounded(path, dtype):
    scores = torch.tensor([0.35] * 7 + [0.95], dtype=dtype)
    advantages = PATHS[path](scores, torch.zeros(8, dtype=torch.int64))
    assert advantages.abs().max() <= 10
    if path == "rloo":
        assert advantages[-1].item() == pytest.approx(0.6, abs=1e-6)
    assert (advantages[:7] == advantages[0]).all()


def test_a_flat_group_stays_flat_beside_others():
    scores = torch.tensor([0.2, 1.0, 0.2, 0.0, 0.2], dtype=torch.float32)
    advantages = grpo(scores, torch.tensor([4, 9, 4, 9, 4]))
    assert (advantages[[0, 2, 4]] == 0).all() and (advantages[[1, 3]] != 0).all()
