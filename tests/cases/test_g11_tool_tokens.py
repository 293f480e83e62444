"""G11: only tokens that the policy chose are actions; tool tokens add no decay and can't earn the reward."""

from __future__ import annotations

import pytest
import torch

from verl.algorithms.advantages import gae, place_scores, subtract_kl


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
