"""Megatron training engine: a Llama-like model over tensor-, pipeline-, data- and context-parallel ranks.

The module is ``megatron_model``'s. The rotary embedding is the Hugging Face model's own, the head is used by runs of
tokens as elsewhere, and weights go by ``models/megatron_names.py``.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from verl.batch import Batch, Ragged
from verl.config.errors import MisfitError, RequestError
from verl.config.model import OptimizerConfig
from verl.engines.base import LossFn, Stats, UpdateReport, counted
from verl.engines.context_parallel import Part, check_heads
from verl.engines.distributed_optimizer import DistributedOptimizer
from verl.engines.megatron_model import Rows, build
from verl.engines.pipeline import Pipeline
from verl.engines.share import Share, beside, in_batch_order, of_all, order_of, packed, padding, step, unweighted
from verl.engines.vocab_parallel import token_logprobs as parallel_logprobs
from verl.layout import Layout, Piece
from verl.models.decoder import known
from verl.models.logprobs import token_logprobs
from verl.models.megatron_names import Shape, Unit, fill, join
from verl.models.naming import check_fit
from verl.models.packing import Packed, read
from verl.models.policy import Policy

AXES = "tp", "dp", "pp"  # from the innermost on
OUTPUTS = {"logprobs", "entropy"}
PER_HEAD = ("q_layernorm.weight", "k_layernorm.weight")  # whole on each rank, which uses them for its own heads


def megatron_mesh(layout: Layout, device_type: str, ranks: Sequence[int] | None = None) -> DeviceMesh:
    """The mesh ``pp x dp x tp`` of ``layout.size`` ``ranks`` of the world, in ascending order (default: all there are);
    ``dp`` is ``layout.dp * layout.cp``. Every process of the world calls this, as ``sharding.device_mesh``."""
    ranks = list(range(dist.get_world_size()) if ranks is None else ranks)
    if len(ranks) != layout.size or ranks != sorted(set(ranks)):
        raise ValueError(f"ranks {ranks} aren't {layout.size} different ones in ascending order")
    sizes = layout.pp, layout.dp * layout.cp, layout.tp
    return DeviceMesh(device_type, torch.tensor(ranks).view(sizes), mesh_dim_names=("pp", "dp", "tp"))


class MegatronEngine:
    """A ``TrainEngine`` around a Llama-like policy.

    Ranks that differ in ``tp``, ``pp`` or ``cp`` alone are given the same rows and all get the same outputs and
    reports; the loss function is called on the last pipeline stage. Ranks along ``dp`` hold the same parameters, but of
    masters and optimizer state each a part of its own. All else is as ``FsdpEngine`` has it: one reduction of gradients
    per optimizer step, fp32 masters of bf16 parameters, numbers that don't depend on the mesh, and weights and
    optimizer state that any engine with any mesh can take back.

    Args:
        module: what is trained, whole or not yet read from its files (``unread``): each rank reads its part. One
            without trainable parameters can only ``forward``. Its own weights are given up (moved to the meta device).
        optimizer: how.
        total_optimizer_steps: of the whole run, for schedules that end; ``None``: unknown.
        gradient_checkpointing: while training, keep only each layer's input.
        mesh: the ranks (``megatron_mesh``); Megatron wants process groups for a single rank, too.
        context: process group of the ranks that share this one's rows (``context_parallel.context_group``).
        cpu_offload: the optimizer's part in CPU memory (``Optimizer``).

    Raises:
        RequestError: the model can't be built or cut so, or the optimizer needs to see whole matrices.
    """

    def __init__(
        self,
        module: Policy,
        optimizer: OptimizerConfig,
        total_optimizer_steps: int | None,
        gradient_checkpointing: bool,
        mesh: DeviceMesh,
        context: Any = None,
        cpu_offload: bool = False,
    ) -> None:
        trains = any(True for _ in module.trainable())
        if module.adapter is not None:
            raise RequestError("Megatron trains all weights: use_lora must be false")
        if callable(optimizer.name) or optimizer.name == "muon":
            raise RequestError("Megatron's ranks hold parts of fused matrices: the optimizer must be adamw or sgd")
        config = module.config.get_text_config()
        self.module, self.mesh, self.context = module, mesh, context
        self.shape = Shape.of(config)
        cuda = mesh.device_type == "cuda"
        self.device = device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.tp, self.tp_rank = mesh["tp"].size(), mesh.get_local_rank("tp")
        self.pipeline = Pipeline(mesh.get_group("pp"), device)
        self.shape.check(self.tp, self.pipeline.stages)
        if context is not None:
            check_heads(module.config, context.size(), self.tp)
        self.dtype = module.dtype
        self.held = self.shape.held(self.tp, self.pipeline.stages, self.tp_rank, self.pipeline.stage)
        self.units = self.shape.units(self.tp, self.pipeline.stages)
        backbone: Any = module.backbone
        self.padding: int | None = backbone.get_input_embeddings().padding_idx
        self.rotary: Any = copy.deepcopy(backbone.rotary_emb).to(device)
        self.model = build(self.shape, config, mesh, device, self.dtype, gradient_checkpointing and trains)
        self.parameters = dict(self.model.requires_grad_(trains).named_parameters())
        check_fit({n: torch.empty(local.shape, device="meta") for n, local in self.held.items()}, self.parameters)
        self._read(module)
        self.optimizer = None
        if trains:
            named, apart = self.parameters.items(), {self._tied} if self._tied else set()
            self.optimizer = DistributedOptimizer(
                named, optimizer, total_optimizer_steps, mesh.get_group("dp"), apart, cpu_offload
            )

    def _read(self, module: Policy) -> None:
        """Each weight's part that this rank holds."""
        wanted = {run.weight for local in self.held.values() for run in local.runs}
        if module.unread is None:
            whole = dict(module.shards())
            check_fit(self._whole_shapes(), whole)
            self._fill(self.parameters, whole)
        else:
            for name, stored in module.unread.tensors(wanted):
                self._fill(self.parameters, {name: stored})
            module.unread = None
        module.lm.to(device="meta")

    def forward(
        self, batch: Batch, micro_batches: Sequence[Sequence[int]], want: frozenset[str], temperature: float
    ) -> dict[str, Ragged]:
        known(want, OUTPUTS)
        order = order_of(batch, micro_batches)
        parts: dict[str, list[Tensor]] = {name: [] for name in want}
        passes = _Passes(self, batch, micro_batches)

        def compute(i: int, received: Tensor | None) -> Tensor:
            hidden = self._hidden(passes.packed(i), received)
            if self.pipeline.last:
                outputs = self._outputs(hidden, passes.packed(i), passes.rows(i), want, temperature)
                for name, values in outputs.items():
                    parts[name].append(values if micro_batches[i] else values[:0])
            return hidden

        self.model.eval()
        with torch.no_grad():
            self.pipeline.forward(len(micro_batches), compute, passes.buffer)
        home, found = batch.ragged("response_ids").values.device, {}
        for name in sorted(want):
            values = torch.cat([torch.empty(0, device=self.device), *parts[name]])
            if self.pipeline.stages > 1:
                if not self.pipeline.last:
                    values = torch.empty(int(batch.ragged("response_ids").lengths.sum()), device=self.device)
                last = dist.get_global_rank(self.pipeline.group, self.pipeline.stages - 1)
                dist.broadcast(values, last, group=self.pipeline.group)
            found[name] = in_batch_order(values.to(home), batch, order)
        return found

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
        known(want, OUTPUTS)
        mask = batch.ragged("response_mask")
        told: list[Stats] = []
        tokens = sum(int(mask.select(rows).values.sum()) for rows in micro_batches if rows)
        passes = _Passes(self, batch, micro_batches)

        def compute(i: int, received: Tensor | None) -> Tensor:
            hidden = self._hidden(passes.packed(i), received)
            if not self.pipeline.last:
                return hidden
            outputs = self._outputs(hidden, passes.packed(i), passes.rows(i), want, temperature)
            if not micro_batches[i]:
                return unweighted(outputs)
            loss, stats = loss_fn(outputs, passes.rows(i))
            told.append(stats)
            return loss

        self.model.train()
        self.pipeline.train(len(micro_batches), compute, passes.buffer)
        self.model.eval()
        self.optimizer.reduce()
        self._reduce(self.optimizer.masters)
        square = self._square_sum(self.optimizer.masters)
        share = Share({}, 0, square) if self._again else Share(counted(told), tokens, square)
        return step(self.optimizer, of_all(self.mesh, AXES, share))

    def total(self, values: Sequence[float]) -> list[float]:
        parts = of_all(self.mesh, AXES, [0.0] * len(values) if self._again else [float(value) for value in values])
        return [sum(column) for column in zip(*parts, strict=True)]

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        tensors = {name: p.detach() for name, p in self.parameters.items()}
        for unit in self.units:
            yield from self._whole(unit, tensors, self.dtype, self.device).items()

    def pieces(self) -> Iterator[tuple[str, Tensor, tuple[tuple[int, int], ...]]]:
        """What of which Hugging Face weight lies on this rank: name, a view of this rank's own parameter, and which
        range of indices along each dimension of the weight that is."""
        for name, local in self.held.items():
            for run in () if local.copy else local.runs:
                view = self.parameters[name].detach().narrow(local.dim, run.at, run.stop - run.start)
                box = [(0, n) for n in self.shape.weights[run.weight]]
                box[local.dim] = run.start, run.stop
                yield run.weight, view, tuple(box)

    def saved(self, optimizer: bool) -> tuple[Iterator[Piece], Iterator[Piece], dict[str, Any]]:
        """As ``TrainEngine.saved``: all by the first rank."""
        if self.optimizer is None or not optimizer:
            return self._of_first(self.shards()), iter(()), {}
        return self._of_first(self.shards()), self._of_first(self._state(self.optimizer)), self.optimizer.facts

    def _of_first(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Piece]:
        for name, tensor in tensors:
            if self.first:  # a gathered one is gone after its turn
                yield Piece(name, tensor.cpu(), tuple(tensor.shape), (0,) * tensor.ndim)

    def _state(self, optimizer: DistributedOptimizer) -> Iterator[tuple[str, Tensor]]:
        """What the optimizers of all ranks hold, whole, under the names of weights; every rank iterates to the end."""
        mine: dict[str, dict[str, Tensor]] = defaultdict(dict)  # by kind
        for key, tensor, _ in optimizer.held():
            kind, _, name = key.partition("/")
            mine[kind][name] = tensor
        numbers = {
            kind: {name: tensor.cpu() for name, tensor in found.items()}
            for kind, found in mine.items()
            if any(tensor.shape != optimizer.masters[name].shape for name, tensor in found.items())
        }
        of_stages: list[Any] = [None] * self.pipeline.stages
        dist.all_gather_object(of_stages, (numbers, list(mine)), group=self.pipeline.group)
        for kind in of_stages[0][1]:
            for unit in self.units:
                if kind in of_stages[unit.stage][0]:  # a number for each tensor
                    named = of_stages[unit.stage][0][kind]
                    whole = {run.weight: named[name] for name, local in unit.ranks[0].items() for run in local.runs}
                else:
                    device = next(iter(optimizer.masters.values())).device
                    names = unit.ranks[0] if unit.stage == self.pipeline.stage else ()
                    ours = {name: optimizer.whole(name, mine[kind][name]) for name in names}
                    whole = self._whole(unit, ours, torch.float32, device)
                yield from ((f"{kind}/{name}", tensor) for name, tensor in whole.items())

    def restore(self, shards: Mapping[str, Any], tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """As ``TrainEngine.restore``; tensors of whatever mesh; each rank reads its part of them."""
        check_fit(self._whole_shapes(), shards)
        self._fill(self.parameters, shards)
        if self.optimizer is None:
            return
        by_kind: dict[str, dict[str, Any]] = defaultdict(dict)
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            if name not in self.shape.weights:
                raise MisfitError(f"the optimizer's state has {key!r}, but no such parameter is trained")
            by_kind[kind][name] = tensor
        mine = {}
        for kind, found in by_kind.items():
            for name, local in self.held.items():
                ours = [found[run.weight] for run in local.runs if run.weight in found]
                if not ours:
                    continue
                if ours[0].shape == self.shape.weights[local.runs[0].weight]:
                    fill(tensor := torch.zeros(local.shape, dtype=ours[0].dtype), local, found)
                    mine[f"{kind}/{name}"] = self.optimizer.part(name, tensor)
                else:
                    mine[f"{kind}/{name}"] = ours[0][...]
        self.optimizer.restore(mine, facts)

    # -- a pass ----------------------------------------------------------------------------------------------------

    def _hidden(self, packed: Packed, received: Tensor | None) -> Tensor:
        """``[T, 1, D]`` after this stage's layers, from what the stage before ``received``."""
        embedded = None
        if received is None:
            embedded = self.model.embedding(packed.ids[None], packed.positions[None])
            if self.padding is not None:  # a word that Hugging Face's embedding doesn't train
                still = (packed.ids == self.padding)[:, None, None]
                embedded = torch.where(still, embedded.detach(), embedded)
        else:
            self.model.set_input_tensor(received)
        angles = self.rotary(torch.empty(0, dtype=self.dtype, device=self.device), packed.positions[None])
        cos, sin = (x[0][:, None] for x in angles)
        hidden: Tensor = self.model(
            packed.ids[None],
            packed.positions[None],
            None,
            decoder_input=embedded,
            packed_seq_params=Rows(packed, cos, sin),
        )
        return hidden

    def _outputs(
        self, hidden: Tensor, packed: Packed, rows: Batch, want: frozenset[str], temperature: float
    ) -> dict[str, Tensor]:
        """``[R]`` of the last stage's ``hidden [T, 1, D]``."""
        targets = packed.own(rows.ragged("response_ids").values)
        hidden, head = read(hidden[:, 0], packed.predict.values), self._head
        options: Any = {"temperature": temperature, "with_entropy": "entropy" in want}
        if self.tp > 1:
            group, words = self.mesh.get_group("tp"), self.shape.vocabulary
            logprobs, entropy = parallel_logprobs(hidden, head, targets, group, words, **options)
        else:
            logprobs, entropy = token_logprobs(hidden, head, None, targets, **options)
        found = {"logprobs": logprobs} | ({} if entropy is None else {"entropy": entropy})
        return {name: packed.whole(x) for name, x in found.items() if name in want}

    @property
    def _head(self) -> Tensor:
        shared = self.shape.tied and self.pipeline.stages == 1
        return self.parameters["embedding.word_embeddings.weight" if shared else "output_layer.weight"]

    @property
    def _tied(self) -> str | None:
        """This stage's copy of what is the first one's embedding and the last one's head."""
        ends = {0: "embedding.word_embeddings.weight", self.pipeline.stages - 1: "output_layer.weight"}
        return ends.get(self.pipeline.stage) if self.shape.tied and len(ends) == 2 else None

    # -- gradients -------------------------------------------------------------------------------------------------

    def _reduce(self, masters: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients, which are sums over ``dp``, over the other ranks with the same parameters, of which these
        have the same parts; as ``Spread.reduce``."""
        grads = {name: p.grad for name, p in masters.items() if p.grad is not None and p.numel()}
        alike = {name: grad for name, grad in grads.items() if not self.held[name].cut}
        if self.tp > 1:
            group = self.mesh.get_group("tp")
            for work in [dist.all_reduce(grad, group=group, async_op=True) for grad in alike.values()]:
                work.wait()
        for name, grad in alike.items():
            if not name.endswith(PER_HEAD):
                grad.div_(self.tp)
        if self._tied in grads:
            grads[self._tied] += self.pipeline.swap(grads[self._tied])

    def _square_sum(self, masters: Mapping[str, nn.Parameter]) -> float:
        """This rank's part of the gradient's squared norm: what n ranks hold counts 1/n on each."""
        shares = {name: 1 if local.cut else 1 / self.tp for name, local in self.held.items()}
        own = [n for n, p in masters.items() if p.grad is not None and not self.held[n].copy]
        if not own:
            return 0.0
        norms = torch.stack(torch._foreach_norm([g for n in own if (g := masters[n].grad) is not None])).double()
        return norms.square().dot(torch.tensor([shares[n] for n in own], dtype=torch.float64).to(norms.device)).item()

    # -- ranks -----------------------------------------------------------------------------------------------------

    @property
    def first(self) -> bool:
        """Whether this is the mesh's first rank."""
        return not any(self.mesh.get_coordinate() or ())

    @property
    def _again(self) -> bool:
        """Whether another rank computes the same rows and counts them."""
        return not self.pipeline.last or self.tp_rank > 0 or (self.context is not None and self.context.rank() > 0)

    # -- weights ---------------------------------------------------------------------------------------------------

    def _whole_shapes(self) -> dict[str, Tensor]:
        return {name: torch.empty(shape, device="meta") for name, shape in self.shape.weights.items()}

    def _fill(self, tensors: Mapping[str, Tensor], whole: Mapping[str, Any]) -> None:
        for name, local in self.held.items():
            fill(tensors[name], local, whole)

    def _whole(
        self, unit: Unit, mine: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """The unit's weights from all ranks' tensors (of its stage's ranks ``mine`` has them), on every rank."""
        here = unit.stage == self.pipeline.stage
        ranks: list[dict[str, Tensor]] = [{} for _ in unit.ranks]
        for name, local in unit.ranks[0].items():
            parts = [mine[name].detach()] if here else []
            if local.cut and self.tp > 1:
                stack = torch.empty((self.tp, *local.shape), dtype=dtype, device=device)
                if here:
                    dist.all_gather(list(stack.unbind()), parts[0].contiguous(), group=self.mesh.get_group("tp"))
            else:
                stack = parts[0][None] if here else torch.empty((1, *local.shape), dtype=dtype, device=device)
            if self.pipeline.stages > 1:
                source = dist.get_global_rank(self.pipeline.group, unit.stage)
                dist.broadcast(stack, source, group=self.pipeline.group)
            for i, rank in enumerate(ranks):
                rank[name] = stack[i if len(stack) > 1 else 0]
        return join(unit, ranks, self.shape.weights)


class _Passes:
    """The micro-batches of one call, packed as they are needed; the latest one is kept, and the sizes of all."""

    def __init__(self, engine: MegatronEngine, batch: Batch, micro_batches: Sequence[Sequence[int]]) -> None:
        self.engine, self.batch, self.micro_batches = engine, batch, micro_batches
        self._made: tuple[int, Batch, Packed] | None = None
        self._sizes: dict[int, int] = {}

    def rows(self, i: int) -> Batch:
        return self._of(i)[1]

    def packed(self, i: int) -> Packed:
        return self._of(i)[2]

    def buffer(self, i: int) -> Tensor:
        """For hidden states, or their gradients, on their way between stages."""
        engine = self.engine
        if i not in self._sizes:
            self._of(i)
        return torch.empty((self._sizes[i], 1, engine.shape.hidden), dtype=engine.dtype, device=engine.device)

    def _of(self, i: int) -> tuple[int, Batch, Packed]:
        if self._made is None or self._made[0] != i:
            rows = self.batch.select(self.micro_batches[i]) if self.micro_batches[i] else padding(self.batch)
            part = packed(rows)
            if self.engine.context is not None:
                part = Part.of(part, self.engine.context)
            device = self.engine.device
            self._made, self._sizes[i] = (i, beside(rows, device), part.to(device)), part.ids.shape[0]
        return self._made
