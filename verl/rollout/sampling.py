"""Choosing tokens. The noise is a function of (seed, prompt, sample, position): batching and order can't change it."""

from __future__ import annotations

from hashlib import blake2b

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.rollout.base import Sampling

BLOCK = 256  # ids
CHUNK = 1 << 19  # logits treated at a time on a CPU: the passes over them then run in its cache


def noise_key(seed: int, prompt_id: str, sample: int) -> int:
    """A row's stream of noise: a stable 64-bit hash, as a signed integer."""
    digest = blake2b(f"{seed}/{sample}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """``[N]`` float64 in [0, 1 - 2^-52] for row ``keys [N]`` at response ``positions [N]`` (both int64).

    SplitMix64 (Steele et al. 2014) as a counter-based generator; int64 arithmetic wraps like uint64.
    """
    x = keys + (positions + 1) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shift(x, 31)
    return _shift(x, 12).double() * 2.0**-52


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical (zero-filling) right shift."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def choose(logits: Tensor, noise: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token per row: ``logits [N, V]`` (float32, overwritten), ``noise [N]`` -> ids ``[N]``, logprobs ``[N]``.

    The draw inverts the cumulative distribution in vocabulary order, in float64: a rounding difference in the logits
    moves its boundaries by as little, so the same noise gives the same token.
    """
    rows = max(1, logits.shape[0] if logits.is_cuda else CHUNK // logits.shape[1])
    parts = [_choose(z, u, sampling) for z, u in zip(logits.split(rows), noise.split(rows), strict=True)]
    ids, logprobs = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(logprobs)


def _choose(z: Tensor, noise: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    if sampling.temperature != 1.0:
        z.div_(sampling.temperature)
    top, mode = z.max(-1, keepdim=True)
    if sampling.greedy:
        return mode[:, 0], (top - z.logsumexp(-1, keepdim=True))[:, 0]
    if sampling.top_k or sampling.top_p < 1:
        z.masked_fill_(z < _least_kept(z, sampling), float("-inf"))
    weights = z.sub_(top).exp()
    ids, total = _invert(weights, noise)
    ids.clamp_(max=z.shape[1] - 1)  # beyond for NaN only, which the logprob then shows
    return ids, (z.gather(1, ids[:, None])[:, 0] - total.log()).float()


def _invert(weights: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The first id at which the running sum of ``weights [N, V]`` exceeds ``noise`` times their sum, and that sum.

    In two levels: a running sum over blocks, then one inside the block that was hit; a running sum over the whole
    vocabulary costs ten times as much. Never gives an id of weight 0, as noise is below 1 - 2^-53 at both levels.
    """
    if spare := -weights.shape[1] % BLOCK:
        weights = F.pad(weights, (0, spare))
    blocks = weights.view(weights.shape[0], -1, BLOCK)
    sums = blocks.sum(-1).double()
    hit, total, left = _first_above(sums, noise)
    inside = blocks[torch.arange(len(hit), device=hit.device), hit].double()
    place, _, _ = _first_above(inside, left)
    return hit * BLOCK + place, total


def _first_above(x: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First index at which the running sum of ``x [N, K]`` exceeds ``share [N]`` of the total; the total; and what
    share of the element there lies below the mark."""
    running = x.cumsum(-1)
    total = running[:, -1]
    mark = (share * total)[:, None]
    index = torch.searchsorted(running, mark, right=True).clamp_(max=x.shape[1] - 1)  # beyond for NaN only
    value = x.gather(1, index)
    below = (mark - (running.gather(1, index) - value)) / value
    return index[:, 0], total, below[:, 0].clamp(0, 1 - 2.0**-52)


def _least_kept(z: Tensor, sampling: Sampling) -> Tensor:
    """``[N, 1]`` smallest logit that stays: of the ``top_k`` largest, the fewest that hold ``top_p`` of their mass."""
    vocabulary = z.shape[1]
    values = z.topk(min(sampling.top_k or vocabulary, vocabulary), -1).values  # descending
    if sampling.top_p == 1:
        return values[:, -1:]
    p = values.softmax(-1, dtype=torch.float64)
    kept = p.cumsum(-1) - p < sampling.top_p  # mass before it is not enough yet
    return values.gather(1, (kept.sum(-1, keepdim=True) - 1).clamp_(min=0))  # none where a logit isn't finite
