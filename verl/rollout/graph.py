"""The decode step on a GPU: a model's own Linear modules with ``kernels`` between them, replayed as a CUDA graph.

The model's own weights are read, not copies: new values in the same storage need nothing. Modules that have more than
weights (adapters, fewer bits) are called, so that acts by itself. Graphs are kept from batch to batch, one for each of
a few numbers of rows. They read all that changes from tensors of the device: rows' state, where the cache lies, how
tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.models.adjacent import as_one
from verl.models.decoder import base_model
from verl.models.policy import Policy
from verl.rollout.base import Sampling
from verl.rollout.cache import Cache
from verl.rollout.kernels import add_norm, attend, rotate_store, sample, silu_mul
from verl.rollout.sampling import uniforms

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
ROPE_TYPES = {"dynamic", "longrope"}  # their angles depend on the longest row of the call
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
TABLE = 8  # int64 of a layer, see kernels.py
AGAIN = 1 << 16  # prompts' tokens that rows would read again in a step; from here on they read them together
NOBODY = (0, -1, 0, 0, 0, 0, 0)  # the state of a place without a row


def size_for(rows: int) -> int:
    """Rows of the step that computes so many: few sizes, as each has a graph."""
    step = 64 if rows <= 512 else 128
    return next((size for size in SIZES if size >= rows), -(-rows // step) * step)


def fits(policy: Policy) -> bool:
    """Whether ``Decode`` computes what this policy does: looks at every module that it passes by."""
    base: Any = base_model(policy.lm)
    model: Any = policy.backbone
    family, config = type(base).__name__.removesuffix("ForCausalLM"), base.config
    if family not in FAMILIES or not type(base).__module__.startswith("transformers.models."):
        return False
    passed: list[tuple[Any, str]] = [
        (model, "Model"), (model.norm, "RMSNorm"), (model.rotary_emb, "RotaryEmbedding"),
        *((layer, "DecoderLayer") for layer in model.layers),
        *((layer.self_attn, "Attention") for layer in model.layers),
        *((layer.mlp, "MLP") for layer in model.layers),
        *((norm, "RMSNorm") for layer in model.layers for norm in _norms(layer)),
    ]  # fmt: skip
    if any(
        type(part).__name__ != family + name or part._forward_hooks or part._forward_pre_hooks for part, name in passed
    ):
        return False
    dim = model.layers[0].self_attn.head_dim
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in model.layers]
    if family == "Mistral":
        windows.append(config.sliding_window)
    share = config.num_attention_heads // config.num_key_value_heads
    return (
        policy.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and all(norm.weight.dtype == policy.dtype for layer in model.layers for norm in _norms(layer))
        and model.embed_tokens.weight.dtype == model.norm.weight.dtype == policy.dtype
        and all(p.device == policy.device and not hasattr(p, "device_mesh") for p in policy.lm.parameters())
        and config.hidden_act in ("silu", "swish")
        and not any(windows)
        and model.rotary_emb.rope_type not in ROPE_TYPES
        and dim in (16, 32, 64, 128, 256)
        and share <= 16
    )


def _norms(layer: Any) -> list[Any]:
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    return norms + [n for name in ("q_norm", "k_norm") if (n := getattr(layer.self_attn, name, None)) is not None]


def _signature(lm: nn.Module) -> tuple[Any, ...]:
    """What a captured step has seen and can't read anew: where tensors lie and which adapters act."""
    layers: list[Any] = [m for m in lm.modules() if hasattr(m, "merged_adapters")]
    adapters = [
        (m.disable_adapters, *m.active_adapters, *m.merged_adapters, *getattr(m, "scaling", {}).items()) for m in layers
    ]
    return *(t.data_ptr() for t in (*lm.parameters(), *lm.buffers())), *adapters


