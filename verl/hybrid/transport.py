"""How bytes get from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Messages = Mapping[int, Sequence[Tensor]]  # by the rank at the other end


class Transport(Protocol):
    """``device``: where the tensors that it carries must lie."""

    device: torch.device

    def start(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        """Begin an exchange with other ranks, by rank; flat contiguous tensors, in an order and of sizes that both
        sides know.

        The caller touches none of them until the function that it gets has returned. Every rank starts the same
        exchanges in the same order, also those in which it has nothing to do, and ends them in this order.
        """
        ...


class Alone:
    """One process: there is nobody to exchange with."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        if sends or receives:
            raise ValueError("one process has no other ranks")
        return lambda: None


class Distributed:
    """torch.distributed's point-to-point operations: NCCL from GPU to GPU, gloo between CPUs."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # NCCL's first exchange must have all ranks in it

    def start(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        ops = [
            dist.P2POp(way, tensor, peer, self.group, number)
            for way, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensors in sorted(messages.items())
            for number, tensor in enumerate(tensors)
        ]
        pending = dist.batch_isend_irecv(ops) if ops else []

        def wait() -> None:
            for work in pending:
                work.wait()
            ops.clear()  # until now they kept the tensors

        return wait
