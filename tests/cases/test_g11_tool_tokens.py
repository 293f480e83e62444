"""G11: only tokens that the policy chose are actions; tool tokens add no decay and can't earn the reward."""

from __future__ import annotations

import pytest
import torch

from tests.algorithms.facts import estimator_facts, loss_facts, loss_of, per_token
from tests.algorithms.ragged import rows
from verl.algorithms.advantages import ESTIMATORS, gae, place_scores, subtract_kl
from verl.algorithms.correction import correction_weights
from verl.algorithms.policy import POLICY_LOSSES


def advantages(mask: list[int], gamma: float, lam: float, junk: float = 0.0) -> torch.Tensor:
    """One row with terminal reward 1 and values 0; ``junk`` stands at masked positions of every input."""
    inside = torch.tensor(mask, dtype=torch.bool)
    row, zeros = torch.zeros(len(mask), dtype=torch.int64), torch.zeros(len(mask))
    values = torch.where(inside, zeros, junk)
    rewards = place_scores(torch.tensor([1.0], dtype=torch.float64), inside, row, 1)
    rewards = subtract_kl(torch.where(inside, rewards, junk), values, zeros, inside, 0.1)
    return gae(rewards, values, inside, row, gamma, lam).advantages


@pytest.mark.parametrize("junk", [0.0, 7.0, torch.nan])
def test_tool_tokens_add_no_decay(junk):
    assert advantages([1, 1, 0, 0, 1], 1.0, 0.5, junk).tolist() == [0.25, 0.5, 0, 0, 1]


@pytest.mark.parametrize("junk", [0.0, 7.0, torch.nan])
def test_the_terminal_reward_is_on_the_last_policy_token(junk):
    assert advantages([1, 1, 0], 0.0, 1.0, junk).tolist() == [0, 1, 0]


def test_values_are_carried_through():
    # V of the next policy token, not of the tool token in between, is what the bootstrap sees
    mask, row = torch.tensor([True, False, True]), torch.zeros(3, dtype=torch.int64)
    got = gae(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.25, 9.0, 0.5]), mask, row, 1.0, 0.0)
    assert got.advantages.tolist() == [0.25, 0, 0.5]
    assert got.returns.tolist() == [0.5, 0, 1]


R = rows()


def without_tool_tokens(facts: dict) -> dict:
    return {k: v[R.mask] if torch.is_tensor(v) and v.shape == R.row.shape else v for k, v in facts.items()}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_is_that_of_the_policy_tokens_alone(estimator):
    facts = estimator_facts(R)
    got, alone = per_token(estimator, facts), per_token(estimator, without_tool_tokens(facts))
    assert got[R.mask].tolist() == alone.tolist()
    assert (got[~R.mask] == 0).all()


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_policy_loss_is_that_of_the_policy_tokens_alone(loss):
    facts = loss_facts(R)
    results = []
    for given in (facts, without_tool_tokens(facts)):
        given["logprobs"] = given["logprobs"].clone().requires_grad_()
        got = loss_of(loss, given)
        got.losses.sum().backward()
        inside = given["mask"]
        results.append(
            (got.losses[inside].tolist(), given["logprobs"].grad[inside].tolist(), [x.item() for x in got[1:]])
        )
    for whole, alone in zip(*results, strict=True):
        assert whole == pytest.approx(alone, abs=1e-12)


@pytest.mark.parametrize("correction", ["tis", "tis_sequence", "icepop", "reject"])
def test_corrections_are_those_of_the_policy_tokens_alone(correction):
    old, sampled = R.values(1), R.values(2)
    got = correction_weights(old, sampled, R.mask, R.row, R.n, correction)
    alone = correction_weights(old[R.mask], sampled[R.mask], R.mask[R.mask], R.row[R.mask], R.n, correction)
    assert got.weights[R.mask].tolist() == alone.weights.tolist()