def _products(x: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """What each of the layers makes of ``x [N, D]``; in one product, where their weights lie so."""
    one = as_one(*layers)
    if one is None:
        return [layer(x) for layer in layers]
    return F.linear(x, *one).split([layer.out_features for layer in layers], -1)


@dataclass
class Pending:
    """A step's tokens, on their way."""

    ids: Tensor
    logprobs: Tensor
    done: torch.cuda.Event | None

    def result(self) -> tuple[list[int], list[float]]:
        """Once they have come; to be called before the step after the next is launched."""
        if self.done is not None:
            self.done.synchronize()
        return self.ids.tolist(), self.logprobs.tolist()


class Decode:
    """Decodes up to ``max_rows`` rows side by side; ``begin``, then ``arrange`` and ``launch``, on one stream."""

    def __init__(self, policy: Policy, max_rows: int) -> None:
        self.policy, self.model = policy, policy.backbone
        device, most = policy.device, size_for(max_rows)
        attention = self._layers[0].self_attn
        self.dim: int = attention.head_dim
        self.kv_heads: int = base_model(policy.lm).config.num_key_value_heads
        # ids, slot, group's slot, prompt length, place, key of the noise, last place
        self.state = torch.zeros(len(NOBODY), most, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(most, device=device)
        self.options = torch.zeros(3, dtype=torch.float64, device=device)
        self.table = torch.zeros(len(self._layers), TABLE, dtype=torch.int64, device=device)
        self.greedy = self.cut = self.together = False
        self.size = 0
        self.on_gpu = device.type == "cuda"
        self._host = [
            (torch.empty(most, dtype=torch.int64, pin_memory=self.on_gpu), torch.empty(most, pin_memory=self.on_gpu))
            for _ in range(2)
        ]
        self._launched = 0
        self._signature: tuple[Any, ...] = ()
        self._stream = torch.cuda.Stream(device) if self.on_gpu else None
        self.release()

    @property
    def _layers(self) -> Any:
        return self.model.layers

    @property
    def bytes_per_token(self) -> int:
        """What a token leaves in the cache."""
        return 2 * len(self._layers) * self.kv_heads * self.dim * self.policy.dtype.itemsize

    def release(self) -> None:
        """Give back graphs and their memory."""
        self.graphs: dict[tuple[int, bool, bool, bool], torch.cuda.CUDAGraph | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.on_gpu else None

    def begin(self, cache: Cache, sampling: Sampling) -> None:
        """Take a new batch: allocate the ``cache``, whose stores have their final sizes, and read it from now on."""
        signature = _signature(self.policy.lm)
        if signature != self._signature:
            self.release()
        self._signature = signature
        like = torch.empty(0, self.kv_heads, self.dim, dtype=self.policy.dtype, device=self.state.device)
        entries = []
        for layer in range(len(self._layers)):
            tensors = [t for store in (cache.prompts, cache.responses) for t in store.allocate(layer, like)]
            entries.append([*(t.data_ptr() for t in tensors), cache.prompts.length, cache.responses.length, 0, 0])
        self.table.copy_(torch.tensor(entries))
        self.options.copy_(torch.tensor([sampling.temperature, sampling.top_p, sampling.top_k], dtype=torch.float64))
        self.greedy, self.cut = sampling.greedy, sampling.top_k > 0 or sampling.top_p < 1

    def first(self, logits: Tensor, keys: Sequence[int]) -> tuple[list[int], list[float]]:
        """The first tokens of rows with such noise ``keys``, of their ``logits [N, V]``."""
        key = torch.tensor(keys, device=logits.device)
        ids, logprobs = torch.empty_like(key), torch.empty(len(keys), device=logits.device)
        noise = uniforms(key, torch.zeros_like(key))
        sample(logits.contiguous(), noise, self.options, ids, logprobs, greedy=self.greedy, cut=self.cut)
        return ids.tolist(), logprobs.tolist()

    def arrange(self, rows: Sequence[tuple[int, ...]]) -> None:
        """The rows of the next steps, each as ``state`` has it; no step may be pending."""
        self.size = size_for(len(rows))
        columns = [*rows, *[NOBODY] * (self.size - len(rows))]
        self.state[:, : self.size].copy_(torch.tensor(columns).T)
        prompts = {row[2]: row[3] for row in rows}
        self.together = sum(row[3] for row in rows) - sum(prompts.values()) >= AGAIN

    def suits(self, rows: int) -> bool:
        """Whether no smaller step would compute so many rows."""
        return size_for(rows) == self.size

    def launch(self) -> Pending:
        """One token for every row. The host doesn't wait for it."""
        key = self.size, self.greedy, self.cut, self.together
        if not self.on_gpu or key not in self.graphs:  # the first of its kind warms up what can't be captured
            self._step(self.size)
            self.graphs[key] = None
        else:
            graph = self.graphs[key] or self._captured(self.size)
            self.graphs[key] = graph
            graph.replay()
        ids, logprobs = (t[: self.size] for t in self._host[self._launched % 2])
        self._launched += 1
        ids.copy_(self.state[0, : self.size], non_blocking=True)
        logprobs.copy_(self.logprobs[: self.size], non_blocking=True)
        done = None
        if self.on_gpu:
            done = torch.cuda.Event()
            done.record()
        return Pending(ids, logprobs, done)

    def _captured(self, size: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.mm(*self.logprobs.new_empty(2, 8, 8))  # cuBLAS takes its workspace for this stream, outside the pool
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # others may use the device
            try:
                self._step(size)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph

    def _step(self, size: int) -> None:
        ids, slot, group, prompt, place, key, last = self.state[:, :size].unbind()
        hidden = self._hidden(ids, slot, group, prompt, place)
        noise = uniforms(key, place + 1)
        logits = self.policy.logits(hidden)
        sample(logits, noise, self.options, ids, self.logprobs, greedy=self.greedy, cut=self.cut)
        place.copy_(torch.minimum(place + 1, last))  # a row that ended stays in its slot until it is taken out

    def _hidden(self, ids: Tensor, slot: Tensor, group: Tensor, prompt: Tensor, place: Tensor) -> Tensor:
        model: Any = self.model
        residual = model.embed_tokens(ids)
        cos, sin = (x[0] for x in model.rotary_emb(residual, (prompt + place)[None]))
        x: Tensor | None = None
        for layer, table in zip(model.layers, self.table, strict=True):
            attention, mlp, after = layer.self_attn, layer.mlp, layer.post_attention_layernorm
            h = add_norm(x, residual, layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon)
            q, k, v = _products(h, attention.q_proj, attention.k_proj, attention.v_proj)
            norms, eps = None, 0.0
            if hasattr(attention, "q_norm"):
                norms, eps = (attention.q_norm.weight, attention.k_norm.weight), attention.q_norm.variance_epsilon
            rotate_store(q, k, v, norms, eps, cos, sin, table, slot, place)
            h = attention.o_proj(
                attend(q, self.dim, self.kv_heads, table, slot, group, prompt, place, together=self.together)
            )
            h = add_norm(h, residual, after.weight, after.variance_epsilon)
            x = mlp.down_proj(silu_mul(*_products(h, mlp.gate_proj, mlp.up_proj)))
        return add_norm(x, residual, model.norm.weight, model.norm.variance_epsilon)
