"""Masters and optimizer state cut over the ranks that have the same parameters: what Megatron calls a distributed
optimizer, and DeepSpeed ZeRO of stage 1 (arXiv 1910.02054).

Parameters lie one after the other in one piece of memory, a *bucket*, and each rank steps an equal part of it::

    parameters    | embedding          | norm | queries, keys, values | ...
    stepped by    | rank 0       | rank 1       | rank 2       | rank 3

So one reduce-scatter sums a bucket's gradients into the ranks' parts, and one all-gather brings the stepped parameters
back to all ranks, in place and in their own dtype.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.config.model import OptimizerConfig
from verl.engines.adam8 import BLOCK
from verl.engines.optim import Optimizer

# newer releases of torch warn of the older names
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class DistributedOptimizer(Optimizer):
    """An ``Optimizer`` whose masters are this rank's parts of the parameters: ``[n]``, or ``[1, n]`` of a matrix, so
    that what goes by dimension still does; ``n`` may be 0. ``reduce`` comes before ``step``. With one rank the masters
    are whole, as they are elsewhere.

    Args:
        named: parameters of one dtype and device. Their memory moves, once, here.
        group: the ranks that have these parameters.
        apart: names of parameters that have a bucket of their own. Their parts don't depend on what else there is.
        offload: as ``Optimizer``; gradients are summed up, over micro-batches and ranks, in CPU memory then.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        cfg: OptimizerConfig,
        total_steps: int | None,
        group: Any,
        apart: Container[str] = (),
        offload: bool = False,
    ) -> None:
        params = dict(named)
        self.buckets: list[_Bucket] = []
        if dist.get_world_size(group) > 1:
            split = [{name: p for name, p in params.items() if (name in apart) is alone} for alone in (True, False)]
            self.buckets = [_Bucket(found, group, offload) for found in split if found]
            parts = {name: part for bucket in self.buckets for name, part in bucket.parts().items()}
            params = {
                name: nn.Parameter(parts[name][None] if p.ndim > 1 else parts[name]) for name, p in params.items()
            }
        self._bucket = {name: bucket for bucket in self.buckets for name in bucket.named}
        super().__init__(params.items(), cfg, total_steps, offload=offload)

    def reduce(self) -> None:
        """The sum of all ranks' gradients into the masters'; those that have been added up here are gone."""
        for bucket in self.buckets:
            for name, grad in bucket.reduced().items():
                self.masters[name].grad = grad.view_as(self.masters[name])

    def _write(self) -> None:
        super()._write()
        for bucket in self.buckets:
            bucket.gather()

    def whole(self, name: str, part: Tensor) -> Tensor:
        """What the ranks have parts of, as masters are, in the parameter's shape. All ranks call this."""
        return self._bucket[name].whole(name, part) if self.buckets else part

    def part(self, name: str, whole: Tensor) -> Tensor:
        """The way back: this rank's part, as its master is."""
        if not self.buckets:
            return whole
        return self._bucket[name].part_of(name, whole).clone().view_as(self.masters[name])


class _Bucket:
    """Parameters in one piece of memory, of which each rank of the group has an equal part.

    Parameters and parts begin at multiples of ``BLOCK`` values: those that 8-bit moments of a whole parameter have a
    scale for lie on one rank.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], group: Any, offload: bool) -> None:
        self.named, self.group = named, group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.at: dict[str, int] = {}
        end = 0
        for name, p in named.items():
            self.at[name], end = end, end + _up(p.numel(), BLOCK)
        self.size = _up(end, BLOCK * self.ranks) // self.ranks  # of a part
        self.own = {name: self._span(name, self.rank) for name in named}
        like = next(iter(named.values())).detach()
        self.values = like.new_zeros(self.size * self.ranks)
        self.place = torch.device("cpu") if offload else like.device
        self.grads: Tensor | None = None  # of the values, between the first backward pass and `reduced`
        for name, p in named.items():
            p.data = self._of(self.values, name).copy_(p.detach())
            p.register_post_accumulate_grad_hook(partial(self._add, name))

    def _of(self, flat: Tensor, name: str) -> Tensor:
        p = self.named[name]
        return flat[self.at[name] : self.at[name] + p.numel()].view(p.shape)

    def _add(self, name: str, p: Tensor) -> None:
        assert p.grad is not None
        self._of(self._sums(), name).add_(p.grad.to(self.place))
        p.grad = None

    def _sums(self) -> Tensor:
        if self.grads is None:
            self.grads = torch.zeros(self.values.shape, dtype=torch.float32, device=self.place)
        return self.grads

    def _span(self, name: str, rank: int) -> tuple[int, int]:
        """From where to where, in the bucket, the parameter is the rank's."""
        at, part = self.at[name], rank * self.size
        start = max(at, part)
        return start, max(start, min(at + self.named[name].numel(), part + self.size))

    def parts(self) -> dict[str, Tensor]:
        """This rank's parts of the parameters, ``[n]``, in place."""
        return {name: self.values[start:stop] for name, (start, stop) in self.own.items()}

    def reduced(self) -> dict[str, Tensor]:
        """The ranks' gradients, summed, of this rank's parts."""
        own, first = torch.empty(self.size, dtype=torch.float32, device=self.place), self.rank * self.size
        _scatter(own, self._sums(), group=self.group)
        self.grads = None
        return {name: own[start - first : stop - first] for name, (start, stop) in self.own.items()}

    def gather(self) -> None:
        """Each rank's part of the parameters to all others."""
        _gather(self.values, self.values.view(self.ranks, -1)[self.rank], group=self.group)

    def whole(self, name: str, part: Tensor) -> Tensor:
        found = part.new_empty(self.named[name].shape)
        flat, at = found.view(-1), self.at[name]
        self.part_of(name, flat).copy_(part.view(-1))
        for rank in range(self.ranks):
            start, stop = self._span(name, rank)
            if start < stop:
                dist.broadcast(flat[start - at : stop - at], dist.get_global_rank(self.group, rank), group=self.group)
        return found

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """``[n]``, this rank's values of ``whole``."""
        start, stop = self.own[name]
        return whole.reshape(-1)[start - self.at[name] : stop - self.at[name]]


def _up(n: int, step: int) -> int:
    """The next multiple of ``step``."""
    return -(-n // step) * step
