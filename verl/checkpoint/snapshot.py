"""Copies that training can't change, so that they can be written while it goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.checkpoint.tensorfile import Tensors, memory_of, plain


def snapshot(tensors: Tensors) -> dict[str, Tensor]:
    """Contiguous copies on the CPU; when this returns, the originals may change.

    Names of one memory in a mapping are one copy. Of an iterator's tensors, which may be gone after their turn, each is
    copied. From a GPU into pinned memory, which torch keeps for the next snapshot. Raises ``TypeError`` for a tensor
    that can't be saved.
    """
    copies: dict[str, Tensor] = {}
    known: dict[tuple, Tensor] = {}
    lasting = isinstance(tensors, Mapping)
    devices = set()
    for name, given in tensors.items() if isinstance(tensors, Mapping) else tensors:
        tensor = plain(name, given)
        memory = memory_of(tensor)
        if not (lasting and memory in known):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            known[memory] = copy.copy_(tensor, non_blocking=tensor.is_cuda)
            devices |= {tensor.device} if tensor.is_cuda else set()
        copies[name] = known[memory]
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies
