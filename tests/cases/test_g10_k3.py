"""G10: the log-ratio is bounded before the exponential; a positive KL is a cost that a step lowers."""

from __future__ import annotations

import pytest
import torch

from tests.algorithms.facts import NUMBERS, loss_of
from tests.tiny import f_llama
from verl.algorithms.advantages import distill, subtract_kl
from verl.algorithms.kl import kl_estimate
from verl.algorithms.policy import POLICY_LOSSES

ONE = torch.ones(1, dtype=torch.bool)
ESTIMATORS = ["k1", "k2", "k3", "k3+"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(("policy", "reference"), [(-120.0, -1.0), (-1.0, -120.0)])
def test_extreme_log_ratio(policy, reference, estimator, dtype):
    logprob = torch.tensor([policy], dtype=dtype, requires_grad=True)
    kl = kl_estimate(logprob, torch.tensor([reference], dtype=dtype), ONE, estimator)
    kl.sum().backward()
    assert kl.isfinite().all() and logprob.grad.isfinite().all()


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize(("policy", "old"), [(-120.0, -1.0), (-1.0, -120.0)])
def test_extreme_log_ratio_of_policy_losses(policy, old, advantage, dtype, loss):
    logprob = torch.tensor([policy], dtype=dtype, requires_grad=True)
    facts = {
        "logprobs": logprob, "old_logprobs": torch.tensor([old], dtype=dtype), "advantages": torch.tensor([advantage]),
        "mask": ONE, "row": torch.zeros(1, dtype=torch.int64), "n_rows": 1, "covariance_tokens": ONE,
    }  # fmt: skip
    got = loss_of(loss, NUMBERS | facts)
    got.losses.sum().backward()
    assert all(x.isfinite().all() for x in got) and logprob.grad.isfinite().all()


@pytest.mark.parametrize(("policy", "other"), [(-120.0, -1.0), (-1.0, -120.0)])
def test_log_ratios_in_rewards_and_advantages_are_finite_and_signed(policy, other):
    logprob, reference = torch.tensor([policy]), torch.tensor([other])
    assert distill(logprob, reference, ONE).advantages.item() == other - policy
    assert subtract_kl(torch.zeros(1), logprob, reference, ONE, 0.1).item() == pytest.approx(0.1 * (other - policy))


def test_normal_point():
    logprob = torch.tensor([-1.0], requires_grad=True)
    kl = kl_estimate(logprob, torch.tensor([-1.5]), ONE, "k3")
    kl.sum().backward()
    assert kl.item() == pytest.approx(0.106531, abs=1e-6)
    assert logprob.grad.item() == pytest.approx(0.393469, abs=1e-6)


def test_k3_is_never_negative():
    generator = torch.Generator().manual_seed(0)
    for spread in (1e-6, 1e-4, 1e-2, 1.0, 30.0):
        d = torch.randn(100_000, generator=generator) * spread
        assert (kl_estimate(d, torch.zeros_like(d), torch.ones_like(d, dtype=torch.bool), "k3") >= 0).all()


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3+"])
def test_a_step_on_the_kl_loss_lowers_the_kl(estimator):
    torch.manual_seed(0)
    reference, policy = f_llama(), f_llama()
    policy.load_state_dict(reference.state_dict())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    ids = torch.randint(0, 32, (4, 16))
    with torch.no_grad():
        anchor = reference(ids).logits.log_softmax(-1).flatten(0, 1)

    def exact_kl() -> float:
        with torch.no_grad():
            logprobs = policy(ids).logits.log_softmax(-1).flatten(0, 1)
            return (logprobs.exp() * (logprobs - anchor)).sum(-1).mean().item()

    before = exact_kl()
    logprobs = policy(ids).logits.log_softmax(-1).flatten(0, 1)
    sampled = torch.multinomial(logprobs.detach().exp(), 256, replacement=True)  # [positions, samples]
    everywhere = torch.ones_like(sampled, dtype=torch.bool)
    kl_estimate(logprobs.gather(1, sampled), anchor.gather(1, sampled), everywhere, estimator).mean().backward()
    torch.optim.SGD(policy.parameters(), lr=1e-3).step()
    assert 0 < exact_kl() < before
