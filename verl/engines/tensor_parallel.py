"""Tensor parallelism: each layer's matrices cut over ranks that compute the same rows together (arXiv 1909.08053).

Attention and MLP begin with *column-wise* matrices (each rank holds some heads or some inner units) and end with
*row-wise* ones, whose outputs are summed over the ranks. Embedding, norms and output head stay whole on each: the head
is used by runs of tokens (``models/logprobs.py``), which needs a whole vocabulary, and FSDP shards it anyway.
"""

from __future__ import annotations

import re

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from verl.config.errors import RequestError
from verl.models.policy import Policy
from verl.models.scorer import Scorer
from verl.models.value import Value

LLAMA_LIKE = {  # for architectures that bring no plan of their own; paths below the decoder
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
WHOLE = {"embedding_rowwise", "replicate"}  # styles whose modules stay whole here, at no loss but memory
PER_HEAD = "replicated_with_grad_allreduce"  # a whole weight that acts on each rank's own heads (q_norm, k_norm)


def parallelize(module: Policy | Value | Scorer, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Cut ``module``'s layers over the one-dimensional ``mesh``, in place, by the model's own plan or ours.

    Every rank must hold the same whole weights. Gives the whole parameters of which each rank will see only its own
    heads' part of the gradient: these parts must be summed over ``mesh``.

    Raises:
        RequestError: heads or inner width that don't divide, or an architecture whose layers we can't cut.
    """
    size, name = mesh.size(), type(module.backbone).__name__
    config = module.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = getattr(config, key, None)
        if count is not None and count % size:
            raise RequestError(f"tensor_parallel_size {size} does not divide the model's {key} {count}")
    plan = getattr(config, "base_model_tp_plan", None) or LLAMA_LIKE
    patterns = [(re.compile(re.escape(path).replace(r"\*", r"\d+")), style) for path, style in plan.items()]
    cut: dict[str, ParallelStyle] = {}
    per_head: list[nn.Parameter] = []
    for path, part in module.backbone.named_modules():
        style = next((style for pattern, style in patterns if pattern.fullmatch(path)), None)
        if style == PER_HEAD:
            per_head += part.parameters()
        elif style in ("colwise", "rowwise"):
            cut |= _styles(path, part, style)
        elif style is not None and style not in WHOLE:
            raise RequestError(f"tensor parallelism: {name} wants {path} to be {style!r}, which is not supported")
    if not cut:
        raise RequestError(f"tensor parallelism: {name} has no plan, and its layers have other names than Llama's")
    parallelize_module(module.backbone, mesh, cut, src_data_rank=None)
    return per_head


def _styles(path: str, part: nn.Module, style: str) -> dict[str, ParallelStyle]:
    """``y = W x``, and with an adapter ``y = W x + B A x``: the adapter's matrix on the cut side is cut alike."""
    kind = ColwiseParallel if style == "colwise" else RowwiseParallel
    if not hasattr(part, "base_layer"):  # peft's layers have one
        return {path: kind()}
    side = "lora_B" if style == "colwise" else "lora_A"
    adapters = dict(part.get_submodule(side).named_children())
    return {f"{path}.base_layer": kind(), **{f"{path}.{side}.{adapter}": kind() for adapter in adapters}}
