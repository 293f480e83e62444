"""Policy loss of PPO and the GRPO family: per-token losses, to be reduced by ``reduce.reduce_loss``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.kl import MAX_LOG_RATIO
from verl.algorithms.reduce import select


class PolicyLoss(NamedTuple):
    """Per-token losses and detached statistics: *sums* over masked tokens, so they add over micro-batches and ranks."""

    losses: Tensor  # [T], 0 outside the mask
    clipped: Tensor  # [] tokens whose gradient the ratio's clip took away
    dual_clipped: Tensor  # [] tokens whose gradient the dual clip took away
    approx_kl: Tensor  # [] sum of k3 estimates of KL(old, new)
    ratio_max: Tensor  # [] largest ratio; 0 without tokens; combined by max, not by sum


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """``max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))`` per token, ``rho = exp(logprobs - old_logprobs)``.

    The log-ratio is clamped to +-20 before exp. With ``dual_clip = c``, a token with A < 0 costs at most ``-c A``.
    All tensors ``[T]``; gradients flow to ``logprobs`` only. Sources: PPO arXiv 1707.06347, two-sided clip
    (clip-higher) arXiv 2503.14476, dual clip arXiv 1912.09729.
    """
    log_ratio = (select(logprobs, mask) - select(old_logprobs.detach(), mask)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, advantages = log_ratio.exp(), select(advantages.detach(), mask)
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(free, bounded)
    dual_clipped = torch.zeros_like(mask)
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        dual_clipped = (advantages < 0) & (losses > ceiling)
        losses = torch.where(dual_clipped, ceiling, losses)
    with torch.no_grad():
        return PolicyLoss(
            losses=losses,
            clipped=(bounded > free).sum(),
            dual_clipped=dual_clipped.sum(),
            approx_kl=(torch.expm1(log_ratio) - log_ratio).sum(),
            ratio_max=torch.cat([select(ratio, mask), ratio.new_zeros(1)]).max(),
        )
