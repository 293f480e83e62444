"""Advantages from rewards, in the flat ragged form of ``reduce``: one per row from the scores of its group, or one per
token. ``ESTIMATORS`` lists them; the names of their arguments say what they read.

A NaN score means that every reward abstained on the row: it is left out of its group's statistics and gets advantage 0.
Whitening over the batch, where an algorithm has it, comes afterwards (``reduce.masked_whiten``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from verl.algorithms.kl import kl_estimate
from verl.algorithms.reduce import last_tokens, row_counts, select


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
    rows = row[mask].unique()
    placed = scores.to(mask.device)[rows]
    if torch.isnan(placed).any():
        raise ValueError(f"rows {rows[torch.isnan(placed)].tolist()} have no score: mask them out first")
    if len(rows):
        rewards[last_tokens(mask, row, n_rows)[rows]] = placed.to(rewards.dtype)
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


def _spread(compact: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """``[T]`` with ``compact`` at the flat positions ``tokens`` and 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=compact.dtype, device=mask.device).index_copy(0, tokens, compact)


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
    return TokenAdvantages(_spread(advantages, tokens, mask), _spread(advantages + v, tokens, mask))


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, row: Tensor, gamma: float = 1.0) -> TokenAdvantages:
    """REINFORCE++ (arXiv 2501.03262): the discounted reward-to-go, ``A_t = r_t + gamma A_{t+1}``; then whitened.

    ``rewards [T]`` with the KL penalty of each token in them. Tool tokens as in ``gae``.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, row, gamma, lam=1.0)


def distill(old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> TokenAdvantages:
    """On-policy distillation: ``A_t = -(log student - log teacher)`` of the sampled token, both ``[T]``.

    Its mean is minus the reverse KL to the teacher on the student's own tokens, one step ahead: what a token does to
    later ones isn't counted (the field's choice, a discount of 0; arXiv 2306.13649 has the loss form).
    """
    advantages = select(teacher_logprobs.detach(), mask) - select(old_logprobs.detach(), mask)
    return TokenAdvantages(advantages, advantages)


class _Groups(NamedTuple):
    """Scores by group, measured from one of the group's own.

    So equal scores are exact zeros everywhere; the mean of n equal floats need not equal them.
    """

    relative: Tensor  # [B] float64, score - the score of the group's first scored row; 0 on abstained rows
    valid: Tensor  # [B] bool, False on abstained rows
    number: Tensor  # [B] the row's group, in 0..G-1
    scored: Tensor  # [G] rows with a score
    sizes: Tensor  # [G] rows

    def sums(self, values: Tensor) -> Tensor:
        """``[G]`` sums of ``values [B]``."""
        return values.new_zeros(len(self.sizes)).index_add(0, self.number, values)

    def deviation(self) -> Tensor:
        """``[B]`` float64, score - group mean; 0 on abstained rows."""
        mean = self.sums(self.relative) / self.scored.clamp(min=1)
        return select(self.relative - mean[self.number], self.valid)


def _groups(scores: Tensor, group: Tensor, allow_singletons: bool) -> _Groups:
    scores = scores.double()
    names, index, sizes = torch.unique(group, return_inverse=True, return_counts=True)
    if not allow_singletons and (sizes == 1).any():
        raise ValueError(
            f"groups {names[sizes == 1].tolist()} have one row; a group baseline needs at least 2 (or allow_singletons)"
        )
    _refuse_infinite(scores)
    valid = ~torch.isnan(scores)
    position = torch.arange(len(scores), device=scores.device)
    first = torch.full_like(sizes, len(scores) - 1).scatter_reduce(0, index[valid], position[valid], "amin")
    scored = torch.zeros_like(sizes).index_add(0, index, valid.long())
    return _Groups(select(scores - scores[first][index], valid), valid, index, scored, sizes)


def _refuse_infinite(scores: Tensor) -> None:
    if torch.isinf(scores).any():
        raise ValueError(f"rows {torch.isinf(scores).nonzero().flatten().tolist()} have an infinite score")


def grpo(
    scores: Tensor, group: Tensor, scale: Literal["std", "none"] = "std", allow_singletons: bool = False
) -> Tensor:
    """``[B]`` float64: ``(R - mean) / (std + 1e-6)`` within each group, std unbiased (GRPO, arXiv 2402.03300).

    ``scale="none"`` leaves the deviation undivided (Dr. GRPO, arXiv 2503.20783). Equal scores give exactly 0.
    ``scores [B]`` (NaN: abstained), ``group [B]`` int. ``ValueError`` for a group of one row, unless
    ``allow_singletons``, and for an infinite score; a group left with one *scored* row gets 0.
    """
    groups = _groups(scores, group, allow_singletons)
    deviation = groups.deviation()
    if scale == "none":
        return deviation
    std = (groups.sums(deviation.square()) / (groups.scored - 1).clamp(min=1)).sqrt()
    return deviation / (std[groups.number] + 1e-6)


def rloo(scores: Tensor, group: Tensor, allow_singletons: bool = False) -> Tensor:
    """``[B]`` float64: R minus the mean of the group's *other* scores, ``n / (n - 1) * (R - mean)`` (arXiv 2402.14740).

    Arguments and errors as in ``grpo``.
    """
    groups = _groups(scores, group, allow_singletons)
    return groups.deviation() * (groups.scored.double() / (groups.scored - 1).clamp(min=1))[groups.number]


def reinforce_plus_plus_baseline(scores: Tensor, group: Tensor, allow_singletons: bool = False) -> Tensor:
    """``[B]`` float64: ``R - mean`` of the group, then whitened over the batch instead of divided by a group's own
    deviation (REINFORCE++ with baseline, arXiv 2501.03262). Arguments and errors as in ``grpo``.
    """
    return _groups(scores, group, allow_singletons).deviation()


def remax(scores: Tensor, greedy_scores: Tensor) -> Tensor:
    """``[B]`` float64: R minus the reward of the same prompt's greedy answer (ReMax, arXiv 2310.10505).

    ``scores [B]``, ``greedy_scores [B]``; 0 where either abstained (NaN). ``ValueError`` for an infinite score.
    """
    _refuse_infinite(scores)
    _refuse_infinite(greedy_scores)
    difference = scores.double() - greedy_scores.double()
    return select(difference, ~torch.isnan(difference))


def opo(scores: Tensor, group: Tensor, lengths: Tensor, allow_singletons: bool = False) -> Tensor:
    """``[B]`` float64: R minus the group's length-weighted mean, ``sum L R / sum L`` (OPO, arXiv 2505.23585).

    ``lengths [B]``: the row's tokens in the loss mask; a row without any has no weight. Rest as in ``grpo``.
    """
    groups = _groups(scores, group, allow_singletons)
    weights = select(lengths.double(), groups.valid)
    baseline = groups.sums(weights * groups.relative) / groups.sums(weights).clamp(min=1)
    return select(groups.relative - baseline[groups.number], groups.valid)


def gpg(scores: Tensor, group: Tensor, allow_singletons: bool = False) -> Tensor:
    """``[B]`` float64: ``alpha (R - mean)`` within each group (GPG, arXiv 2504.02546, F_norm = 1).

    ``alpha`` = the batch's scored rows / those in groups whose scores differ. Groups of equal scores have no gradient
    but stay in the loss's denominator; alpha makes the mean one over the groups that have some. (The paper counts
    groups, B / (B - M), which is the same for equal sizes; some code counts rows of score 0 instead.) Rest as in
    ``grpo``.
    """
    groups = _groups(scores, group, allow_singletons)
    differ = groups.sums((groups.relative != 0).double()) > 0
    return groups.deviation() * (groups.scored.sum() / groups.scored[differ].sum().clamp(min=1))


def pass_k(scores: Tensor, group: Tensor, pass_k: int, allow_singletons: bool = False) -> Tensor:
    """``[B]`` float64: the group-normalised advantage of the reward "one of k answers is right", taken over all subsets
    of k of a group's answers at once (pass@k training, arXiv 2508.10751, analytic form).

    A score above 0.5 is right. With n scored rows, w of them wrong, the share of subsets without a right one is
    ``F = C(w, k) / C(n, k)``; the paper's formulas come to ``A = sqrt(F / (1 - F))`` for a right row and
    ``-A (n - w) / w`` for a wrong one. Groups where every subset succeeds (w < k), or none, get 0.
    ``ValueError`` for a group of fewer than k rows (one row passes with ``allow_singletons``), rest as in ``grpo``.
    """
    groups = _groups(scores, group, allow_singletons)
    small = (groups.sizes < pass_k) & ~((groups.sizes == 1) & allow_singletons)
    if small.any():
        names = torch.unique(group)[small].tolist()
        raise ValueError(f"groups {names} have fewer rows than pass_k = {pass_k}; raise group_size or lower pass_k")
    right = scores > 0.5
    n, hits = groups.scored, groups.sums(right.long())
    wrong, fail = n - hits, torch.ones(len(n), dtype=torch.float64, device=scores.device)
    for i in range(pass_k):
        fail = fail * (wrong - i).clamp(min=0) / (n - i).clamp(min=1)
    mixed = (hits > 0) & (fail > 0)
    gain = select(fail / (1 - fail), mixed).sqrt()
    loss = gain * hits / wrong.clamp(min=1)
    return select(torch.where(right, gain[groups.number], -loss[groups.number]), groups.valid)


def gdpo(
    per_reward: Mapping[str, Tensor], reward_weights: Sequence[float], group: Tensor, allow_singletons: bool = False
) -> Tensor:
    """``[B]`` float64: each reward normalised within its group by itself (``grpo``), then summed with its weight and
    whitened over the batch (GDPO, arXiv 2601.05242).

    ``per_reward``: ``[B]`` scores by name, NaN where that reward abstained; ``reward_weights`` in the same order.
    ``ValueError`` when their numbers differ or there is no reward, rest as in ``grpo``.
    """
    if len(per_reward) != len(reward_weights) or not per_reward:
        raise ValueError(f"{len(per_reward)} rewards and {len(reward_weights)} weights; give each reward one weight")
    parts = [
        weight * grpo(scores, group, "std", allow_singletons)
        for weight, scores in zip(reward_weights, per_reward.values(), strict=True)
    ]
    return torch.stack(parts).sum(0)


def prime(
    token_rewards: Tensor,
    scores: Tensor,
    group: Tensor,
    mask: Tensor,
    row: Tensor,
    n_rows: int,
    gamma: float = 1.0,
    allow_singletons: bool = False,
) -> TokenAdvantages:
    """Outcome and implicit process reward (PRIME, arXiv 2502.01456, equation 5):
    ``A_t = rloo(scores) + sum_{s >= t} gamma^(s - t) (r_s - b)``.

    ``token_rewards [T]``: r, the process reward of each token; b, the mean over the group's *other* rows of their mean
    token reward. (Their code centres by n / (n - 1) of the whole group's mean and scales r alike; this is the paper's.)
    Abstained rows are in neither part; a row without another one in its group has no process part. Tool tokens as in
    ``gae``, scores and errors as in ``grpo``.
    """
    dtype = torch.promote_types(token_rewards.dtype, torch.float32)
    outcome = rloo(scores, group, allow_singletons).to(mask.device)
    tokens = without_abstained(mask, row, scores).nonzero().squeeze(1)
    r, own = token_rewards.detach()[tokens].double(), row[tokens]
    names, index = torch.unique(group.to(mask.device), return_inverse=True)
    place = torch.arange(len(tokens), device=mask.device)
    first = torch.full_like(names, 0).scatter_reduce(0, index[own], place, "amin", include_self=False)
    r = r - r[first[index[own]]]  # as in _Groups: equal rewards are exact zeros

    means = torch.zeros(n_rows, dtype=torch.float64, device=mask.device).index_add(0, own, r)
    counts = row_counts(mask.new_ones(len(own)), own, n_rows)
    means = means / counts.clamp(min=1)
    others = torch.zeros_like(names).index_add(0, index, (counts > 0).long())[index] - 1
    baseline = (means.new_zeros(len(names)).index_add(0, index, means)[index] - means) / others.clamp(min=1)
    process = torch.where(others[own] > 0, r - baseline[own], 0)
    advantages = _spread((discounted_sums(process, own, gamma) + outcome[own]).to(dtype), tokens, mask)
    return TokenAdvantages(advantages, advantages)


def broadcast(advantages: Tensor, mask: Tensor, row: Tensor) -> Tensor:
    """``[T]`` float32: each row's advantage ``[B]`` on its masked tokens, 0 elsewhere."""
    return select(advantages.to(mask.device, torch.float32)[row], mask)


# Called by argument name: see the module's docstring. ``[B]``: one advantage for all of a row's tokens (``broadcast``).
ESTIMATORS: dict[str, Callable[..., Tensor | TokenAdvantages]] = {
    "gae": gae,
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "pass_k": pass_k,
    "gdpo": gdpo,
    "prime": prime,
    "distill": distill,
}
