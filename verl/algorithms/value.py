"""Value loss of PPO's critic."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.reduce import select


class ValueLoss(NamedTuple):
    """Per-token losses and a detached statistic that adds over micro-batches and ranks."""

    losses: Tensor  # [T], 0 outside the mask
    clipped: Tensor  # [] masked tokens whose clipped error is the larger one


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None = 0.5
) -> ValueLoss:
    """``max((v - R)^2, (v_old + clip(v - v_old, +-clip) - R)^2) / 2`` per token; ``clip=None``: ``(v - R)^2 / 2``.

    All tensors ``[T]``; gradients flow to ``values`` only. The larger error counts, so a value may not leave the trust
    region in one lap but may always come back (PPO's reference code; arXiv 2005.12729 studies the choice).
    """
    values, returns = select(values, mask), select(returns.detach(), mask)
    free = (values - returns).square() / 2
    if clip is None:
        return ValueLoss(free, torch.zeros((), dtype=torch.int64, device=mask.device))
    old = select(old_values.detach(), mask)
    bounded = (old + (values - old).clamp(-clip, clip) - returns).square() / 2
    # inside the region both are equal but for rounding, which isn't clipping
    clipped = (bounded > free) & ((values - old).abs() > clip)
    return ValueLoss(torch.maximum(free, bounded), clipped.detach().sum())
