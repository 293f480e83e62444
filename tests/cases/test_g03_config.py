"""G03, the configuration's part: training needs a density to sample from, and says where it can't match it."""

from __future__ import annotations

import pytest

from tests.config.samples import load, refusal
from verl.config.load import notes


@pytest.mark.parametrize("temperature", [0, 0.0, -1.0])
def test_temperature_zero_is_refused(temperature):
    text = refusal(rollout={"temperature": temperature})
    assert f"rollout.temperature is {temperature}: must be a number >= 0.0001" in text
    assert "no density to train on" in text


@pytest.mark.parametrize("sampling", [{"top_p": 0.95}, {"top_k": 20}])
def test_renormalised_sampling_warns(sampling):
    key = next(iter(sampling))
    assert any(n.startswith(f"warning: rollout.{key}") for n in notes(load(rollout=sampling)))


def test_other_temperatures_pass_silently():
    assert not any("temperature" in n for n in notes(load(rollout={"temperature": 0.5})))
