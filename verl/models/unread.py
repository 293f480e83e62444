"""Models whose weights stay in their files until each rank knows which part of them it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from verl.models.naming import own_tensors
from verl.models.stored import warn_of_rest


@dataclass(frozen=True)
class Unread:
    """Where the weights of a model are: file by tensor name."""

    files: dict[str, str]

    def tensors(self, names: set[str]) -> Iterator[tuple[str, Any]]:
        """Names and what is stored under them: indexed with slices it gives a tensor, and only that part is read.

        A file is opened anew for each, because what was read counts as this process's memory until it is closed.
        """
        for name in sorted(names):
            with safe_open(self.files[name], framework="pt") as stored:
                yield name, stored.get_slice(name)


def take(lm: nn.Module) -> Unread | None:
    """The files of a model that ``build`` gave, for the one who will fill it; ``None``: it is an ordinary one."""
    return vars(lm).pop("unread", None)


def build(name: str, dtype: torch.dtype) -> PreTrainedModel | str:
    """The causal LM of a hub name or folder with its buffers, but no memory for its parameters (they are on the meta
    device); or why its files can't be read by parts, which is no error.

    ``OSError`` or ``ValueError`` where there is no such model.
    """
    config = AutoConfig.from_pretrained(name)
    if getattr(config, "quantization_config", None):
        return "it is quantised"
    files = _files(name)
    if not files:
        return "it has no safetensors files"
    with _no_memory():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if dtype != torch.float32 and {p.dtype for p in model.parameters()} != {dtype}:
        return "some of its parameters want another dtype"
    if getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None):
        return "some of its parameters want another dtype"
    own = dict(own_tensors(model))
    if revert_weight_conversion(model, own) is not own:
        return f"the layout of {type(model).__name__}'s files is not the model's"
    wanted = {n: tuple(p.shape) for n, p in model.named_parameters()}
    if missing := sorted(wanted.keys() - files.keys()):
        return f"its files have no {missing[0]}"
    kept = Unread(files)
    for tensor, stored in kept.tensors(wanted.keys() | (own.keys() & files.keys())):
        if tensor not in wanted:  # a buffer
            own[tensor].copy_(stored[...])
        elif tuple(stored.get_shape()) != wanted[tensor]:
            return f"{tensor} has shape {tuple(stored.get_shape())} in its file, not {wanted[tensor]}"
    strange: Any = SimpleNamespace(missing_keys=set(), unexpected_keys=files.keys() - model.state_dict().keys())
    model._adjust_missing_and_unexpected_keys(strange)  # some are known to be of no use
    if strange.unexpected_keys:
        warn_of_rest(name, type(model).__name__, tuple(sorted(strange.unexpected_keys)))
    with suppress(OSError):  # it has none of its own
        model.generation_config = GenerationConfig.from_pretrained(name)
    vars(model)["unread"] = kept
    return model.eval()


def _files(name: str) -> dict[str, str]:
    """File by tensor name; empty where there are no safetensors files."""
    absent: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    if single := cached_file(name, SAFE_WEIGHTS_NAME, **absent):
        with safe_open(single, framework="pt") as stored:
            return dict.fromkeys(stored.keys(), single)
    index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **absent)
    if not index:
        return {}
    by_name: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
    places = {part: cached_file(name, part) for part in sorted(set(by_name.values()))}
    return {tensor: str(places[part]) for tensor, part in by_name.items()}


@contextmanager
def _no_memory() -> Iterator[None]:
    """While open, parameters go to the meta device as modules get them, and stay shared where they are. Buffers are
    computed as always: no file has them all."""
    module: Any = nn.Module
    register = module.register_parameter

    def to_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        register(self, name, param)

    module.register_parameter = to_meta
    try:
        yield
    finally:
        module.register_parameter = register
