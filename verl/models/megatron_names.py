"""A Llama-like decoder's weights under Megatron's names, cut over tensor- and pipeline-parallel ranks.

Megatron fuses what is multiplied with the same input: queries, keys and values lie *group by group* in ``linear_qkv``
(the query heads that share a key head, then that key head, then its value head), gate and up one after the other in
``linear_fc1``. A tensor-parallel rank holds some groups, some inner units, and some rows of embedding and head, which
are filled up with zeros so that all ranks hold equally many::

    q k v of 4 query heads, 2 key heads     q0 q1 k0 v0 | q2 q3 k1 v1        (| between two ranks)
    gate and up of 4 inner units            g0 g1 u0 u1 | g2 g3 u2 u3
    head of 5 words                         w0 w1 w2    | w3 w4 0

So every tensor of a rank is made of *runs*: slices of Hugging Face weights, one after the other along one dimension.
All of this is numbers and copies; nothing here needs Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from verl.config.errors import RequestError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
KINDS = ("llama", "mistral", "qwen2", "qwen3")  # of Hugging Face's configurations
ATTENTION, MLP = "self_attention", "mlp"


@dataclass(frozen=True)
class Run:
    """``weight[start:stop]`` along the tensor's dimension is the tensor's ``[at : at + stop - start]``."""

    weight: str
    start: int
    stop: int
    at: int = 0


@dataclass(frozen=True)
class Local:
    """A tensor of one rank. ``dim``: along which its runs lie; ``cut``: whether tensor-parallel ranks hold different
    runs, else all hold the same; ``copy``: of what another stage holds, too."""

    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    dim: int = 0
    cut: bool = True
    copy: bool = False


@dataclass(frozen=True)
class Unit:
    """Tensors that are translated together: ``locals`` of each tensor-parallel rank of a pipeline ``stage``, and the
    Hugging Face weights that they make up, in their order."""

    stage: int
    ranks: tuple[Mapping[str, Local], ...]
    weights: tuple[str, ...]


@dataclass(frozen=True)
class Shape:
    """Of a Llama-like decoder: ``groups`` key heads, an MLP of ``inner`` units. ``tied``: the head is the embedding.

    A pipeline stage has equally many layers as every other; the first has the embedding, the last the final norm and
    the head (where it is tied: a copy of the embedding, unless both are on one stage).
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    inner: int
    vocabulary: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    @staticmethod
    def of(config: Any) -> Shape:
        """From a Hugging Face configuration; ``RequestError`` for a model that isn't built like Llama."""
        kind = config.model_type
        if kind not in KINDS:
            raise RequestError(f"Megatron computes models of the kinds {', '.join(KINDS)}, not {kind}")
        if config.hidden_act != "silu":
            raise RequestError(f"Megatron: the model's activation is {config.hidden_act}, only silu is supported")
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
        if rope in ("dynamic", "longrope"):
            raise RequestError(f"Megatron: {rope} positions depend on the longest row, which packed rows don't have")
        for key in ("attention_bias", "mlp_bias"):
            if getattr(config, key, False):
                raise RequestError(f"Megatron: models with {key} are not supported")
        return Shape(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            inner=config.intermediate_size,
            vocabulary=config.vocab_size,
            tied=config.tie_word_embeddings,
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
        )

    @cached_property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face's names and shapes, in the order of its state dict."""
        d, q, kv = self.hidden, self.heads * self.head_dim, self.groups * self.head_dim
        found: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocabulary, d)}
        for i in range(self.layers):
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                found[f"model.layers.{i}.self_attn.{name}_proj.weight"] = (rows, d)
                if self.qkv_bias:
                    found[f"model.layers.{i}.self_attn.{name}_proj.bias"] = (rows,)
            found[f"model.layers.{i}.self_attn.o_proj.weight"] = (d, q)
            if self.qk_norm:
                found[f"model.layers.{i}.self_attn.q_norm.weight"] = (self.head_dim,)
                found[f"model.layers.{i}.self_attn.k_norm.weight"] = (self.head_dim,)
            found[f"model.layers.{i}.mlp.gate_proj.weight"] = (self.inner, d)
            found[f"model.layers.{i}.mlp.up_proj.weight"] = (self.inner, d)
            found[f"model.layers.{i}.mlp.down_proj.weight"] = (d, self.inner)
            found[f"model.layers.{i}.input_layernorm.weight"] = (d,)
            found[f"model.layers.{i}.post_attention_layernorm.weight"] = (d,)
        found["model.norm.weight"] = (d,)
        if not self.tied:
            found[HEAD] = (self.vocabulary, d)
        return found

    def check(self, tp: int, pp: int) -> None:
        """``RequestError`` unless the model can be cut so."""
        counts = {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "intermediate_size": self.inner,
        }
        for key, count in counts.items():
            if count % tp:
                raise RequestError(f"tensor_parallel_size {tp} does not divide the model's {key} {count}")
        if self.layers % pp:
            raise RequestError(
                f"pipeline_parallel_size {pp} does not divide the model's num_hidden_layers {self.layers}"
            )

    def padded(self, tp: int) -> int:
        """Rows of embedding and head with those of zeros."""
        return -(-self.vocabulary // tp) * tp

    def stage_of(self, layer: int, pp: int) -> int:
        return layer // (self.layers // pp)

    def held(self, tp: int, pp: int, tp_rank: int, stage: int) -> dict[str, Local]:
        """What a rank holds, under the names of its stage's module: layers count from 0 on every stage."""
        found: dict[str, Local] = {}
        if stage == 0:
            found |= self._embedding(tp, tp_rank)
        first = stage * (self.layers // pp)
        for i in range(self.layers // pp):
            found |= {
                f"decoder.layers.{i}.{name}": local for name, local in self._layer(first + i, tp, tp_rank).items()
            }
        if stage == pp - 1:
            found |= self._norm()
            if not self.tied or pp > 1:
                found |= self._head(tp, tp_rank)
        return found

    def units(self, tp: int, pp: int) -> list[Unit]:
        """All weights, in the order of ``weights``; tied ones once."""

        def unit(stage: int, ranks: list[dict[str, Local]]) -> Unit:
            mine = {run.weight for rank in ranks for local in rank.values() for run in local.runs}
            return Unit(stage, tuple(ranks), tuple(name for name in self.weights if name in mine))

        found = [unit(0, [self._embedding(tp, rank) for rank in range(tp)])]
        for i in range(self.layers):
            stage, number = self.stage_of(i, pp), i % (self.layers // pp)
            ranks = [
                {f"decoder.layers.{number}.{name}": local for name, local in self._layer(i, tp, rank).items()}
                for rank in range(tp)
            ]
            found.append(unit(stage, ranks))
        found.append(unit(pp - 1, [self._norm()] * tp))
        if not self.tied:
            found.append(unit(pp - 1, [self._head(tp, rank) for rank in range(tp)]))
        return found

    def _embedding(self, tp: int, rank: int) -> dict[str, Local]:
        return {"embedding.word_embeddings.weight": self._words(EMBEDDING, tp, rank)}

    def _head(self, tp: int, rank: int) -> dict[str, Local]:
        """Where it is tied, a copy of the first stage's embedding."""
        return {"output_layer.weight": replace(self._words(EMBEDDING if self.tied else HEAD, tp, rank), copy=self.tied)}

    def _norm(self) -> dict[str, Local]:
        return {"decoder.final_layernorm.weight": self._whole("model.norm.weight")}

    def _words(self, name: str, tp: int, rank: int) -> Local:
        n = self.padded(tp) // tp
        start, stop = min(rank * n, self.vocabulary), min((rank + 1) * n, self.vocabulary)
        return Local((n, self.hidden), (Run(name, start, stop),) if start < stop else ())

    def _whole(self, name: str) -> Local:
        (n,) = self.weights[name]
        return Local((n,), (Run(name, 0, n),), cut=False)

    def _layer(self, layer: int, tp: int, rank: int) -> dict[str, Local]:
        at = f"model.layers.{layer}"
        found = {"input_layernorm.weight": self._whole(f"{at}.input_layernorm.weight")}
        found[f"{ATTENTION}.linear_proj.weight"] = self._cut(f"{at}.self_attn.o_proj.weight", tp, rank, dim=1)
        found[f"{ATTENTION}.linear_qkv.weight"] = self._qkv(f"{at}.self_attn", "weight", tp, rank)
        if self.qkv_bias:
            found[f"{ATTENTION}.linear_qkv.bias"] = self._qkv(f"{at}.self_attn", "bias", tp, rank)
        if self.qk_norm:
            for name in ("q", "k"):
                found[f"{ATTENTION}.{name}_layernorm.weight"] = self._whole(f"{at}.self_attn.{name}_norm.weight")
        found["pre_mlp_layernorm.weight"] = self._whole(f"{at}.post_attention_layernorm.weight")
        found[f"{MLP}.linear_fc1.weight"] = self._gated(f"{at}.mlp", tp, rank)
        found[f"{MLP}.linear_fc2.weight"] = self._cut(f"{at}.mlp.down_proj.weight", tp, rank, dim=1)
        return found

    def _cut(self, name: str, tp: int, rank: int, dim: int) -> Local:
        shape = list(self.weights[name])
        n = shape[dim] = shape[dim] // tp
        return Local(tuple(shape), (Run(name, rank * n, (rank + 1) * n),), dim)

    def _qkv(self, at: str, kind: str, tp: int, rank: int) -> Local:
        d, per_group, runs, rows = self.head_dim, self.heads // self.groups, [], 0
        for group in range(rank * self.groups // tp, (rank + 1) * self.groups // tp):
            for name, heads in (("q", per_group), ("k", 1), ("v", 1)):
                n = heads * d
                runs.append(Run(f"{at}.{name}_proj.{kind}", group * n, (group + 1) * n, rows))
                rows += n
        return Local((rows, self.hidden) if kind == "weight" else (rows,), tuple(runs))

    def _gated(self, at: str, tp: int, rank: int) -> Local:
        n = self.inner // tp
        runs = tuple(
            Run(f"{at}.{name}_proj.weight", rank * n, (rank + 1) * n, i * n) for i, name in enumerate(("gate", "up"))
        )
        return Local((2 * n, self.hidden), runs)


def fill(tensor: Tensor, local: Local, weights: Mapping[str, Any]) -> None:
    """Those of a rank's tensor's runs whose weights (tensors, or what gives one when indexed with slices) are given."""
    with torch.no_grad():
        for run in local.runs:
            if run.weight in weights:
                part = weights[run.weight][(slice(None),) * local.dim + (slice(run.start, run.stop),)]
                tensor.narrow(local.dim, run.at, run.stop - run.start).copy_(part)


def join(unit: Unit, tensors: Sequence[Mapping[str, Tensor]], shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The unit's whole weights from the tensors of each tensor-parallel rank; of a tensor that is one whole weight no
    copy."""
    found: dict[str, Tensor] = {}
    for locals_, of_rank in zip(unit.ranks, tensors, strict=True):
        for name, local in locals_.items():
            tensor = of_rank[name]
            for run in local.runs:
                shape = tuple(shapes[run.weight])
                if len(local.runs) == 1 and local.shape == shape:
                    found.setdefault(run.weight, tensor)
                    continue
                if run.weight not in found:
                    found[run.weight] = tensor.new_empty(shape)
                n = run.stop - run.start
                part = tensor.narrow(local.dim, run.at, n)
                found[run.weight].narrow(local.dim, run.start, n).copy_(part)
    return {name: found[name] for name in unit.weights}
