"""Micro-batches through the stages of a pipeline, each stage on a rank of its own: one forward, one backward in turn
(arXiv 2104.04473, section 2.2), so that a stage keeps the activations of at most as many micro-batches as there are
stages from it to the last.

All stages see the same rows, so they know the shape of what comes without being told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Compute = Callable[[int, Tensor | None], Tensor]
"""``(number of a micro-batch, what the previous stage gave)`` -> what the next stage gets; on the last, the loss."""


class Pipeline:
    """This rank's place. ``group``: a rank for each stage, in order, which all make it together. ``device``: of what
    goes between stages."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.stages, self.stage = group, dist.get_world_size(group), dist.get_rank(group)
        if self.stages > 1:  # NCCL's first exchange must have all ranks in it
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def forward(self, n: int, compute: Compute, buffer: Callable[[int], Tensor]) -> None:
        """``n`` micro-batches without gradients. ``buffer``: for what comes of a micro-batch from the stage before."""
        for i in range(n):
            received = self._exchange(before=self._empty(i, buffer))
            y = compute(i, received)
            self._exchange(to_next=None if self.last else y)

    def train(self, n: int, compute: Compute, buffer: Callable[[int], Tensor]) -> None:
        """``n`` micro-batches forward and backward; gradients add up in the parameters."""
        early = min(self.stages - 1 - self.stage, n)  # forwards before the first backward
        open_: deque[tuple[Tensor | None, Tensor]] = deque()

        def forward(i: int, x: Tensor | None) -> Tensor | None:
            y = compute(i, None if x is None else x.requires_grad_())
            open_.append((x, y))
            return None if self.last else y.detach()

        def backward(grad: Tensor | None) -> Tensor | None:
            x, y = open_.popleft()
            torch.autograd.backward(y, grad)
            return None if x is None else x.grad

        for i in range(early):
            self._exchange(to_next=forward(i, self._exchange(before=self._empty(i, buffer))))
        x = self._exchange(before=self._empty(early, buffer)) if early < n else None
        for i in range(early, n):
            y = forward(i, x)
            done = i - early
            grad = backward(self._exchange(to_next=y, after=None if self.last else buffer(done)))
            x = self._exchange(to_previous=grad, before=self._empty(i + 1, buffer) if i + 1 < n else None)
        for i in range(n - early, n):
            self._exchange(to_previous=backward(self._exchange(after=buffer(i))))

    def swap(self, tensor: Tensor) -> Tensor:
        """First and last stage call this: what the other one has."""
        other = torch.empty_like(tensor)
        peer = dist.get_global_rank(self.group, self.stages - 1 - self.stage)
        self._do([dist.P2POp(dist.isend, tensor, peer, self.group), dist.P2POp(dist.irecv, other, peer, self.group)])
        return other

    def _empty(self, i: int, buffer: Callable[[int], Tensor]) -> Tensor | None:
        return buffer(i) if self.stage else None

    def _exchange(
        self,
        *,
        to_next: Tensor | None = None,
        to_previous: Tensor | None = None,
        before: Tensor | None = None,
        after: Tensor | None = None,
    ) -> Tensor | None:
        """Send and receive at once, so that neighbours that each send first don't wait for each other. Gives the buffer
        (``before``: from the previous stage, ``after``: from the next) with what came."""
        ops = []
        for tensor, op, step in (
            (to_previous, dist.isend, -1),
            (before, dist.irecv, -1),
            (to_next, dist.isend, 1),
            (after, dist.irecv, 1),
        ):
            if tensor is not None:
                peer = dist.get_global_rank(self.group, self.stage + step)
                ops.append(dist.P2POp(op, tensor.contiguous(), peer, self.group))
        self._do(ops)
        return before if before is not None else after

    @staticmethod
    def _do(ops: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
