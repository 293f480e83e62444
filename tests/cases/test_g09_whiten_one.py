"""G09: no spread can be estimated from one value."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.algorithms.facts import estimator_facts, per_token
from tests.algorithms.ragged import Rows
from verl.algorithms.advantages import ESTIMATORS
from verl.algorithms.reduce import masked_whiten


def test_one_valid_token_is_zero_with_a_warning():
    with pytest.warns(RuntimeWarning, match="one valid token"):
        got = masked_whiten(torch.tensor([3.0, 9.9]), torch.tensor([True, False]))
    assert got.tolist() == [0.0, 0.0]


def test_no_valid_token_is_zeros():
    assert masked_whiten(torch.tensor([3.0, torch.nan]), torch.tensor([False, False])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("outside", [9.9, torch.nan, torch.inf])
def test_two_valid_tokens_keep_the_usual_convention(outside):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = masked_whiten(torch.tensor([1.0, outside, 3.0]), torch.tensor([True, False, True]))
    assert got.tolist() == pytest.approx([-0.7071, 0.0, 0.7071], abs=1e-4)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_with_one_valid_token(estimator):
    row = torch.tensor([0, 0, 1, 1])
    mask = torch.tensor([False, True, False, False])
    facts = estimator_facts(Rows(mask, row, 2), torch.tensor([0, 0]))
    got = per_token(estimator, facts)
    assert got.isfinite().all()
    with pytest.warns(RuntimeWarning, match="one valid token"):
        assert (masked_whiten(got, mask) == 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_with_one_row_in_its_group(estimator):
    row = torch.tensor([0, 0])
    facts = estimator_facts(Rows(torch.ones(2, dtype=torch.bool), row, 1), torch.tensor([0]))
    got = per_token(estimator, facts | {"allow_singletons": True})
    assert got.isfinite().all()
    if "group" in ESTIMATORS[estimator].__code__.co_varnames:
        assert (got == 0).all()
