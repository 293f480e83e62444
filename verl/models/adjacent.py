"""Linear layers of one input whose weights lie one behind the other in memory: one product computes them all.

The parameters stay what they are, with names, gradients and optimizer states of their own; only the memory is common.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def put_together(model: nn.Module) -> None:
    """Move the weights of such layers behind each other; to be called before anything holds their memory."""
    for module in model.modules():
        for names in TOGETHER:
            parts = [part for name in names if type(part := getattr(module, name, None)) is nn.Linear]
            alike = len({(p.in_features, p.bias is None) for p in parts}) == 1
            if len(parts) < len(names) or not alike or as_one(*parts) is not None:
                continue
            for tensors in ([p.weight for p in parts], [p.bias for p in parts if p.bias is not None]):
                if len({(t.dtype, t.device) for t in tensors}) == 1:
                    joint = torch.cat([t.data for t in tensors])
                    for t, part in zip(tensors, joint.split([len(t) for t in tensors]), strict=True):
                        t.data = part


def as_one(*parts: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight ``[sum of outputs, inputs]`` and bias of layers that lie so, in the same memory.

    ``None`` where they don't, or where more is computed than their products (adapters, hooks, fewer bits).
    """
    if any(type(p) is not nn.Linear or p._forward_hooks or p._forward_pre_hooks or "forward" in vars(p) for p in parts):
        return None
    weight = _joint([p.weight for p in parts])  # type: ignore[misc]
    biases = [p.bias for p in parts if p.bias is not None]
    bias = _joint(biases) if biases else None  # type: ignore[arg-type]
    if weight is None or (biases and (bias is None or len(biases) < len(parts))):
        return None
    return weight, bias


def _joint(tensors: Sequence[Tensor]) -> Tensor | None:
    first, end = tensors[0], tensors[0].data_ptr()
    for t in tensors:
        if not t.is_contiguous() or t.data_ptr() != end or t.shape[1:] != first.shape[1:] or t.dtype != first.dtype:
            return None
        if t.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None  # neighbours by chance
        end += t.nbytes
    shape = (sum(len(t) for t in tensors), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())
