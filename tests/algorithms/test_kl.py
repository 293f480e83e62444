"""KL estimators against their formulas, an exact KL, and finite differences; the coefficient's controller."""

from __future__ import annotations

import json
import math
from typing import get_args

import pytest
import torch

from tests.algorithms.ragged import rows
from verl.algorithms.kl import Estimator, KLController, kl_estimate

R = rows()
ESTIMATORS = get_args(Estimator)
FORMULA = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) + d - 1,
    "k3+": lambda d: math.exp(-d) + d - 1,
}
SLOPE = {"k1": lambda d: 1.0, "k2": lambda d: d, "k3": lambda d: 1 - math.exp(-d), "k3+": lambda d: d}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_value_and_gradient_are_the_formula(estimator):
    logprobs, reference = R.values(1).requires_grad_(), R.values(2)
    got = kl_estimate(logprobs, reference, R.mask, estimator)
    got.sum().backward()
    for t in range(len(R.row)):
        if R.mask[t]:
            d = float(logprobs.detach()[t] - reference[t])
            assert got[t].item() == pytest.approx(FORMULA[estimator](d), abs=1e-12)
            assert logprobs.grad[t].item() == pytest.approx(SLOPE[estimator](d), abs=1e-12)
        else:
            assert got[t] == 0 and logprobs.grad[t] == 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradient_by_finite_differences(estimator):
    everywhere = torch.ones(6, dtype=torch.bool)
    logprobs = torch.tensor([-3.0, -1.0, -0.5, -2.0, -9.0, -0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.2, -4.0, -2.5, -1.0, -0.3], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, everywhere, estimator), (logprobs,))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased(estimator):
    policy, reference = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.5, 0.2, 0.3]).log()
    estimates = kl_estimate(policy, reference, torch.ones(3, dtype=torch.bool), estimator)
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * estimates).sum(), exact)


def test_equal_policies_have_exactly_no_kl():
    logprobs = -torch.rand(100)
    for estimator in ESTIMATORS:
        assert (kl_estimate(logprobs, logprobs, torch.ones(100, dtype=torch.bool), estimator) == 0).all()


def test_unknown_estimator():
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool), "k4")


def test_fixed_coefficient():
    control = KLController(0.1)
    control.update(kl=50.0, rows=512)
    assert control.coef == 0.1


def test_adaptive_coefficient():
    control = KLController(0.1, target=6.0, horizon=10_000)
    control.update(kl=6.6, rows=500)  # error 0.1
    assert control.coef == pytest.approx(0.1 * (1 + 0.1 * 0.05))
    control.update(kl=60.0, rows=500)  # error clipped to 0.2
    assert control.coef == pytest.approx(0.1 * 1.005 * 1.01)
    control.update(kl=-1.0, rows=500)  # k1 may be negative: clipped to -0.2
    assert control.coef == pytest.approx(0.1 * 1.005 * 1.01 * 0.99)


def test_a_lap_far_over_the_horizon_cannot_turn_the_penalty_into_a_bonus():
    control = KLController(0.1, target=6.0, horizon=10)
    control.update(kl=0.0, rows=1_000)
    assert control.coef == pytest.approx(0.08)


def test_controller_survives_a_checkpoint():
    first = KLController(0.1, target=6.0)
    first.update(kl=9.0, rows=512)
    second = KLController(0.1, target=6.0)
    second.restore(json.loads(json.dumps(first.state())))
    first.update(kl=3.0, rows=512)
    second.update(kl=3.0, rows=512)
    assert second.coef == first.coef != 0.1


def test_a_kl_that_is_not_finite_is_refused():
    control = KLController(0.1, target=6.0)
    with pytest.raises(ValueError, match="nan"):
        control.update(kl=math.nan, rows=8)
    assert control.coef == 0.1
