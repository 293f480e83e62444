"""PPO's policy loss against a scalar loop and finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from tests.algorithms.ragged import rows
from verl.algorithms.policy import ppo_loss

R = rows()


def slow_token(delta: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    ratio = math.exp(min(max(delta, -20.0), 20.0))
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -dual * advantage) if dual is not None and advantage < 0 else loss


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28)])
def test_loss_and_statistics_against_the_loop(low, high, dual):
    logprobs, old, advantages = R.values(1), R.values(2), R.values(3)
    got = ppo_loss(logprobs, old, advantages, R.mask, low, high, dual)
    clipped = dual_clipped = kl = largest = 0.0
    for t in range(len(R.row)):
        if not R.mask[t]:
            assert got.losses[t] == 0
            continue
        delta, advantage = float(logprobs[t] - old[t]), float(advantages[t])
        ratio = math.exp(delta)
        assert got.losses[t].item() == pytest.approx(slow_token(delta, advantage, low, high, dual), abs=1e-12)
        clipped += (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
        dual_clipped += dual is not None and advantage < 0 and ratio > dual
        kl += ratio - 1 - delta
        largest = max(largest, ratio)
    assert (got.clipped.item(), got.dual_clipped.item()) == (clipped, dual_clipped)
    assert clipped > 0 and (dual is None or dual_clipped > 0)
    assert got.approx_kl.item() == pytest.approx(kl)
    assert got.ratio_max.item() == pytest.approx(largest)


@pytest.mark.parametrize("dual", [None, 3.0])
def test_gradient_by_finite_differences(dual):
    n = 64
    generator = torch.Generator().manual_seed(0)
    logprobs, old, advantages = (torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(3))
    everywhere = torch.ones(n, dtype=torch.bool)
    logprobs.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ppo_loss(x, old, advantages, everywhere, 0.2, 0.28, dual)[0], (logprobs,))


def test_before_any_update_the_ratio_is_one_and_the_gradient_is_the_policy_gradient():
    logprobs, advantages = R.values(1).requires_grad_(), R.values(3)
    got = ppo_loss(logprobs, logprobs, advantages, R.mask, 0.2, 0.2)
    got.losses.sum().backward()
    assert got.ratio_max.item() == 1.0 and got.approx_kl.item() == 0.0 and got.clipped.item() == 0
    assert (logprobs.grad[R.mask] == -advantages[R.mask]).all()


def test_nan_outside_the_mask_reaches_no_gradient():
    logprobs = R.values(1).requires_grad_()
    ppo_loss(logprobs, R.values(2), R.values(3), R.mask, 0.2, 0.2, 3.0).losses.sum().backward()
    assert logprobs.grad.isfinite().all() and (logprobs.grad[~R.mask] == 0).all()


def test_far_apart_policies_stay_finite():
    logprobs = torch.tensor([-1.0, -200.0, -1.0, -200.0], requires_grad=True)
    old = torch.tensor([-200.0, -1.0, -200.0, -1.0])
    got = ppo_loss(logprobs, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.ones(4, dtype=torch.bool), 0.2, 0.2)
    got.losses.sum().backward()
    assert got.losses.isfinite().all() and logprobs.grad.isfinite().all()
    assert got.ratio_max.item() == pytest.approx(math.exp(20))


def test_statistics_add_over_micro_batches():
    logprobs, old, advantages = R.values(1), R.values(2), R.values(3)
    whole = ppo_loss(logprobs, old, advantages, R.mask, 0.2, 0.2, 3.0)
    halves = [R.cut(0, 3), R.cut(3, 8)]
    parts = [ppo_loss(logprobs[s], old[s], advantages[s], m, 0.2, 0.2, 3.0) for s, m, _, _ in halves]
    for name in ("clipped", "dual_clipped", "approx_kl"):
        assert sum(getattr(p, name) for p in parts).item() == pytest.approx(getattr(whole, name).item())
    assert max(p.ratio_max for p in parts) == whole.ratio_max


def test_no_tokens():
    got = ppo_loss(R.values(1), R.values(2), R.values(3), torch.zeros_like(R.mask), 0.2, 0.2)
    assert (got.losses == 0).all() and got.ratio_max == 0
