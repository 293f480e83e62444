"""G09: no spread can be estimated from one value."""

from __future__ import annotations

import warnings

import pytest
import torch

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
