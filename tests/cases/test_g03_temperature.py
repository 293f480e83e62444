"""G03, the trainer's side: log-probabilities are those of the tempered density that was sampled from."""

from __future__ import annotations

import pytest
import torch

from verl.models.logprobs import token_logprobs


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.142932), (1.0, -0.407606), (2.0, -0.680270)])
def test_g03_hand_numbers(temperature, expected):
    """Logits [2, 1, 0], sampled index 0."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[2.0], [1.0], [0.0]])
    logprobs, _ = token_logprobs(hidden, weight, None, torch.tensor([0]), temperature=temperature)
    assert logprobs.item() == pytest.approx(expected, abs=1e-6)


def test_g03_temperature_zero_is_no_density():
    with pytest.raises(ValueError, match="temperature 0"):
        token_logprobs(torch.ones(1, 1), torch.ones(3, 1), None, torch.tensor([0]), temperature=0)
