"""Triton kernels between the output head's products: statistics of rows of logits, and the loss's slopes there.

Row ``i`` of raw logits ``z [N, V]`` (float32) means the density ``p = softmax(x)``, ``x = slope * z``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _statistics(z, target, logprob, normaliser, entropy, slope, vocabulary: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z += row * vocabulary
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)  # of exp(x - top)
    moment = tl.zeros((), tl.float32)  # of exp(x - top) * x
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < vocabulary
        x = tl.load(z + at, mask=inside, other=float("-inf")) * slope
        higher = tl.maximum(top, tl.max(x, 0))
        e = tl.exp(x - higher)
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(e, 0)
        moment = moment * shrink + tl.sum(tl.where(inside, e * x, 0.0), 0)
        top = higher
    log_total = top + tl.log(total)
    own = tl.load(z + tl.load(target + row)) * slope
    tl.store(logprob + row, own - log_total)
    tl.store(normaliser + row, log_total)
    tl.store(entropy + row, log_total - moment / total)


@triton.jit
def _slopes(
    z, target, normaliser, entropy, grad, grad_entropy, out, slope, vocabulary: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocabulary
    x = tl.load(z + row * vocabulary + at, mask=inside, other=0.0) * slope
    g = tl.load(grad + row) * slope
    log_p = x - tl.load(normaliser + row)
    inner = g + (log_p + tl.load(entropy + row)) * (tl.load(grad_entropy + row) * slope)
    d = tl.where(at == tl.load(target + row), g, 0.0) - tl.exp(log_p) * inner
    tl.store(out + row * vocabulary + at, d.to(out.dtype.element_ty), mask=inside)


def statistics(z: Tensor, targets: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    """``(log p of the target, logsumexp, entropy)`` of each row, ``[N]`` each, in one pass over ``z``."""
    n, vocabulary = z.shape
    out = [z.new_empty(n) for _ in range(3)]
    with torch.cuda.device_of(z):
        _statistics[(n,)](z, targets, *out, slope, vocabulary, BLOCK)
    return out[0], out[1], out[2]


def slopes(
    z: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    grad: Tensor | None,
    grad_entropy: Tensor | None,
    slope: float,
    dtype: torch.dtype,
) -> Tensor:
    """``d loss / d z [N, V]`` in ``dtype``, of a loss whose slopes in log p and entropy are ``grad`` and
    ``grad_entropy [N]`` (``None``: 0); the rest is what ``statistics`` was given and gave."""
    n, vocabulary = z.shape
    grad, grad_entropy = (torch.zeros_like(normaliser) if g is None else g.contiguous() for g in (grad, grad_entropy))
    out = torch.empty(n, vocabulary, dtype=dtype, device=z.device)
    grid = (n, triton.cdiv(vocabulary, BLOCK))
    with torch.cuda.device_of(z):
        _slopes[grid](z, targets, normaliser, entropy, grad, grad_entropy, out, slope, vocabulary, BLOCK)
    return out
