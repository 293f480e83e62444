"""The critic's loss against a scalar loop and finite differences."""

from __future__ import annotations

import pytest
import torch

from tests.algorithms.ragged import rows
from verl.algorithms.value import value_loss

R = rows()


@pytest.mark.parametrize("clip", [None, 0.5])
def test_loss_and_gradient_against_the_loop(clip):
    values, old, returns = R.values(1).requires_grad_(), R.values(2), R.values(3)
    got = value_loss(values, old, returns, R.mask, clip)
    got.losses.sum().backward()
    clipped = 0
    for t in range(len(R.row)):
        if not R.mask[t]:
            assert got.losses[t] == 0 and values.grad[t] == 0
            continue
        v, v_old, target = values[t].item(), float(old[t]), float(returns[t])
        free, bounded = (v - target) ** 2, float("-inf")
        if clip is not None:
            bounded = (v_old + min(max(v - v_old, -clip), clip) - target) ** 2
        clipped += bounded > free
        assert got.losses[t].item() == pytest.approx(max(free, bounded) / 2)
        assert values.grad[t].item() == pytest.approx(0.0 if bounded > free else v - target)
    assert got.clipped.item() == clipped and (clip is None or clipped > 0)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradient_by_finite_differences(clip):
    generator = torch.Generator().manual_seed(1)
    values, old, returns = (torch.randn(64, generator=generator, dtype=torch.float64) for _ in range(3))
    everywhere = torch.ones(64, dtype=torch.bool)
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, returns, everywhere, clip).losses, (values,))
