"""After an update: the hosts that sample get the actor's weights, unless they sample from its own parameters."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.cluster.group import Context
from verl.config.engine import HybridConfig
from verl.config.errors import RunError
from verl.dataflow.placement import Placement
from verl.engines.base import TrainEngine
from verl.hybrid.publish import Corridor, Report, Transfer
from verl.hybrid.table import Kept, Parts, Standing, parts_of
from verl.models.decoder import in_place
from verl.models.policy import Policy
from verl.rollout.base import RolloutEngine
from verl.rollout.native import NativeEngine

NOTHING = Kept()  # a rank's parts of what it doesn't train


class Publisher:
    """``publish`` on every host of actor and rollout together. This one moves nothing: parameters are shared."""

    def __init__(self, engine: RolloutEngine | None = None) -> None:
        self.engine = engine  # what samples on this host

    def publish(self, version: int) -> Report:
        if self.engine is not None:
            self.engine.version = version
        return Report(version)


class Through(Publisher):
    """By the corridor: each rank gets what it lacks. All hosts of both roles make one together.

    Args:
        trained: the actor, where it is here.
        group: process group of the hosts; ``None``: this one is alone.
        engine: what samples here, if something does, from weights of its own.
        by_files: under the names and in the shapes of model files, which engines of other kinds read.
        parts: the actor's, where it doesn't train ``trained``'s own weights; under the names of model files.
    """

    def __init__(
        self, placement: Placement, context: Context, trained: Policy | None, group: Any,
        engine: RolloutEngine | None, device: torch.device, cfg: HybridConfig, by_files: bool,
        parts: Parts | None = None,
    ) -> None:  # fmt: skip
        super().__init__(engine)
        self.trained, self.by_files, self._parts = trained, by_files, parts
        self._held = None if trained is None else _standing(trained)
        self._wanted = _standing(engine.policy) if isinstance(engine, NativeEngine) else None
        streams = engine is not None and not isinstance(engine, NativeEngine)
        kinds = {placement.devices[rank].kind for rank in (*placement.ranks("actor"), *placement.ranks("rollout"))}
        wire = device if len(kinds) == 1 else torch.device("cpu")  # the way from one kind of device to another
        ends = self._source(), self._target()
        self.corridor = Corridor.meet(*ends, wire, cfg, rank=context.rank, group=group, streams=streams)

    def publish(self, version: int) -> Report:
        source, target = self._source(), self._target()
        if isinstance(self.engine, NativeEngine):
            with self.engine.updating(version):
                for _ in self.corridor.flow(version, source, target, self.engine.version):
                    pass
        else:
            flow = self.corridor.flow(version, source)
            if self.engine is not None:
                self.engine.wake()
                self.engine.load(flow, version)
            for name, _ in flow:  # without an engine this rank wants nothing
                raise RunError(f"the rollout engine did not take {name}")
        return self.corridor.report

    def _source(self) -> Any:
        if self.trained is None or self._held is None:
            return NOTHING
        if self._parts is not None:
            return self._parts
        return parts_of(dict(self.trained.shards())) if self.by_files else self._held.parts()

    def _target(self) -> Any:
        return None if self._wanted is None else self._wanted.parts()


def _standing(policy: Policy) -> Standing:
    return Standing(policy, lambda: in_place(policy.lm, policy.adapter))


class Plainly(Publisher):
    """Whole tensors, one at a time: gathered over the actor's ranks, and sent by the first to those without.

    Args:
        source: the actor's engine, where it is here.
        group: process group of the actor's first rank and the hosts that only sample; ``None``: there are none.
        like: on a host that only samples, tensors of the actor's names and shapes.
    """

    def __init__(
        self, placement: Placement, context: Context, source: TrainEngine | None, group: Any,
        engine: RolloutEngine | None, like: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        super().__init__(engine)
        kinds = {placement.devices[rank].kind for rank in (*placement.ranks("actor"), *placement.ranks("rollout"))}
        self.by_cpu = len(kinds) > 1  # the way from one kind of device to another
        self.first, self.rank = placement.ranks("actor")[0], context.rank
        self.ranks = len(placement.ranks("actor"))
        self.source, self.group, self.like = source, group, like

    @torch.no_grad()
    def publish(self, version: int) -> Report:
        report, start = Report(version), time.perf_counter()
        tensors = self._tensors(report)
        if self.engine is not None:
            self.engine.load(tensors, version)
        for _ in tensors:
            pass
        report.full_bytes, report.seconds = report.sent_bytes + report.received_bytes, time.perf_counter() - start
        return report

    def _tensors(self, report: Report) -> Iterator[tuple[str, Tensor]]:
        if self.source is not None:
            for name, tensor in self.source.shards():
                if self.ranks > 1:  # gathered: all but this rank's part came in
                    report.received_bytes += tensor.nbytes * (self.ranks - 1) // self.ranks
                if self.group is not None and self.rank == self.first:
                    self._next(name)
                    dist.broadcast((tensor.cpu() if self.by_cpu else tensor).contiguous(), self.first, self.group)
                    report.sent_bytes += tensor.nbytes
                yield name, tensor
            if self.group is not None and self.rank == self.first:
                self._next(None)
            return
        while (coming := self._next(None)) is not None:
            buffer = torch.empty_like(self.like[coming], device="cpu" if self.by_cpu else None).contiguous()
            dist.broadcast(buffer, self.first, self.group)
            report.received_bytes += buffer.nbytes
            yield coming, buffer

    def _next(self, name: str | None) -> str | None:
        """Which tensor the first sends now, ``None`` after the last: ranks that read parts, or train with another
        engine, have them in another order than those that only sample."""
        said = [name]
        dist.broadcast_object_list(said, self.first, self.group, torch.device("cpu"))
        return said[0]


def table_of(transfers: list[Transfer]) -> str:
    """What moved, a line per bucket and pair of ranks, for people."""
    lines = [f"{'tensors':<48} {'dtype':<18} {'values':>12} {'bytes':>13} {'ms':>9} {'GB/s':>7}  ranks"]
    for t in transfers:
        name = t.names[0] + (f" and {len(t.names) - 1} more" if len(t.names) > 1 else "")
        rate = t.bytes / t.seconds / 1e9 if t.seconds else 0.0
        lines.append(
            f"{name[-48:]:<48} {'/'.join(t.dtypes):<18} {t.values:>12,} {t.bytes:>13,} {1e3 * t.seconds:>9.2f} "
            f"{rate:>7.2f}  {t.source} > {t.target}"
        )
    return "\n".join(lines)
