"""Masked statistics and the loss reductions.

Flat ragged form everywhere: ``values [T]`` holds the response tokens of all rows one after another, ``mask [T]`` is
True on tokens the policy chose, ``row [T]`` (non-decreasing) is each token's row number in ``0..n_rows - 1``.
Values outside the mask are selected away, never multiplied by zero (0 * NaN is NaN), so they reach neither a result
nor a gradient.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from verl.config.algorithm import Reduction
from verl.seats import Totals


def select(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` inside the mask, 0 outside; in float32 at least. NaN outside stays out of the gradient, too."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def row_sums(values: Tensor, mask: Tensor, row: Tensor, n_rows: int) -> Tensor:
    """``[B]`` sum over each row's masked values; 0 for a row without any."""
    selected = select(values, mask)
    return selected.new_zeros(n_rows).index_add(0, row, selected)


def row_counts(mask: Tensor, row: Tensor, n_rows: int) -> Tensor:
    """``[B]`` int64 number of masked tokens of each row."""
    return torch.zeros(n_rows, dtype=torch.int64, device=mask.device).index_add(0, row, mask.to(torch.int64))


def last_tokens(mask: Tensor, row: Tensor, n_rows: int) -> Tensor:
    """``[B]`` position of each row's last masked token; meaningless for a row without any."""
    place = torch.where(mask, torch.arange(len(mask), device=mask.device), 0)
    return place.new_zeros(n_rows).scatter_reduce(0, row, place, "amax")


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar mean over masked values; 0 when there are none."""
    return select(values, mask).sum() / mask.sum().clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """``(x - mean) / sqrt(var + 1e-8)`` on masked tokens, 0 elsewhere; ``[T]``.

    ``var`` is the unbiased variance. One valid value has no spread: the result is 0, with a warning.
    """
    selected = select(values.detach(), mask).double()
    count, total, squares = torch.stack([mask.sum().double(), selected.sum(), selected.square().sum()]).tolist()
    if count < 2:
        if count:
            warnings.warn("whitening over one valid token: its advantage is 0", RuntimeWarning, stacklevel=2)
        return torch.zeros_like(select(values, mask))
    mean = total / count
    variance = max(squares - count * mean * mean, 0.0) / (count - 1)
    return select(((values.double() - mean) / (variance + 1e-8) ** 0.5).to(values.dtype), mask)


def reduce_loss(
    losses: Tensor,
    mask: Tensor,
    row: Tensor,
    n_rows: int,
    mode: Reduction,
    totals: Totals,
    fixed_length: int | None = None,
) -> Tensor:
    """This micro-batch's share of the mini-batch loss: shares *add up* over micro-batches and ranks (don't average).

    ``totals`` are the mini-batch's denominators over all ranks: N masked tokens, B rows with a masked token.

    - ``token-mean``: sum of losses / N
    - ``seq-mean-token-mean``: sum over rows of the row's mean / B
    - ``seq-mean-token-sum``: sum of losses / B
    - ``seq-mean-token-sum-norm``: sum of losses / (B * ``fixed_length``), Dr. GRPO (arXiv 2503.20783)

    A fully masked row is in neither numerator nor denominator. With nothing left (``totals.tokens == 0``) the loss is
    exactly 0 and so is every gradient; the caller then takes no optimizer step.
    A row must lie in one micro-batch. ``ValueError`` when ``fixed_length`` is missing or the mode is unknown.
    """
    selected = select(losses, mask)
    rows = max(totals.rows, 1)
    if mode == "token-mean":
        return selected.sum() / max(totals.tokens, 1)
    if mode == "seq-mean-token-mean":
        return (selected / row_counts(mask, row, n_rows).clamp(min=1)[row]).sum() / rows
    if mode == "seq-mean-token-sum":
        return selected.sum() / rows
    if mode == "seq-mean-token-sum-norm":
        if not fixed_length:
            raise ValueError("seq-mean-token-sum-norm needs fixed_length (the run's max_response_length)")
        return selected.sum() / (rows * fixed_length)
    raise ValueError(f"unknown loss reduction {mode!r}")
