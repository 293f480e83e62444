"""Log-probabilities of chosen tokens from hidden states, without ever holding all logits.

The output head is a third of a small model's work and ``[tokens, vocabulary]`` is by far its largest tensor, so values
and gradients are computed by runs of tokens. With raw logits ``x = hidden @ weight.T + bias``::

    z = cap(scale * x) / temperature          cap(y) = softcap * tanh(y / softcap), or y
    logprob = z[target] - logsumexp(z)        d logprob / dz = onehot - p,   p = softmax(z)
    entropy = -sum(p * log p)                 d entropy / dz = -p * (log p + entropy)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# of one run's logits: on a CPU about what its last cache holds; on a GPU each run adds to the whole head's gradient, so
# few large ones
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 768 << 20}
HALF = torch.bfloat16, torch.float16
KEEP_BYTES = 512 << 20  # up to here log-softmax is kept for the backward, beyond it is recomputed: one matmul in four


def head_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, scale: float = 1.0, softcap: float | None = None
) -> Tensor:
    """``hidden [N, D]`` and the head ``[V, D]`` -> logits ``[N, V]`` in float32 (float64 for float64 inputs)."""
    if hidden.is_cuda and hidden.dtype in HALF and not torch.is_grad_enabled():
        z = torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # logits never rounded to 8 bits of mantissa
    else:
        z = hidden @ weight.t()
        z = z if z.dtype == torch.float64 else z.float()
    if bias is not None:
        z = z + bias
    if softcap is not None:
        return torch.tanh(z * (scale / softcap)) * softcap
    return z if scale == 1.0 else z * scale


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, in ``total``'s precision also where the factors have less."""
    if a.is_cuda and a.dtype in HALF:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        scale: float,
        softcap: float | None,
        with_entropy: bool,
        chunk: int,
        keep_bytes: int,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        n, vocabulary = hidden.shape[0], weight.shape[0]
        out = hidden.new_empty(n, dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
        entropy, normaliser = torch.empty_like(out) if with_entropy else None, torch.empty_like(out)
        keep = any(ctx.needs_input_grad) and n * vocabulary * out.element_size() <= keep_bytes
        ctx.kept = []
        ctx.options = temperature, scale, softcap, chunk
        ctx.fused = _fused(hidden, bias, softcap)
        if ctx.fused and entropy is None:
            entropy = torch.empty_like(out)
        for at in range(0, n, chunk):
            part = slice(at, at + chunk)
            if ctx.fused:
                assert entropy is not None
                z = head_logits(hidden[part], weight, None)
                out[part], normaliser[part], entropy[part] = _kernels().statistics(
                    z, targets[part], scale / temperature
                )
                if keep:
                    ctx.kept.append(z)
                continue
            z = _tempered(head_logits(hidden[part], weight, bias, scale=scale, softcap=softcap), temperature)
            log_p = torch.log_softmax(z, -1)
            out[part] = log_p.gather(1, targets[part, None])[:, 0]
            normaliser[part] = z.gather(1, targets[part, None])[:, 0] - out[part]
            if entropy is not None:
                entropy[part] = log_p.exp().mul_(log_p).sum(-1).neg_()
            if keep:
                ctx.kept.append(log_p)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        return out, entropy if with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None and grad_entropy is None:
            return (None,) * 10
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        temperature, scale, softcap, chunk = ctx.options
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:  # summed over the runs in float32: a run is small beside the sum
            grad_weight = torch.zeros_like(weight, dtype=normaliser.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = torch.zeros_like(bias, dtype=normaliser.dtype)
        for number, at in enumerate(range(0, hidden.shape[0], chunk)):
            part = slice(at, at + chunk)
            h = hidden[part]
            g = None if grad is None else grad[part]
            ge = None if grad_entropy is None else grad_entropy[part]
            known = targets[part], normaliser[part], None if entropy is None else entropy[part], g, ge
            if ctx.fused:
                z = ctx.kept[number] if ctx.kept else head_logits(h, weight, None)
                d = _kernels().slopes(z, *known, slope=scale / temperature, dtype=weight.dtype)
            else:
                if ctx.kept:
                    log_p = ctx.kept[number]
                else:
                    z = _tempered(head_logits(h, weight, bias, scale=scale, softcap=softcap), temperature)
                    log_p = z.sub_(normaliser[part, None])
                d = slopes(log_p, *known, temperature, scale, softcap).to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(d, weight, out=grad_hidden[part])
            if grad_weight is not None:
                add_product(grad_weight, d.t(), h)
            if grad_bias is not None:
                grad_bias += d.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 7,
        )


def _tempered(z: Tensor, temperature: float) -> Tensor:
    return z if temperature == 1.0 else z.div_(temperature)


def slopes(
    log_p: Tensor, targets: Tensor, normaliser: Tensor, entropy: Tensor | None, grad: Tensor | None,
    grad_entropy: Tensor | None, temperature: float, scale: float = 1.0, softcap: float | None = None,
    own: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``d loss / d x`` of a run of tokens; ``log_p`` stays as it is. ``own``: which targets are columns of ``log_p``
    (default: all)."""
    slope = scale / temperature
    d = log_p.exp()
    g = None if grad is None else grad[:, None] * slope
    if grad_entropy is not None:
        assert entropy is not None
        inner = (log_p + entropy[:, None]).mul_(grad_entropy[:, None] * slope)
        d.mul_(inner if g is None else inner.add_(g)).neg_()
    elif g is not None:
        d.mul_(-g)
    if g is not None:
        d.scatter_add_(1, targets[:, None], g if own is None else torch.where(own[:, None], g, 0))
    if softcap is not None:  # tanh = z * temperature / softcap
        tanh = (log_p + normaliser[:, None]).mul_(temperature / softcap)
        d.addcmul_(d, tanh.square_(), value=-1)
    return d


def _fused(hidden: Tensor, bias: Tensor | None, softcap: float | None) -> bool:
    """Whether what lies between the products is one kernel each way; else every operation reads and writes a run."""
    return hidden.is_cuda and hidden.dtype != torch.float64 and bias is None and softcap is None


def _kernels() -> Any:
    from verl.models import head_kernels  # where there is no GPU there may be no Triton

    return head_kernels


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    with_entropy: bool = False,
    chunk: int | None = None,
    keep_bytes: int = KEEP_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target under the density that was sampled from, and that density's entropy.

    Args:
        hidden: ``[N, D]`` final hidden states; ``weight [V, D]`` and ``bias [V]`` are the output head.
        targets: ``[N]`` token ids.
        temperature: of the sampler; the trainer's density must be the sampled one.
        scale, softcap: the model's own treatment of its logits (module docstring).
        with_entropy: also give the entropy ``[N]`` in nats, differentiable like the log-probabilities.
        chunk: tokens per run; default: as many as CHUNK_BYTES of logits hold.
        keep_bytes: log-probabilities of all tokens are kept for the backward pass up to this size.

    Returns:
        ``([N], [N] or None)`` in float32 (float64 for float64 inputs).
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} has no density; it must be above 0")
    if chunk is None:
        size = 8 if hidden.dtype == torch.float64 else 4
        chunk = max(1, CHUNK_BYTES[hidden.device.type] // (size * weight.shape[0]))
    return _TokenLogprobs.apply(
        hidden, weight, bias, targets, temperature, scale, softcap, with_entropy, chunk, keep_bytes
    )
