"""Off-policy correction: the sampler's distribution is not quite the one that the update starts from.

``q = old_logprobs - sampled_logprobs`` of each token: the trainer's log-probability before the update minus the
sampler's, of the same token. Importance weights are functions of e^q; they multiply the policy loss, without gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.kl import MAX_LOG_RATIO, kl_estimate
from verl.algorithms.reduce import row_counts, row_sums, select
from verl.config.algorithm import Correction


class CorrectionWeights(NamedTuple):
    """Detached. Statistics are float64 *sums* over masked tokens: they add over micro-batches and ranks."""

    weights: Tensor  # [T] float32, 0 outside the mask and where rejected
    total: Tensor  # [] of the weights
    squares: Tensor  # [] of the squared weights
    ratio_total: Tensor  # [] of e^q itself: how far apart the two are, whatever the correction
    ratio_squares: Tensor  # []
    changed: Tensor  # [] tokens whose weight the cap lowered or that were rejected
    kl: Tensor  # [] sum of k3 estimates of KL(sampled, old)


def correction_weights(
    old_logprobs: Tensor,
    sampled_logprobs: Tensor,
    mask: Tensor,
    row: Tensor,
    n_rows: int,
    correction: Correction,
    correction_cap: float = 2.0,
    correction_floor: float = 0.5,
) -> CorrectionWeights:
    """Weights ``[T]`` from ``old_logprobs [T]`` and ``sampled_logprobs [T]``.

    - ``none``: 1
    - ``tis``: ``min(e^q, cap)`` per token (truncated importance sampling, Yao et al. 2025)
    - ``tis_sequence``: ``min(e^(sum of q), cap)``, one number for a row
    - ``icepop``: ``e^q`` inside [floor, cap], else 0, per token (arXiv 2510.18855)
    - ``reject``: 0 for a row whose geometric mean ratio ``e^(mean of q)`` is outside [floor, cap], else 1

    Log-ratios are clamped to +-20 before exp. A rejected token has no gradient but stays in the loss's denominators.
    ``ValueError`` for an unknown correction.
    """
    q = select(old_logprobs.detach(), mask) - select(sampled_logprobs.detach(), mask)
    ratio, kept, truncated = _exp(q), mask, torch.zeros_like(mask)
    if correction == "none":
        weights = torch.ones_like(ratio)
    elif correction == "tis":
        weights, truncated = ratio.clamp(max=correction_cap), ratio > correction_cap
    elif correction == "tis_sequence":
        whole = _exp(row_sums(q, mask, row, n_rows))[row]
        weights, truncated = whole.clamp(max=correction_cap), whole > correction_cap
    elif correction == "icepop":
        weights, kept = ratio, mask & (ratio >= correction_floor) & (ratio <= correction_cap)
    elif correction == "reject":
        mean = _exp(row_sums(q, mask, row, n_rows) / row_counts(mask, row, n_rows).clamp(min=1))
        weights, kept = torch.ones_like(ratio), mask & ((mean >= correction_floor) & (mean <= correction_cap))[row]
    else:
        raise ValueError(f"unknown correction {correction!r}")
    weights, ratio = select(weights, kept).float(), select(ratio, mask).double()
    return CorrectionWeights(
        weights=weights,
        total=weights.double().sum(),
        squares=weights.double().square().sum(),
        ratio_total=ratio.sum(),
        ratio_squares=ratio.square().sum(),
        changed=(mask & (truncated | ~kept)).sum(),
        kl=kl_estimate(sampled_logprobs.detach(), old_logprobs.detach(), mask, "k3").double().sum(),
    )


def effective_share(total: float, squares: float, count: float) -> float:
    """``(sum w)^2 / (count * sum w^2)``: the effective sample size as a share of the samples, 0 to 1 (Kish).

    1 when all weights are equal; 0 when all are 0, or without samples.
    """
    return total**2 / (count * squares) if count and squares else 0.0


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
