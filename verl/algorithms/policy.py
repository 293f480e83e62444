"""Policy losses: per-token losses, to be reduced by ``reduce.reduce_loss``. ``POLICY_LOSSES`` lists them.

Called by argument name: ``logprobs``, ``old_logprobs``, ``advantages`` and ``mask [T]``, ``row`` and ``n_rows`` as in
``reduce``, and numbers of the algorithm's section. Gradients flow to ``logprobs`` only. ``rho`` is
``exp(logprobs - old_logprobs)``, its logarithm clamped to +-20 before exp. A loss that is one number for a row stands
on each of the row's tokens, so ``seq-mean-token-mean`` is its own reduction and the others weight it by length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from verl.algorithms.kl import MAX_LOG_RATIO
from verl.algorithms.reduce import masked_mean, row_counts, row_sums, select


class PolicyLoss(NamedTuple):
    """Per-token losses and detached statistics: *sums* over masked tokens, so they add over micro-batches and ranks."""

    losses: Tensor  # [T], 0 outside the mask
    clipped: Tensor  # [] tokens whose gradient the clip took away; cispo: whose weight it bounded
    approx_kl: Tensor  # [] sum of k3 estimates of KL(old, new)
    ratio_max: Tensor  # [] largest rho; 0 without tokens; combined by max, not by sum


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """``[T]`` log rho, 0 outside the mask."""
    difference = select(logprobs, mask) - select(old_logprobs.detach(), mask)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _k3(log_ratio: Tensor) -> Tensor:
    """``[T]`` estimate of KL(old, new) from a sample of old; never negative, unbiased in value and gradient."""
    return torch.expm1(log_ratio) - log_ratio


def _loss(losses: Tensor, log_ratio: Tensor, mask: Tensor, clipped: Tensor | None = None) -> PolicyLoss:
    with torch.no_grad():
        return PolicyLoss(
            losses=losses,
            clipped=(torch.zeros_like(mask) if clipped is None else clipped & mask).sum(),
            approx_kl=_k3(log_ratio).sum(),
            ratio_max=torch.cat([select(log_ratio.exp(), mask), log_ratio.new_zeros(1)]).max(),
        )


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """``max(-A rho, -A clip(rho))`` and where the clip took the gradient away; both ``[T]``."""
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(free, bounded), bounded > free


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """``max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))`` per token.

    With ``dual_clip = c``, a token with A < 0 costs at most ``-c A``. Sources: PPO arXiv 1707.06347, two-sided clip
    (clip-higher) arXiv 2503.14476, dual clip arXiv 1912.09729.
    """
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, mask), select(advantages.detach(), mask)
    losses, clipped = _clipped_surrogate(log_ratio.exp(), advantages, clip_low, clip_high)
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        losses = torch.where((advantages < 0) & (losses > ceiling), ceiling, losses)
    return _loss(losses, log_ratio, mask, clipped)


def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLoss:
    """``-A logprob`` per token: the policy gradient without a ratio. ``old_logprobs`` serve the statistics only."""
    losses = -select(advantages.detach(), mask) * select(logprobs, mask)
    return _loss(losses, _log_ratio(logprobs, old_logprobs, mask), mask)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    row: Tensor,
    n_rows: int,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO's clip on the row's ratio ``s = exp(mean of log rho)`` (GSPO, arXiv 2507.18071).

    The token form: s with the gradient of ``logprob - stop_gradient(logprob)``, so that advantages may differ within a
    row; where they don't, the row mean's gradient is that of the sequence form.
    """
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, mask), select(advantages.detach(), mask)
    means = row_sums(log_ratio.detach(), mask, row, n_rows) / row_counts(mask, row, n_rows).clamp(min=1)
    own = select(logprobs, mask)
    ratio = (means[row] + own - own.detach()).exp()
    losses, clipped = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    return _loss(losses, log_ratio, mask, clipped)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """``-stop_gradient(clip(rho, 1 - clip_low, 1 + clip_high)) A logprob`` (CISPO, arXiv 2506.13585).

    Every token keeps a gradient. ``clip_low = 1`` leaves the upper bound only, as the paper does.
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -weight * select(advantages.detach(), mask) * select(logprobs, mask)
    return _loss(losses, log_ratio, mask, weight != ratio)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sapo_tau_positive: float = 1.0,
    sapo_tau_negative: float = 1.05,
) -> PolicyLoss:
    """``-A (4 / tau) sigmoid(tau (rho - 1))``: a soft gate instead of a clip (SAPO, arXiv 2511.20347).

    tau is ``sapo_tau_positive`` where A > 0, else ``sapo_tau_negative``. At rho = 1 the gradient is PPO's.
    """
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, mask), select(advantages.detach(), mask)
    tau = torch.full_like(advantages, sapo_tau_negative).masked_fill(advantages > 0, sapo_tau_positive)
    gate = 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1))
    return _loss(-advantages * gate, log_ratio, mask)


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    row: Tensor,
    n_rows: int,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """``-A`` times the geometric mean of the row's ratios, each clipped in log space first (GMPO, arXiv 2507.20673).

    Clipped is what would make the objective larger: ``log rho`` above ``log(1 + clip_high)`` where A > 0, below
    ``log(1 - clip_low)`` where A < 0. So the numbers are ratios as in every loss here; the paper's
    (e^-0.4, e^0.4) is 0.33 and 0.49. The paper has one A per row; with others each token has its own.
    """
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, mask), select(advantages.detach(), mask)
    lowest = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    highest = math.log1p(clip_high)
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=highest), log_ratio.clamp(min=lowest))
    ratio = (row_sums(bounded, mask, row, n_rows) / row_counts(mask, row, n_rows).clamp(min=1)).exp()
    return _loss(-advantages * ratio[row], log_ratio, mask, (bounded != log_ratio) & (advantages != 0))


def dppo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, dppo_threshold: float) -> PolicyLoss:
    """``-M A rho`` with M = 0 where the token's probability has already moved the way A pushes it by more than
    ``dppo_threshold``, else 1 (DPPO, arXiv 2602.04879, equation 12 with the binary total variation).

    The divergence is ``|pi - pi_old|`` of the sampled token, between 0 and 1; a step back is never blocked. Not
    truncated: the paper finds truncated ratios harmful. It anchors the trust region at the sampler, that is, with the
    sampler's log-probabilities as ``old_logprobs``.
    """
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, mask), select(advantages.detach(), mask)
    moved = select(logprobs.detach(), mask).exp() - select(old_logprobs.detach(), mask).exp()
    blocked = (moved * advantages.sign() > dppo_threshold) & mask
    return _loss(torch.where(blocked, 0, -advantages * log_ratio.exp()), log_ratio, mask, blocked)


def covariance_tokens(
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    kind: Literal["clip_cov", "kl_cov"],
    covariance_share: float,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
    seed: int = 0,
) -> Tensor:
    """The tokens ``[T]`` bool that ``clip_cov`` or ``kl_cov`` treat apart (arXiv 2505.22617).

    A token's covariance is ``(logprob - mean) (A - mean)``, both means over the masked tokens given. With N of those,
    ``floor(covariance_share N)`` are chosen, at least one if the share isn't 0 (as the authors' code does):

    - ``clip_cov``: drawn at random, by ``seed``, from the tokens with a covariance in [low, high], if there are any
    - ``kl_cov``: those of the largest covariance; the first of equal ones

    Give it a whole lap, its rows in one order whatever the split: the choice depends on all of its tokens. The paper
    takes a mini-batch and the current policy's log-probabilities; the old ones are known before the split and the
    same in the first step.
    """
    mask = mask.cpu()
    n = int(mask.sum())
    chosen = torch.zeros_like(mask)
    count = max(int(covariance_share * n), 1) if covariance_share and n else 0
    logprobs, a = old_logprobs.detach().cpu().double(), advantages.detach().cpu().double()
    covariance = (logprobs - masked_mean(logprobs, mask)) * (a - masked_mean(a, mask))
    if kind == "clip_cov":
        candidates = ((covariance >= covariance_low) & (covariance <= covariance_high) & mask).nonzero().squeeze(1)
        order = candidates[torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))]
    elif kind == "kl_cov":
        order = torch.where(mask, covariance, -torch.inf).argsort(descending=True, stable=True)
    else:
        raise ValueError(f"no tokens are chosen by covariance for {kind!r}")
    chosen[order[:count]] = True
    return chosen.to(old_logprobs.device)


def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    covariance_tokens: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """``ppo_loss``, but 0 on ``covariance_tokens`` (Clip-Cov, arXiv 2505.22617).

    The paper's surrogate has no ratio clip and its code a very wide one; here it is the usual one.
    """
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, mask), select(advantages.detach(), mask)
    losses, clipped = _clipped_surrogate(log_ratio.exp(), advantages, clip_low, clip_high)
    return _loss(torch.where(covariance_tokens, 0, losses), log_ratio, mask, clipped | covariance_tokens)


def kl_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    covariance_tokens: Tensor,
    kl_cov_coef: float = 1.0,
) -> PolicyLoss:
    """``-A rho``, plus ``kl_cov_coef`` KL(old, new) on ``covariance_tokens`` (KL-Cov, arXiv 2505.22617); no clip.

    The KL is the k3 estimate, which has the paper's KL as its mean; the authors' code has ``|log rho|`` there. A chosen
    token has a gradient even where A = 0.
    """
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, mask), select(advantages.detach(), mask)
    penalty = torch.where(covariance_tokens, _k3(log_ratio), 0)
    return _loss(-advantages * log_ratio.exp() + kl_cov_coef * penalty, log_ratio, mask)


POLICY_LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "ppo": ppo_loss,
    "reinforce": reinforce,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo": dppo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
