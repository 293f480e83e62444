"""What ranks save in pieces, put together again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.engines.base import TrainEngine
from verl.engines.optim import Optimizer
from verl.engines.sharding import whole
from verl.layout import Piece


def joined(pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """Each value must come once."""
    found: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for name, tensor, shape, start in pieces:
        into = found.setdefault(name, torch.full(shape, float("nan"), dtype=tensor.dtype))
        count = seen.setdefault(name, torch.zeros(shape))
        box = tuple(slice(at, at + n) for at, n in zip(start, tensor.shape, strict=True))
        into[box] = tensor
        count[box] += 1
    assert all(count.eq(1).all() for count in seen.values()), {n: c for n, c in seen.items() if not c.eq(1).all()}
    return found


def saved_state(engine: TrainEngine) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state as a checkpoint has it: copies of what all ranks save, which call this together."""
    weights, state, facts = engine.saved(True)
    for _ in weights:  # these come first
        pass
    mine = [piece._replace(tensor=piece.tensor.detach().to("cpu", copy=True)) for piece in state]
    if not dist.is_initialized():
        return joined(mine), facts
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    return joined(piece for pieces in of_all for piece in pieces), facts


def gathered_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of what all ranks hold, whole on each."""
    return {key: (t if like is None else whole(t, like)).detach().clone() for key, t, like in optimizer.held()}
