"""Advantages from rewards: GAE on tokens; GRPO and RLOO on the rows of a group. Flat ragged form of ``reduce``.

A NaN score means that every reward abstained on the row: it is left out of its group's statistics and gets advantage 0.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from verl.algorithms.kl import kl_estimate
from verl.algorithms.reduce import row_counts, select


class TokenAdvantages(NamedTuple):
    """``advantages [T]`` and value targets ``returns [T]``; both 0 outside the mask."""

    advantages: Tensor
    returns: Tensor


def without_abstained(mask: Tensor, row: Tensor, scores: Tensor) -> Tensor:
    """``mask [T]`` without the rows whose score is NaN: they leave the loss, its denominators and the whitening."""
    return mask & ~torch.isnan(scores).to(mask.device)[row]


def place_scores(scores: Tensor, mask: Tensor, row: Tensor, n_rows: int) -> Tensor:
    """``[T]`` float32 rewards: each row's score on its last masked token (a tool token can't earn it), 0 elsewhere.

    A fully masked row gets nothing. ``ValueError`` for a NaN score on a row that is not (see ``without_abstained``).
    """
    rewards = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    tokens = mask.nonzero().squeeze(1)
    last = tokens[row_counts(mask, row, n_rows).cumsum(0) - 1] if len(tokens) else tokens  # [B], right where count > 0
    rows = row[tokens].unique()
    placed = scores.to(mask.device)[rows]
    if torch.isnan(placed).any():
        raise ValueError(f"rows {rows[torch.isnan(placed)].tolist()} have no score: mask them out first")
    if len(rows):
        rewards[last[rows]] = placed.to(rewards.dtype)
    return rewards


def subtract_kl(rewards: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, coef: float) -> Tensor:
    """``rewards [T] - coef * k1`` on masked tokens, 0 elsewhere: the KL penalty as part of the reward."""
    return select(rewards, mask) - coef * kl_estimate(logprobs.detach(), ref_logprobs, mask, "k1")


def discounted_sums(values: Tensor, row: Tensor, factor: float) -> Tensor:
    """``S_t = sum_k factor^k * values[t + k]`` over the rest of t's row; ``[T]``.

    By doubling: after pass p, S_t covers 2^p tokens, so the longest row's length costs log2 passes over flat tokens.
    """
    sums, span = values.clone(), 1
    while span < len(sums):
        same_row = row[span:] == row[:-span]
        if not same_row.any():
            break
        sums[:-span] += torch.where(same_row, factor**span * sums[span:], 0)
        span *= 2
    return sums


def gae(rewards: Tensor, values: Tensor, mask: Tensor, row: Tensor, gamma: float, lam: float) -> TokenAdvantages:
    """Generalised advantage estimation (arXiv 1506.02438), over the policy's own tokens only.

    ``rewards [T]``, ``values [T]`` (value before each token). With t+1 the row's next *masked* token and V = 0 after
    the last: ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lam A_{t+1}``, ``returns = A + V``
    (before any whitening). Tool tokens are no actions: they add no decay, and rewards and values there don't count.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    tokens = mask.nonzero().squeeze(1)  # leaving tool tokens out is carrying A and V through them
    r, v, own = rewards.detach()[tokens].to(dtype), values.detach()[tokens].to(dtype), row[tokens]
    following = torch.zeros_like(v)
    following[:-1] = torch.where(own[1:] == own[:-1], v[1:], 0)
    advantages = discounted_sums(r + gamma * following - v, own, gamma * lam)

    def spread(compact: Tensor) -> Tensor:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).index_copy(0, tokens, compact)

    return TokenAdvantages(spread(advantages), spread(advantages + v))


class _Deviations(NamedTuple):
    """Group statistics; ``deviation [B]`` is 0 on abstained rows."""

    deviation: Tensor  # [B] float64, score - group mean
    group_index: Tensor  # [B] in 0..G-1
    scored: Tensor  # [G] rows with a score


def _deviations(scores: Tensor, group: Tensor, allow_singletons: bool) -> _Deviations:
    scores = scores.double()
    names, index, sizes = torch.unique(group, return_inverse=True, return_counts=True)
    if not allow_singletons and (sizes == 1).any():
        raise ValueError(
            f"groups {names[sizes == 1].tolist()} have one row; a group baseline needs at least 2 (or allow_singletons)"
        )
    if torch.isinf(scores).any():
        raise ValueError(f"rows {torch.isinf(scores).nonzero().flatten().tolist()} have an infinite score")
    valid = ~torch.isnan(scores)
    position = torch.arange(len(scores), device=scores.device)
    first = torch.full_like(sizes, len(scores) - 1).scatter_reduce(0, index[valid], position[valid], "amin")
    # Relative to a member of the group, equal scores are exact zeros; the mean of n equal floats need not equal them.
    relative = select(scores - scores[first][index], valid)
    scored = torch.zeros_like(sizes).index_add(0, index, valid.long())
    mean = scores.new_zeros(len(names)).index_add(0, index, relative) / scored.clamp(min=1)
    return _Deviations(select(relative - mean[index], valid), index, scored)


def grpo(
    scores: Tensor, group: Tensor, scale: Literal["std", "none"] = "std", allow_singletons: bool = False
) -> Tensor:
    """``[B]`` float64: ``(R - mean) / (std + 1e-6)`` within each group, std unbiased (GRPO, arXiv 2402.03300).

    ``scale="none"`` leaves the deviation undivided (Dr. GRPO, arXiv 2503.20783). Equal scores give exactly 0.
    ``scores [B]`` (NaN: abstained), ``group [B]`` int. ``ValueError`` for a group of one row, unless
    ``allow_singletons``, and for an infinite score; a group left with one *scored* row gets 0.
    """
    deviation, index, scored = _deviations(scores, group, allow_singletons)
    if scale == "none":
        return deviation
    squares = deviation.new_zeros(len(scored)).index_add(0, index, deviation.square())
    std = (squares / (scored - 1).clamp(min=1)).sqrt()
    return deviation / (std[index] + 1e-6)


def rloo(scores: Tensor, group: Tensor, allow_singletons: bool = False) -> Tensor:
    """``[B]`` float64: R minus the mean of the group's *other* scores, ``n / (n - 1) * (R - mean)`` (arXiv 2402.14740).

    Arguments and errors as in ``grpo``.
    """
    deviation, index, scored = _deviations(scores, group, allow_singletons)
    return deviation * (scored.double() / (scored - 1).clamp(min=1))[index]


def broadcast(advantages: Tensor, mask: Tensor, row: Tensor) -> Tensor:
    """``[T]`` float32: each row's advantage ``[B]`` on its masked tokens, 0 elsewhere."""
    return select(advantages.to(mask.device, torch.float32)[row], mask)
