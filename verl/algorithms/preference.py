"""Losses on preferences and labels: pairs (DPO and its relatives), rows (KTO), reward models, implicit rewards, SFT.

Pair losses read ``chosen``, ``rejected``, ``ref_chosen``, ``ref_rejected`` ``[P]``: each response's token
log-probabilities *summed* over its masked tokens, under the policy and the frozen reference; ``chosen_lengths``,
``rejected_lengths`` ``[P]`` int64 count those tokens. Losses are per pair, row or token and undivided: divide their sum
by the mini-batch's global number of pairs, rows or tokens, and shares add over micro-batches and ranks.
Lengths and labels are judged (``ValueError``) where they lie on a CPU: to ask a GPU is to wait for it.
Gradients flow to the policy's log-probabilities or scores only. Everything is float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.algorithms.reduce import row_counts, row_sums, select

MIN_NLL = 1e-6  # nats per token; a smaller one is rounding noise in float32, and its odds have no bounded slope


class PairLoss(NamedTuple):
    """``losses [P]`` and each side's detached rewards ``[P]``.

    A policy's reward is implicit: ``beta * (policy - reference)`` where there is a reference, else
    ``beta * log-probability``. A reward model's is its score.
    """

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


class RowLoss(NamedTuple):
    """``losses [B]`` and detached ``rewards [B]``, as in ``PairLoss``."""

    losses: Tensor
    rewards: Tensor


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """``-(1 - e) log sigmoid(h) - e log sigmoid(-h)``, ``h`` = margin of the implicit rewards (arXiv 2305.18290).

    ``e = label_smoothing`` in [0, 0.5): the share of pairs thought to be labelled the wrong way round
    (conservative DPO, ericmitchell.ai/cdpo.pdf). Exactly ln 2 while policy and reference agree.
    """
    chosen_rewards = beta * _log_ratio(chosen, ref_chosen)
    rejected_rewards = beta * _log_ratio(rejected, ref_rejected)
    h = chosen_rewards - rejected_rewards
    # log sigmoid(-h) = log sigmoid(h) - h: one term to smooth, and no rounding at h = 0
    return _pairs(label_smoothing * h - F.logsigmoid(h), chosen_rewards, rejected_rewards)


def ipo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float,
) -> PairLoss:
    """``(d - 1 / (2 beta))^2``, ``d`` = difference of the two log-ratios (arXiv 2310.12036; its tau is our ``beta``).

    Log-ratios are *means per token*, so the target margin doesn't depend on length; so are the rewards.
    ``ValueError`` for a side without tokens.
    """
    chosen_ratio = _per_token(_log_ratio(chosen, ref_chosen), chosen_lengths)
    rejected_ratio = _per_token(_log_ratio(rejected, ref_rejected), rejected_lengths)
    losses = (chosen_ratio - rejected_ratio - 1 / (2 * beta)).square()
    return _pairs(losses, beta * chosen_ratio, beta * rejected_ratio)


def orpo(chosen: Tensor, rejected: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor, beta: float) -> PairLoss:
    """``-p_w - beta * log sigmoid(log odds(p_w) - log odds(p_l))``, ``p`` = mean log-probability per token.

    ``odds(p) = e^p / (1 - e^p)``, p at most -1e-6 there (arXiv 2403.07691; its lambda is our ``beta``). No reference.
    ``ValueError`` for a side without tokens.
    """
    p_chosen, p_rejected = _per_token(_wide(chosen), chosen_lengths), _per_token(_wide(rejected), rejected_lengths)
    preference = -F.logsigmoid(_log_odds(p_chosen) - _log_odds(p_rejected))
    return _pairs(beta * preference - p_chosen, beta * p_chosen, beta * p_rejected)


def simpo(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float,
    simpo_margin: float,
) -> PairLoss:
    """``-log sigmoid(beta p_w - beta p_l - simpo_margin)``, ``p`` = mean log-probability per token.

    arXiv 2405.14734; its gamma is our ``simpo_margin``. No reference. ``ValueError`` for a side without tokens.
    """
    chosen_rewards = beta * _per_token(_wide(chosen), chosen_lengths)
    rejected_rewards = beta * _per_token(_wide(rejected), rejected_lengths)
    return _pairs(-F.logsigmoid(chosen_rewards - rejected_rewards - simpo_margin), chosen_rewards, rejected_rewards)


def cpo(chosen: Tensor, rejected: Tensor, chosen_lengths: Tensor, beta: float, cpo_alpha: float = 1.0) -> PairLoss:
    """``-log sigmoid(beta (chosen - rejected)) + cpo_alpha * NLL(chosen)`` (arXiv 2401.08417). No reference.

    The NLL is a *mean per token*, so that ``cpo_alpha`` weighs long and short responses alike; the paper sums it.
    ``ValueError`` for a chosen side without tokens.
    """
    chosen, rejected = _wide(chosen), _wide(rejected)
    nll = -_per_token(chosen, chosen_lengths)
    return _pairs(cpo_alpha * nll - F.logsigmoid(beta * (chosen - rejected)), beta * chosen, beta * rejected)


def kto(
    logratios: Tensor,
    desirable: Tensor,
    baseline: Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> RowLoss:
    """``w_d (1 - sigmoid(beta (r - z)))`` on desirable rows, ``w_u (1 - sigmoid(beta (z - r)))`` on the others.

    ``r = logratios [B]``: policy - reference, summed over the row's masked tokens; ``desirable [B]`` bool;
    ``z = baseline``: see ``kto_baseline``, no gradient flows into it (arXiv 2402.01306).
    """
    logratios = _wide(logratios)
    h = beta * (logratios - baseline.detach())
    losses = torch.where(desirable, desirable_weight * torch.sigmoid(-h), undesirable_weight * torch.sigmoid(h))
    return RowLoss(losses, beta * logratios.detach())


def kto_baseline(total: Tensor, count: int | Tensor) -> Tensor:
    """KTO's estimate of KL(policy, reference): ``max(total / count, 0)``, a detached scalar.

    ``total``: sum of the mismatched rows' log-ratios (see ``mismatch``) over the whole mini-batch, all micro-batches
    and ranks; ``count``: their number. ``ValueError`` when there are none.
    """
    if count < 1:
        raise ValueError("KTO's baseline needs mismatched rows, there are none")
    return (_wide(total).detach() / count).clamp(min=0)


def mismatch(prompts: Sequence[Hashable]) -> list[int]:
    """Whose response each row is paired with for the baseline: the next row's in turn that answers another prompt.

    With all prompts different that is rotation by one; reversal would leave the middle of an odd number to itself.
    Rotate all rows of a lap, before they are cut: then a last mini-batch of one row has a partner, too. ``ValueError``
    for fewer than two rows, and where all have one prompt.
    """
    n, partners = len(prompts), []
    if n < 2:
        raise ValueError(
            f"KTO needs at least two rows per batch, this one has {n}: "
            "its baseline comes from prompts with another row's response"
        )
    for i, prompt in enumerate(prompts):
        later = ((i + k) % n for k in range(1, n))
        other = next((j for j in later if prompts[j] != prompt), None)
        if other is None:
            raise ValueError(
                f"KTO's baseline pairs each prompt with the answer to another one, but these {n} rows have one prompt; "
                "the data set (and eval.dataset) needs rows of at least two prompts"
            )
        partners.append(other)
    return partners


def kto_statistics(out: RowLoss, desirable: Tensor) -> dict[str, Tensor]:
    """Counts and reward sums of the two sides; they add over micro-batches and ranks, so a side may be 0 here."""
    rewards = out.rewards.double()
    sides = {"desirable": desirable, "undesirable": ~desirable}
    counts = {side: rows.sum() for side, rows in sides.items()}
    return counts | {f"{side}_reward": select(rewards, rows).sum() for side, rows in sides.items()}


def kto_means(sums: Mapping[str, float]) -> dict[str, float]:
    """``desirable_reward`` and ``undesirable_reward``, means of added ``kto_statistics``; absent for an absent side."""
    sides = [side for side in ("desirable", "undesirable") if sums[side]]
    return {f"{side}_reward": sums[f"{side}_reward"] / sums[side] for side in sides}


def pairwise(
    chosen_scores: Tensor, rejected_scores: Tensor, margins: Tensor | None = None, center_coef: float = 0.0
) -> PairLoss:
    """Reward model on pairs: ``-log sigmoid(r_w - r_l - margin) + center_coef (r_w + r_l)^2``, all ``[P]``.

    Bradley-Terry; the margin says by how much the chosen side is better (arXiv 2307.09288, section 3.2.2), centring
    keeps the scores' free offset near 0 (arXiv 2312.09244).
    """
    chosen, rejected = _wide(chosen_scores), _wide(rejected_scores)
    h = chosen - rejected
    if margins is not None:
        h = h - margins.detach().to(h.dtype)
    losses = -F.logsigmoid(h)
    if center_coef:
        losses = losses + center_coef * (chosen + rejected).square()
    return _pairs(losses, chosen, rejected)


def outcome(scores: Tensor, labels: Tensor) -> RowLoss:
    """Outcome verifier: cross-entropy of ``sigmoid(scores [B])`` with ``labels [B]`` (arXiv 2110.14168).

    ``ValueError`` for a label outside [0, 1].
    """
    scores = _wide(scores)
    return RowLoss(_cross_entropy(scores, labels), scores.detach())


def implicit_token_rewards(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, prime_beta: float) -> Tensor:
    """``[T]`` process rewards ``prime_beta * (logprobs - ref_logprobs)``, 0 outside the mask (arXiv 2502.01456).

    ``logprobs [T]`` are the implicit reward model's, with gradient: detach where the result is a reward.
    """
    return prime_beta * _log_ratio(select(logprobs, mask), select(ref_logprobs, mask))


def implicit_outcome(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    row: Tensor,
    n_rows: int,
    labels: Tensor,
    prime_beta: float,
) -> RowLoss:
    """Trains the implicit reward model: cross-entropy of ``sigmoid(sum of token rewards)`` with the outcome.

    ``labels [B]`` in [0, 1], else ``ValueError``. A row without a masked token costs 0, whatever its label (PRIME,
    arXiv 2502.01456).
    """
    rewards = row_sums(implicit_token_rewards(logprobs, ref_logprobs, mask, prime_beta), mask, row, n_rows)
    counted = row_counts(mask, row, n_rows) > 0
    return RowLoss(select(_cross_entropy(rewards, select(labels, counted)), counted), rewards.detach())


def sft(logprobs: Tensor, mask: Tensor) -> Tensor:
    """``[T]`` negative log-likelihood of each token, 0 outside the mask (the assistant's tokens)."""
    return -select(logprobs, mask)


def pair_index(group: Tensor, preferred: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers ``([P], [P])`` of the chosen and the rejected row of each pair, pairs in order of group number.

    ``group [B]`` int; ``preferred [B]`` int64: +1 chosen, -1 rejected, 0 neither. A group of zeros alone is no pair.
    ``ValueError`` for a group that has anything but one of each. Found on the host, whatever device they lie on.
    """
    sides: dict[int, tuple[list[int], list[int]]] = {}
    for row, (g, side) in enumerate(zip(group.tolist(), preferred.tolist(), strict=True)):
        if side:
            sides.setdefault(g, ([], []))[side < 0].append(row)
    wrong = [g for g, (chosen, rejected) in sorted(sides.items()) if (len(chosen), len(rejected)) != (1, 1)]
    if wrong:
        chosen, rejected = sides[wrong[0]]
        raise ValueError(
            f"group {wrong[0]} has {len(chosen)} chosen and {len(rejected)} rejected rows; "
            f"a pair is exactly one of each, in one micro-batch ({len(wrong)} such groups)"
        )
    pairs = [(chosen[0], rejected[0]) for _, (chosen, rejected) in sorted(sides.items())]
    index = torch.tensor(pairs, dtype=torch.int64, device=group.device).view(-1, 2)
    chosen_rows, rejected_rows = index.unbind(1)
    return chosen_rows, rejected_rows


def preferences_from_scores(scores: Tensor, group: Tensor) -> Tensor:
    """``[B]`` int64 for online DPO: +1 on the best row of each group, -1 on the worst, the first of equals; else 0.

    ``scores [B]`` (NaN: abstained, never picked), ``group [B]`` int. A group whose best and worst are equal, or with
    fewer than two scored rows, says nothing and gets 0 throughout.
    """
    names, index = torch.unique(group, return_inverse=True)
    scored = (~torch.isnan(scores)).nonzero().squeeze(1)

    def extreme(which: Literal["amax", "amin"]) -> tuple[Tensor, Tensor]:
        """``[G]`` score and the first row that has it; meaningless for a group without a score."""
        best = scores.new_zeros(len(names))
        best = best.scatter_reduce(0, index[scored], scores[scored], which, include_self=False)
        rows = scored[scores[scored] == best[index[scored]]]
        return best, rows.new_zeros(len(names)).scatter_reduce(0, index[rows], rows, "amin", include_self=False)

    (high, best), (low, worst) = extreme("amax"), extreme("amin")
    preferred = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    preferred[best[high > low]] = 1
    preferred[worst[high > low]] = -1
    return preferred


def pair_statistics(out: PairLoss) -> dict[str, Tensor | float]:
    """Sums that add over micro-batches and ranks; ``pairs`` is their denominator. A tie is not ``accurate``."""
    chosen, rejected = out.chosen_rewards.double(), out.rejected_rewards.double()
    return {
        "pairs": len(chosen), "accurate": (chosen > rejected).sum(), "margin": (chosen - rejected).sum(),
        "chosen_reward": chosen.sum(), "rejected_reward": rejected.sum(),
    }  # fmt: skip


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _log_ratio(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return _wide(logprobs) - _wide(ref_logprobs).detach()


def _per_token(sums: Tensor, lengths: Tensor) -> Tensor:
    if lengths.device.type == "cpu" and (lengths < 1).any():
        empty = (lengths < 1).nonzero().flatten().tolist()
        raise ValueError(f"pairs {empty} have a side without tokens; an empty response carries no preference")
    return sums / lengths


def _log_odds(logprobs: Tensor) -> Tensor:
    p = logprobs.clamp(max=-MIN_NLL)
    return p - torch.log(-torch.expm1(p))  # 1 - exp(p) has no digits left near p = 0


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    labels = labels.detach().to(logits)
    if labels.device.type == "cpu" and (outside := ~((labels >= 0) & (labels <= 1))).any():
        rows = outside.nonzero().flatten().tolist()
        raise ValueError(f"rows {rows} have a label outside [0, 1]: {labels[outside].tolist()}")
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")


def _pairs(losses: Tensor, chosen_rewards: Tensor, rejected_rewards: Tensor) -> PairLoss:
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())


PAIR_LOSSES: dict[str, Callable[..., PairLoss]] = {"dpo": dpo, "ipo": ipo, "orpo": orpo, "simpo": simpo, "cpo": cpo}
