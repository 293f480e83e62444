"""Advantages against slow loops, and the numbers of their papers' formulas."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from tests.algorithms.ragged import rows
from verl.algorithms.advantages import (
    broadcast,
    discounted_sums,
    gae,
    grpo,
    place_scores,
    rloo,
    subtract_kl,
    without_abstained,
)

R = rows()
NAN = math.nan


def f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 1.0)])
def test_gae_against_the_backward_loop(gamma, lam):
    rewards, values = R.values(1), R.values(2)
    got = gae(rewards, values, R.mask, R.row, gamma, lam)
    for i in range(R.n):
        advantage = following = 0.0
        for t in reversed(R.tokens(i)):
            delta = float(rewards[t]) + gamma * following - float(values[t])
            advantage, following = delta + gamma * lam * advantage, float(values[t])
            assert got.advantages[t].item() == pytest.approx(advantage, abs=1e-12)
            assert got.returns[t].item() == pytest.approx(advantage + following, abs=1e-12)
    assert (got.advantages[~R.mask] == 0).all() and (got.returns[~R.mask] == 0).all()


def test_gae_gives_no_gradient_and_float32_for_half_precision():
    values = torch.randn(4, dtype=torch.bfloat16, requires_grad=True)
    mask, row = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64)
    got = gae(torch.zeros(4), values, mask, row, 1.0, 0.95)
    assert got.returns.dtype == torch.float32 and not got.returns.requires_grad


def test_gae_of_nothing():
    nothing = torch.zeros_like(R.mask)
    got = gae(R.values(1), R.values(2), nothing, R.row, 1.0, 0.95)
    assert (got.advantages == 0).all() and (got.returns == 0).all()


def test_discounted_sums_stay_in_their_row():
    values, row = f64([1, 2, 3, 4, 5, 6]), torch.tensor([0, 0, 0, 2, 2, 3])
    assert discounted_sums(values, row, 0.5).tolist() == [1 + 1 + 0.75, 2 + 1.5, 3, 4 + 2.5, 5, 6]
    assert discounted_sums(values, row, 0.0).tolist() == values.tolist()


def test_scores_land_on_the_last_policy_token():
    mask = torch.tensor([True, True, False, False, False, True])
    row = torch.tensor([0, 0, 0, 1, 2, 2])
    assert place_scores(f64([1.5, 9, 2]), mask, row, 3).tolist() == [0, 1.5, 0, 0, 0, 2]
    assert place_scores(f64([1.5, NAN, 2]), mask, row, 3).tolist() == [0, 1.5, 0, 0, 0, 2]
    assert place_scores(f64([1, 1, 1]), torch.zeros_like(mask), row, 3).tolist() == [0] * 6


def test_abstained_rows_must_be_masked_first():
    mask, row, scores = torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 1]), f64([1, NAN])
    with pytest.raises(ValueError, match=r"rows \[1\] have no score"):
        place_scores(scores, mask, row, 2)
    left = without_abstained(mask, row, scores)
    assert left.tolist() == [True, False, False]
    assert place_scores(scores, left, row, 2).tolist() == [1, 0, 0]


def test_kl_in_the_reward_is_k1_and_reaches_no_masked_token():
    rewards, logprobs, reference = R.values(1), R.values(2), R.values(3)
    got = subtract_kl(rewards, logprobs.clone().requires_grad_(), reference, R.mask, 0.1)
    assert not got.requires_grad
    assert (got[~R.mask] == 0).all()
    for t in R.mask.nonzero().flatten().tolist():
        assert got[t].item() == pytest.approx(float(rewards[t]) - 0.1 * float(logprobs[t] - reference[t]))


def slow_groups(scores: list[float], group: list[int], kind: str) -> list[float]:
    result = []
    for score, mine in zip(scores, group, strict=True):
        others = [s for s, g in zip(scores, group, strict=True) if g == mine and not math.isnan(s)]
        if math.isnan(score) or len(others) < 2:
            result.append(0.0)
            continue
        deviation = score - statistics.mean(others)
        if kind == "std":
            result.append(deviation / (statistics.stdev(others) + 1e-6))
        elif kind == "none":
            result.append(deviation)
        else:
            result.append(score - (sum(others) - score) / (len(others) - 1))
    return result


ESTIMATORS = {"std": grpo, "none": lambda s, g: grpo(s, g, scale="none"), "rloo": rloo}


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("seed", range(5))
def test_group_advantages_against_the_loop(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    group = torch.randint(0, 5, (40,), generator=generator) * 7 - 3  # any numbers, rows of a group apart
    scores = torch.randn(40, generator=generator, dtype=torch.float64)
    scores[torch.rand(40, generator=generator) < 0.3] = NAN
    scores[group == 4] = NAN  # a group where all abstained
    got = ESTIMATORS[kind](scores, group)
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(slow_groups(scores.tolist(), group.tolist(), kind), abs=1e-12)


def test_numbers_of_a_group_with_missing_rewards():
    # G17: totals [1.5, 0.5, 0, 1]: mean 0.75, std 0.645497
    group = torch.zeros(4, dtype=torch.int64)
    assert grpo(f64([1.5, 0.5, 0, 1]), group).tolist() == pytest.approx([1.1619, -0.3873, -1.1619, 0.3873], abs=1e-4)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_row_without_score_changes_nobody_else(kind):
    group = torch.zeros(4, dtype=torch.int64)
    with_gap = ESTIMATORS[kind](f64([1, NAN, 0, 1]), group)
    assert with_gap[1] == 0
    assert with_gap[[0, 2, 3]].tolist() == ESTIMATORS[kind](f64([1, 0, 1]), group[:3]).tolist()


@pytest.mark.parametrize("estimator", [grpo, rloo])
def test_groups_of_one_and_infinite_scores(estimator):
    group = torch.tensor([3, 5, 3])
    with pytest.raises(ValueError, match=r"groups \[5\] have one row"):
        estimator(f64([1, 2, 3]), group)
    assert estimator(f64([1, 2, 3]), group, allow_singletons=True)[1] == 0
    with pytest.raises(ValueError, match=r"rows \[2\] have an infinite score"):
        estimator(f64([1, 2, math.inf]), group, allow_singletons=True)


def test_a_small_genuine_spread_is_kept():
    # The floor of 1e-6 is far below a spread of 1e-3: nothing is erased.
    got = grpo(f64([0.5, 0.501]), torch.zeros(2, dtype=torch.int64))
    assert got.tolist() == pytest.approx([-0.7061, 0.7061], abs=1e-4)


def test_broadcast():
    mask, row = torch.tensor([True, False, True]), torch.tensor([0, 0, 1])
    got = broadcast(f64([2, -3]), mask, row)
    assert got.dtype == torch.float32 and got.tolist() == [2, 0, -3]
