"""Decoder layers while they train: compiled, and computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from verl.config.errors import RequestError
from verl.engines.sharding import layers_of
from verl.models.packing import Packed, keep_out_of_graphs
from verl.models.quantize import holds_four_bit


def prepare(backbone: nn.Module, recompute: bool, compile_backend: str | None = None) -> None:
    """Change how ``backbone``'s layers compute on packed rows, in place; before they are sharded. Numbers stay.

    Args:
        recompute: while training keep only each layer's input, and compute the layer again in the backward pass (there
            is no dropout, so the random state needs no saving).
        compile_backend: ``torch.compile``'s, usually ``"inductor"``. Layers of a class share their graphs, whatever
            the number of tokens; attention is left out (its kernel stands by itself). Graphs begin inside what is
            recomputed. Generation on the same layers isn't compiled.

    Raises:
        RequestError: there are no layers to be found, or they can't be compiled.
    """
    if not recompute and compile_backend is None:
        return
    layers = layers_of(backbone)
    if not layers:
        key = "gradient_checkpointing" if recompute else "torch_compile"
        raise RequestError(f"{key}: {type(backbone).__name__} has no list of layers; set it to false")
    if compile_backend is not None and holds_four_bit(backbone):
        raise RequestError("torch_compile: products with 4-bit weights can't be compiled; set it to false")
    if compile_backend is not None:
        keep_out_of_graphs()
    for part in backbone.modules():  # else layers would be recomputed twice
        if getattr(part, "gradient_checkpointing", False):
            vars(part)["gradient_checkpointing"] = False
    for layer in layers:
        vars(layer)["forward"] = MethodType(_way(type(layer).forward, recompute, compile_backend), layer)


@cache
def _way(forward: Callable[..., Tensor], recompute: bool, compile_backend: str | None) -> Callable[..., Tensor]:
    """How layers of one class compute; a function of the layer, so that a copied layer uses its own weights."""
    graphs = forward if compile_backend is None else torch.compile(forward, backend=compile_backend)

    def compute(layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        inner = forward
        if compile_backend is not None and isinstance(kwargs.get("layout"), Packed):
            inner = graphs
            _any_length(args)
            _any_length(tuple(kwargs.values()))
        if recompute and layer.training and torch.is_grad_enabled():
            again: Tensor = checkpoint(inner, layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            return again
        return inner(layer, *args, **kwargs)

    return compute


def _any_length(values: tuple[Any, ...]) -> None:
    """Tell the compiler that the token axis of ``[1, T, ...]`` changes. (Were every axis unknown, it would take ten
    times as long.)"""
    for value in values:
        if isinstance(value, tuple):
            _any_length(value)
        elif isinstance(value, Tensor) and value.ndim > 1:
            torch._dynamo.maybe_mark_dynamic(value, 1)
