"""One module over the ranks of a mesh: who holds what, when gradients are reduced, what all ranks agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from verl.config.errors import RequestError
from verl.engines.context_parallel import check_heads
from verl.engines.sharding import Sharding, local, prove, read, shard, units
from verl.engines.share import Share, of_all
from verl.engines.tensor_parallel import parallelize
from verl.models.policy import Policy
from verl.models.scorer import Scorer
from verl.models.value import SharedValue, Value

T = TypeVar("T")


class Spread:
    """Cuts and shards ``module`` in place. Without a mesh nothing is done, here and in every method.

    A value head on a shared backbone stays whole (it is one row); its backbone is the actor's to spread.
    """

    def __init__(
        self,
        module: Policy | Value | SharedValue | Scorer,
        mesh: DeviceMesh | None,
        sharding: Sharding,
        compute_dtype: torch.dtype | None,
        context: Any = None,
    ) -> None:
        self.mesh, self.sharding, self.context = mesh, sharding, context
        self.sharded = mesh is not None and sharding != "NO_SHARD" and not isinstance(module, SharedValue)
        if compute_dtype is not None and not self.sharded:
            raise RequestError("compute_dtype rounds sharded parameters; load the model in that dtype instead")
        self.ranks = 1
        self._module: nn.Module = module
        self._backbone: nn.Module = module.policy if isinstance(module, SharedValue) else module
        self._names: tuple[str, ...] = ()
        self._alike: set[str] = set()  # parameters that tensor-parallel ranks hold whole
        self._per_head: set[str] = set()  # and of these, those whose gradients there are parts of a sum
        if mesh is None:
            return
        self.ranks, self._names = mesh.size(), mesh.mesh_dim_names or ()
        tp = mesh["tp"].size() if "tp" in self._names else 1
        if context is not None and not isinstance(module, SharedValue):
            check_heads(module.config, context.size(), tp)
        if "tp" in self._names:
            per_head = [] if isinstance(module, SharedValue) else parallelize(module, mesh["tp"])
            self._alike = {name for name, p in module.trainable() if not isinstance(p, DTensor)}
            self._per_head = {name for name, p in module.trainable() if any(p is q for q in per_head)}
        if self.sharded:
            assert not isinstance(module, SharedValue)
            unread = module.unread is not None
            shard(module, mesh, sharding, compute_dtype)
            if unread:
                read(module, mesh.device_type)
                prove(module)

    def begin_pass(self, last: bool) -> None:
        """Before a micro-batch's forward: FSDP reduces gradients in the step's last backward pass alone."""
        if isinstance(self._module, FSDPModule):
            self._module.set_requires_gradient_sync(last)
            self._module.set_reshard_after_backward(last or self.sharding != "SHARD_GRAD_OP")

    def release(self) -> None:
        """Give up gathered parameters: they cost memory, and would be stale after an optimizer step."""
        for unit in units(self._backbone):
            unit.reshard()

    def reduce(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients that FSDP doesn't, in place; once per optimizer step.

        What tensor-parallel ranks hold alike they also compute alike: it is averaged, so that it stays alike whatever
        the order in which a kernel adds.
        """
        if self.mesh is None:
            return
        grads = {name: local(p.grad) for name, p in parameters.items() if p.grad is not None}
        for axis in self._names:
            named = {name: g for name, g in grads.items() if name in self._alike} if axis == "tp" else grads
            if axis != "tp" and self.sharded:
                continue
            group = self.mesh.get_group(axis)
            for work in [dist.all_reduce(grad, group=group, async_op=True) for grad in named.values()]:
                work.wait()
            if axis == "tp":
                for name in named.keys() - self._per_head:
                    grads[name].div_(self.mesh["tp"].size())
        if self.context is not None and isinstance(self._module, SharedValue):  # its head saw all tokens on each
            for grad in grads.values():
                grad.div_(self.context.size())

    def gather(self, stats: Mapping[str, float], tokens: int, square_sum: float) -> list[Share]:
        """The shares of all ranks, in the same order everywhere; rows that several ranks compute count once."""
        return self._of_all(Share({}, 0, square_sum) if self._again else Share(stats, tokens, square_sum))

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, added in the same order everywhere; rows that several ranks compute count once."""
        parts = self._of_all([0.0] * len(values) if self._again else [float(value) for value in values])
        return [sum(column) for column in zip(*parts, strict=True)]

    @property
    def _again(self) -> bool:
        """Whether another rank computes the same rows and counts them."""
        if self.mesh is None:
            return False
        beside = "tp" in self._names and self.mesh.get_local_rank("tp") > 0
        return beside or (self.context is not None and self.context.rank() > 0)

    def _of_all(self, mine: T) -> list[T]:
        """What each rank of the mesh has, in the same order everywhere."""
        return [mine] if self.mesh is None else of_all(self.mesh, reversed(self._names), mine)
