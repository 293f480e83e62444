"""Copying tensors into a model by name, all or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from verl.config.errors import MisfitError


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint of ``module`` holds: parameters and persistent buffers, tied parameters once."""
    first = {name for name, _ in module.named_parameters()}
    again = {name for name, _ in module.named_parameters(remove_duplicate=False)} - first
    return ((name, tensor) for name, tensor in module.state_dict().items() if name not in again)


def aliases(lm: nn.Module) -> dict[str, list[str]]:
    """Other names of tied parameters, by the one under which they are saved."""
    first = {id(p): name for name, p in lm.named_parameters()}
    tied: dict[str, list[str]] = {}
    for name, p in lm.named_parameters(remove_duplicate=False):
        if name != first[id(p)]:
            tied.setdefault(first[id(p)], []).append(name)
    return tied


def check_fit(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """``MisfitError`` unless both have the same names and shapes."""
    faults = [f"{name} is missing" for name in into.keys() - tensors.keys()]
    faults += [f"{name} is unknown" for name in tensors.keys() - into.keys()]
    faults += [
        f"{name} has shape {tuple(tensors[name].shape)}, not {tuple(into[name].shape)}"
        for name in into.keys() & tensors.keys()
        if tensors[name].shape != into[name].shape
    ]
    if faults:
        shown = "; ".join(sorted(faults)[:8])
        raise MisfitError(f"{len(faults)} tensors don't fit the model: {shown}{' ...' * (len(faults) > 8)}")


def copy_by_name(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """``into[name] <- tensors[name]`` for every name, or ``MisfitError`` and nothing copied."""
    check_fit(into, tensors)
    with torch.no_grad():
        for name, tensor in tensors.items():
            into[name].copy_(tensor)
