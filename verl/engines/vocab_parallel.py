"""Log-probabilities of chosen tokens where each tensor-parallel rank has some rows of the output head.

As ``models/logprobs.py``: values and gradients by runs of tokens, so that nobody ever holds all logits. Of each token
ranks tell each other three numbers, never logits: with ``z`` the tempered logits of a rank's own words,

    m = max over ranks of max(z)        s = sum over ranks of sum(exp(z - m))      t = z[target], on one rank
    logprob = t - m - log(s)            entropy = log(s) - sum over ranks of sum(exp(z - m) * (z - m)) / s
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.models.logprobs import CHUNK_BYTES, KEEP_BYTES, add_product, head_logits, slopes


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: Any,
    vocabulary: int,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk: int | None = None,
    keep_bytes: int = KEEP_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """As ``models.logprobs.token_logprobs``, on all ranks of ``group`` together.

    Args:
        hidden: ``[N, D]`` and ``targets [N]``: the same on every rank.
        weight: ``[v, D]``, this rank's rows of the head; rows after the last of the ``vocabulary`` are no words.
        group: the ranks, each with equally many rows, in order.

    Returns:
        ``([N], [N] or None)`` in float32, the same on every rank. Every rank is taken to compute the same with them, so
        a rank's own gradient of them is the gradient.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} has no density; it must be above 0")
    if chunk is None:
        chunk = max(1, CHUNK_BYTES[hidden.device.type] // (4 * weight.shape[0]))
    first = dist.get_rank(group) * weight.shape[0]
    words = min(max(vocabulary - first, 0), weight.shape[0])
    options = first, words, temperature, with_entropy, chunk, keep_bytes
    return _TokenLogprobs.apply(hidden, weight, targets, group, *options)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        group: Any,
        first: int,
        words: int,
        temperature: float,
        with_entropy: bool,
        chunk: int,
        keep_bytes: int,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        n, head = hidden.shape[0], weight[:words]
        out = hidden.new_empty(n, dtype=torch.float32)
        entropy, normaliser = torch.empty_like(out) if with_entropy else None, torch.empty_like(out)
        keep = any(ctx.needs_input_grad) and 4 * n * words <= keep_bytes
        ctx.kept = []
        ctx.options = group, first, words, temperature, chunk
        for at in range(0, n, chunk):
            part = slice(at, at + chunk)
            z = head_logits(hidden[part], head, None).div_(temperature)
            top = z.amax(-1) if words else z.new_full(z.shape[:1], float("-inf"))
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            shifted = z - top[:, None]
            told = z.new_zeros(3 if with_entropy else 2, z.shape[0])
            if words:
                place, own = _place(targets[part], first, words)
                told[0] = torch.where(own, shifted.gather(1, place[:, None])[:, 0], 0)
            exp = shifted.exp()
            told[1] = exp.sum(-1)
            if with_entropy:
                told[2] = exp.mul_(shifted).sum(-1)
            dist.all_reduce(told, group=group)
            log_sum = told[1].log()
            out[part] = told[0] - log_sum
            normaliser[part] = top + log_sum
            if entropy is not None:
                entropy[part] = log_sum - told[2] / told[1]
            if keep:
                ctx.kept.append(z.sub_(normaliser[part, None]))
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        return out, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None and grad_entropy is None:
            return (None,) * 10
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        group, first, words, temperature, chunk = ctx.options
        head = weight[:words]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for number, at in enumerate(range(0, hidden.shape[0], chunk) if words else ()):
            part = slice(at, at + chunk)
            h = hidden[part]
            if ctx.kept:
                log_p = ctx.kept[number]
            else:
                log_p = head_logits(h, head, None).div_(temperature).sub_(normaliser[part, None])
            place, own = _place(targets[part], first, words)
            e, g, ge = (None if x is None else x[part] for x in (entropy, grad, grad_entropy))
            d = slopes(log_p, place, normaliser[part], e, g, ge, temperature, own=own).to(weight.dtype)
            if grad_hidden is not None:
                add_product(grad_hidden[part], d, head)
            if grad_weight is not None:
                add_product(grad_weight[:words], d.t(), h)
        if grad_hidden is not None:
            dist.all_reduce(grad_hidden, group=group)
            grad_hidden = grad_hidden.to(hidden.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return (grad_hidden, grad_weight, *[None] * 8)


def _place(targets: Tensor, first: int, words: int) -> tuple[Tensor, Tensor]:
    """The targets' rows on this rank, some row for those that have none, and which have one."""
    place = targets - first
    return place.clamp(0, words - 1), (place >= 0) & (place < words)
