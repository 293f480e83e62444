"""Masked statistics and reductions against plain Python sums."""

from __future__ import annotations

import math
import statistics
from typing import get_args

import pytest
import torch

from tests.algorithms.ragged import rows, totals_of
from verl.algorithms.reduce import (
    last_tokens,
    masked_mean,
    masked_whiten,
    reduce_loss,
    row_counts,
    row_sums,
    select,
)
from verl.config.algorithm import Reduction
from verl.seats import Totals

MODES = get_args(Reduction)
R = rows()
N_TOKENS = int(R.mask.sum())


def slow_reduce(losses, mode: str, fixed_length: int) -> float:
    per_row = [[float(losses[t]) for t in R.tokens(i)] for i in range(R.n)]
    per_row = [values for values in per_row if values]
    if mode == "token-mean":
        return sum(map(sum, per_row)) / sum(map(len, per_row))
    if mode == "seq-mean-token-mean":
        return sum(sum(values) / len(values) for values in per_row) / len(per_row)
    total = sum(map(sum, per_row)) / len(per_row)
    return total / fixed_length if mode == "seq-mean-token-sum-norm" else total


def test_the_last_token_of_each_row():
    got = last_tokens(R.mask, R.row, R.n).tolist()
    assert [got[i] for i in range(R.n) if R.tokens(i)] == [R.tokens(i)[-1] for i in range(R.n) if R.tokens(i)]
    assert last_tokens(torch.zeros_like(R.mask), R.row, R.n).shape == (R.n,)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_its_formula(mode):
    losses = R.values(1)
    got = reduce_loss(losses, R.mask, R.row, R.n, mode, totals_of(R.mask, R.row, R.n), fixed_length=16)
    assert got.item() == pytest.approx(slow_reduce(losses, mode, 16), rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shares_of_any_split_add_up(mode, size):
    whole = R.values(2).requires_grad_()
    totals = totals_of(R.mask, R.row, R.n)
    expected = reduce_loss(whole, R.mask, R.row, R.n, mode, totals, fixed_length=16)
    expected.backward()
    parts = R.values(2).requires_grad_()
    loss = 0.0
    for first in range(0, R.n, size):
        part, mask, row, n = R.cut(first, first + size)
        share = reduce_loss(parts[part], mask, row, n, mode, totals, fixed_length=16)
        share.backward()
        loss += share.item()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=0)
    assert (whole.grad[~R.mask] == 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_gradient_by_finite_differences(mode):
    totals = totals_of(R.mask, R.row, R.n)
    losses = select(R.values(3), R.mask).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: reduce_loss(x, R.mask, R.row, R.n, mode, totals, 16), (losses,))


@pytest.mark.parametrize("mode", MODES)
def test_nothing_left_is_exactly_zero(mode):
    mask = torch.zeros_like(R.mask)
    losses = torch.full(mask.shape, torch.nan, requires_grad=True)
    totals = totals_of(mask, R.row, R.n)
    loss = reduce_loss(losses, mask, R.row, R.n, mode, totals, fixed_length=16)
    loss.backward()
    assert totals == Totals(0, 0)
    assert loss.item() == 0.0
    assert (losses.grad == 0).all()


def test_half_precision_losses_are_summed_in_float32():
    losses = torch.full((4096,), 1.001, dtype=torch.bfloat16)
    mask, row = torch.ones(4096, dtype=torch.bool), torch.zeros(4096, dtype=torch.int64)
    loss = reduce_loss(losses, mask, row, 1, "token-mean", Totals(4096, 1))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(float(losses[0]), rel=1e-5)


def test_wrong_requests_are_refused():
    arguments = (R.values(0), R.mask, R.row, R.n)
    with pytest.raises(ValueError, match="needs fixed_length"):
        reduce_loss(*arguments, "seq-mean-token-sum-norm", Totals(1, 1))
    with pytest.raises(ValueError, match="'mean'"):
        reduce_loss(*arguments, "mean", Totals(1, 1))


def test_row_sums_counts_and_mean():
    values = R.values(4)
    sums, counts = row_sums(values, R.mask, R.row, R.n), row_counts(R.mask, R.row, R.n)
    for i in range(R.n):
        assert sums[i].item() == pytest.approx(sum(float(values[t]) for t in R.tokens(i)), abs=1e-12)
        assert counts[i].item() == len(R.tokens(i))
    assert counts[1] == 0
    assert masked_mean(values, R.mask).item() == pytest.approx(sums.sum().item() / N_TOKENS)
    assert masked_mean(values, torch.zeros_like(R.mask)).item() == 0.0


def test_whiten_is_its_formula():
    values = R.values(5, scale=3) + 7
    got = masked_whiten(values, R.mask)
    inside = values[R.mask].tolist()
    mean, variance = statistics.mean(inside), statistics.variance(inside)
    expected = [(x - mean) / math.sqrt(variance + 1e-8) for x in inside]
    assert got[R.mask].tolist() == pytest.approx(expected, rel=1e-9)
    assert (got[~R.mask] == 0).all()
