"""A Llama-like decoder as megatron-core's ``GPTModel`` of its own local layers: one rank's part of it.

What Megatron doesn't do on packed rows is done in the one place where attention is computed: positions are turned by
angles that come from outside, and the rows' layout says which keys a query sees. The model gives hidden states.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from verl.models.megatron_names import Shape
from verl.models.packing import AttentionOptions, Layout


@contextmanager
def _plainly() -> Iterator[None]:
    """For Megatron's import, which has kernels compiled (the compiler alone takes 2 s to import) and warns of others
    that aren't installed. None of them is used here."""
    compiler, torch.compile = torch.compile, lambda f=None, **_: f or (lambda g: g)  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compile = compiler


with _plainly():
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce as linear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer


def build(
    shape: Shape, config: Any, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype, recompute: bool
) -> GPTModel:
    """This rank's part of a model of Hugging Face's ``config``, all zeros, over the ``pp`` and ``tp`` of ``mesh``.

    ``recompute``: while training, keep each layer's input alone.
    """
    tp, stages, stage = mesh["tp"].size(), mesh["pp"].size(), mesh.get_local_rank("pp")
    options = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.inner,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        cuda_graph_scope=[],  # the default's name is deprecated
        use_cpu_initialization=True,  # that is: wherever torch makes tensors now
        perform_initialization=False,
    )
    layer = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    layer.module = _Layer
    layer.submodules.self_attention.submodules.core_attention = partial(_PackedAttention, _windows(config))
    groups = ProcessGroupCollection(tp=mesh.get_group("tp"), pp=mesh.get_group("pp"), cp=_Alone(), embd=None)
    with torch.device(device):
        model = _Model(
            options,
            TransformerBlockSubmodules([layer] * (shape.layers // stages), WrappedTorchNorm),
            vocab_size=shape.padded(tp),
            max_sequence_length=config.max_position_embeddings,
            pre_process=stage == 0,
            post_process=stage == stages - 1,
            # a head on another stage than the embedding it is tied to is our own to keep alike
            share_embeddings_and_output_weights=shape.tied and stages == 1,
            position_embedding_type="none",
            pg_collection=groups,
        )
    for part in model.decoder.layers:
        part.recompute = recompute
    if device.type == "cpu":
        linear.warned = True  # it has advice on CUDA's environment
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return model.to(device, dtype).eval()  # norms, too, which know of no dtype


class Rows(PackedSeqParams):
    """What travels through Megatron's layers to attention: where keys lie, and ``[T, 1, head_dim]`` rotary angles."""

    def __init__(self, layout: Layout, cos: Tensor, sin: Tensor) -> None:
        super().__init__(qkv_format="thd")
        self.layout, self.cos, self.sin = layout, cos, sin


class _PackedAttention(nn.Module):
    """``windows``: of each of the model's layers, how many keys a query sees; ``None``: all."""

    def __init__(self, windows: Sequence[int | None], config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.layer, self.options = layer_number - 1, AttentionOptions(window=windows[layer_number - 1])

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: Rows, **_: Any
    ) -> Tensor:
        """``[T, heads of this rank, head_dim]`` in and out."""
        rows = packed_seq_params
        q, k = (x * rows.cos + _turned(x) * rows.sin for x in (query, key))
        return rows.layout.attend(self.layer, q, k, value, self.options)


def _turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class _Layer(TransformerLayer):
    """``recompute``: while training, keep the layer's input alone. Megatron's own way saves the random state of a GPU,
    though there is no dropout."""

    recompute = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.recompute and self.training:
            return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return super().forward(*args, **kwargs)


class _Model(GPTModel):
    """Gives hidden states: the head is used elsewhere."""

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class _Alone:
    """Stands for a process group of one: Megatron is told of no context-parallel ranks."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _windows(config: Any) -> list[int | None]:
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    every = range(config.num_hidden_layers)
    return [window if kinds is None or kinds[i] == "sliding_attention" else None for i in every]
