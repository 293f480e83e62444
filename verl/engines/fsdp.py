"""PyTorch training engine: one process alone, or one of many ranks over FSDP2 and tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from verl.batch import Batch, Ragged
from verl.config.errors import RequestError
from verl.config.model import OptimizerConfig
from verl.engines.base import LossFn, Stats, UpdateReport, counted
from verl.engines.context_parallel import Part
from verl.engines.layers import prepare
from verl.engines.optim import Optimizer
from verl.engines.sharding import Sharding, distributed, piece_of, whole
from verl.engines.share import beside, in_batch_order, order_of, packed, padding, step, unweighted
from verl.engines.spread import Spread
from verl.layout import Piece
from verl.models.policy import Policy
from verl.models.scorer import Scorer
from verl.models.value import HIDDEN, SharedValue, Value


class FsdpEngine:
    """A ``TrainEngine`` around one model.

    With a ``mesh`` this is one of its ranks. ``module`` must be the same on every rank; a rank's batches hold rows of
    its own (ranks that differ in ``tp`` or ``cp`` alone: the same rows). All ranks call every method together,
    ``forward`` and ``update`` with equally many micro-batches, and iterate ``shards`` to its end. An empty micro-batch
    is computed on one made-up row at zero weight, so that a rank without rows keeps step. Numbers don't depend on the
    mesh.

    Parameters keep their dtype, and of bf16 ones the optimizer holds fp32 masters. That is the default because one
    process and every sharding then compute alike, and whoever reads the parameters (generation, publishing) finds them
    ready. ``compute_dtype`` is FSDP2's own way: parameters are fp32 and are rounded when they are gathered. It saves
    the rounded copy and keeps the reduced gradient's digits, but only sharded parameters can be used so.

    Gradients are reduced over ranks once per optimizer step. The price under FSDP: with more than one micro-batch per
    step, each rank adds up a whole fp32 gradient before it is reduced.

    Args:
        module: what is trained; one with no trainable parameter (a reference) can only ``forward``.
        optimizer: how.
        total_optimizer_steps: of the whole run, for schedules that end; ``None``: unknown.
        gradient_checkpointing: while training, keep only each layer's input and compute the layer again in the
            backward pass.
        mesh: the ranks that train this module (``sharding.device_mesh``); ``None``: this process alone.
        sharding: what each rank of the mesh holds.
        compute_dtype: of sharded fp32 parameters while they compute; ``None``: their own.
        context: process group of the ranks that share this one's rows, each computing a run of their tokens
            (``context_parallel.context_group``); ``None``: this rank computes all tokens of its rows.
        cpu_offload: the optimizer's part in CPU memory (``Optimizer``).
        compile_backend: of ``torch.compile`` for the decoder's layers; ``None``: they aren't compiled.

    Raises:
        RequestError: the model can't be recomputed, compiled, cut, sharded or offloaded as asked.
    """

    def __init__(
        self,
        module: Policy | Value | SharedValue | Scorer,
        optimizer: OptimizerConfig,
        total_optimizer_steps: int | None = None,
        gradient_checkpointing: bool = False,
        mesh: DeviceMesh | None = None,
        sharding: Sharding = "FULL_SHARD",
        compute_dtype: torch.dtype | None = None,
        context: Any = None,
        cpu_offload: bool = False,
        compile_backend: str | None = None,
    ) -> None:
        self.module = module
        trains = any(True for _ in module.trainable())
        if cpu_offload and trains and module.device.type == "cpu":
            raise RequestError("cpu_offload: the model computes on the CPU already; set it to false")
        if not isinstance(module, SharedValue):
            prepare(module.backbone, gradient_checkpointing and trains, compile_backend)
        # before the optimizer: it holds this rank's part of each parameter
        self.spread = Spread(module, mesh, sharding, compute_dtype, context)
        self.optimizer = None
        if trains:
            self.optimizer = Optimizer(
                module.trainable(), optimizer, total_optimizer_steps, self.spread.ranks, _matrices(module), cpu_offload
            )

    def forward(
        self, batch: Batch, micro_batches: Sequence[Sequence[int]], want: frozenset[str], temperature: float
    ) -> dict[str, Ragged]:
        order = order_of(batch, micro_batches)
        home = batch.ragged("response_ids").values.device
        parts: dict[str, list[Tensor]] = {name: [] for name in want}
        self.module.eval()
        with torch.no_grad():
            for rows in micro_batches:
                micro = batch.select(rows) if rows else padding(batch)
                for name, values in self._outputs(micro, want, temperature)[0].items():
                    values = values if rows else values[:0]
                    # hidden states go home at once, they are large; a number of each token goes with all others
                    parts[name].append(values.to(home) if values.ndim > 1 else values)
        self.spread.release()
        return {name: in_batch_order(torch.cat(values).to(home), batch, order) for name, values in parts.items()}

    def update(
        self,
        batch: Batch,
        micro_batches: Sequence[Sequence[int]],
        loss_fn: LossFn,
        want: frozenset[str],
        temperature: float,
    ) -> UpdateReport:
        if self.optimizer is None:
            raise RuntimeError("this engine's model has no trainable parameter")
        told: list[Stats] = []
        mask = batch.ragged("response_mask").select([row for rows in micro_batches for row in rows])
        tokens = int(mask.values.sum())
        self.module.train()
        for number, rows in enumerate(micro_batches, 1):
            self.spread.begin_pass(last=number == len(micro_batches))
            micro = batch.select(rows) if rows else padding(batch)
            outputs, near = self._outputs(micro, want, temperature)
            if rows:
                loss, stats = loss_fn(outputs, near)
                told.append(stats)
            else:
                loss = unweighted(outputs)
            loss.backward()
            del loss, outputs  # and so the graph, which would keep what the head kept through the next forward
        self.module.eval()
        self.spread.release()
        self.spread.reduce(self.optimizer.masters)
        return step(self.optimizer, self.spread.gather(counted(told), tokens, self.optimizer.square_sum()))

    def total(self, values: Sequence[float]) -> list[float]:
        return self.spread.total(values)

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.module.shards():
            yield name, whole(tensor.detach(), tensor)

    def saved(self, optimizer: bool) -> tuple[Iterator[Piece], Iterator[Piece], dict[str, Any]]:
        weights = ((name, tensor.detach(), tensor) for name, tensor in self.module.shards())
        if self.optimizer is None or not optimizer:
            return self._pieces(weights), iter(()), {}
        return self._pieces(weights), self._pieces(self.optimizer.held()), self.optimizer.facts

    def _pieces(self, tensors: Iterable[tuple[str, Tensor, Tensor | None]]) -> Iterator[Piece]:
        for name, tensor, like in tensors:
            piece = piece_of(name, tensor, like, self.spread.mesh)
            if piece is not None:
                yield piece

    def restore(self, shards: Mapping[str, Any], tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """As ``TrainEngine.restore``; tensors of whatever mesh; each rank reads its part of them."""
        own = dict(self.module.shards())
        self.module.load({name: distributed(t, own.get(name)) for name, t in shards.items()})
        if self.optimizer:
            self.optimizer.restore(tensors, facts)

    def _outputs(self, rows: Batch, want: frozenset[str], temperature: float) -> tuple[dict[str, Tensor], Batch]:
        """The module's outputs ``[R]`` for rows computed together, and the rows ``beside`` the module."""
        near = beside(rows, self.module.device)
        if isinstance(self.module, SharedValue) and HIDDEN in near:
            return self.module(None, None, want, temperature, hidden=near.ragged(HIDDEN).values), near
        part = packed(rows, ends=self.module.reads_ends)
        if self.spread.context is not None:
            part = Part.of(part, self.spread.context)
        return self.module(part.to(self.module.device), near.ragged("response_ids").values, want, temperature), near


def _matrices(module: Policy | Value | SharedValue | Scorer) -> set[str]:
    """Names of the backbone's trained matrices, embeddings (and a head tied to them) left out."""
    if isinstance(module, SharedValue):
        return set()
    inner = {
        id(p)
        for part in module.backbone.modules()
        if not isinstance(part, nn.Embedding)
        for p in part.parameters(recurse=False)
    }
    return {name for name, p in module.trainable() if p.ndim == 2 and id(p) in inner}
