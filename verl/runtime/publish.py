"""After an update: the hosts that sample get the actor's weights, unless they sample from its own parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.cluster.group import Context
from verl.dataflow.placement import Placement
from verl.engines.base import TrainEngine
from verl.models.naming import copy_by_name, own_tensors
from verl.models.policy import Policy
from verl.rollout.base import RolloutEngine


class Publisher:
    """``publish`` on every host of actor and rollout together. This one moves nothing: parameters are shared."""

    def __init__(self) -> None:
        self.engines: list[RolloutEngine] = []  # of this host

    @staticmethod
    def between(
        placement: Placement, context: Context, source: TrainEngine | None, copy: Policy | None, senders: Any
    ) -> Publisher:
        """``source``: the actor's engine where it is here; ``copy``: what samples here, if something does;
        ``senders``: the process group of the actor's first rank and the hosts that only sample."""
        kinds = {placement.devices[rank].kind for rank in (*placement.ranks("actor"), *placement.ranks("rollout"))}
        return _Copier(placement.ranks("actor")[0], context.rank, source, copy, senders, by_cpu=len(kinds) > 1)

    def publish(self, version: int) -> None:
        self._move()
        for engine in self.engines:
            engine.version = version

    def _move(self) -> None:
        pass


class _Copier(Publisher):
    """Whole tensors, one at a time: gathered over the actor's ranks, and sent by the first to those without."""

    def __init__(
        self, first: int, rank: int, source: TrainEngine | None, copy: Policy | None, senders: Any, by_cpu: bool
    ) -> None:
        super().__init__()
        self.first, self.rank, self.source, self.copy, self.senders = first, rank, source, copy, senders
        self.by_cpu = by_cpu  # the way from one kind of device to another

    @torch.no_grad()
    def _move(self) -> None:
        if self.source is None and self.copy is None:
            return
        into = dict(self.copy.shards()) if self.copy is not None else {}
        # of a file layout of its own (a mixture's experts one by one), each call of shards makes the tensors anew
        own = {} if self.copy is None else {t.data_ptr() for _, t in own_tensors(self.copy.lm)}
        aliased = all(tensor.data_ptr() in own for tensor in into.values())
        kept: dict[str, Tensor] = {}
        for name, tensor in self._tensors(into):
            if self.copy is None:
                continue
            if aliased:
                copy_by_name({name: into[name]}, {name: tensor})
            else:
                kept[name] = tensor
        if kept and self.copy is not None:
            self.copy.load(kept)

    def _tensors(self, into: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        if self.source is not None:
            for name, tensor in self.source.shards():
                if self.senders is not None and self.rank == self.first:
                    dist.broadcast((tensor.cpu() if self.by_cpu else tensor).contiguous(), self.first, self.senders)
                yield name, tensor
            return
        for name, tensor in into.items():
            buffer = torch.empty_like(tensor, device="cpu" if self.by_cpu else None).contiguous()
            dist.broadcast(buffer, self.first, self.senders)
            yield name, buffer
