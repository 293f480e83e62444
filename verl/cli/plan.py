"""``verl plan``: who is where, what the actor needs, and what moving its weights to rollouts costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from verl.config.load import notes
from verl.config.rules import roles_of
from verl.config.run import RunConfig
from verl.dataflow.placement import place
from verl.models.adapters import base_of, is_adapter_folder
from verl.models.factory import outline, resolve_dtype
from verl.planner.publish import estimate
from verl.planner.weights import table as table_of
from verl.planner.weights import weights_of
from verl.runtime.launch import default_device
from verl.runtime.load import samples_in_place


def plan(cfg: RunConfig) -> None:
    """Print it. Nothing is loaded, and the devices need not exist here."""
    placement = place(cfg, default_device(), roles_of(cfg))
    console = Console(highlight=False, soft_wrap=True)
    for line in notes(cfg):
        console.print(line)
    if len(placement.devices) == 1:
        console.print(f"one worker on {placement.devices[0]}: {', '.join(placement.hosted(0))}")
    dtype = resolve_dtype(cfg.actor_model_config.dtype, placement.devices[0].kind)
    weights = _weights(cfg, dtype.itemsize)
    source = cfg.actor_model_config.model_name_or_path
    adapters = cfg.actor_model_config.use_lora or is_adapter_folder(source) or hasattr(source, "peft_config")
    found = estimate(cfg, placement, weights, samples_in_place(cfg, placement), adapters)
    console.print(
        f"the policy: {found.values:,} values, {_size(found.model)} in {str(dtype).removeprefix('torch.')}; an actor's "
        f"worker holds {_size(found.actor)} of weights, gradients, masters and moments, activations not counted"
    )
    if not placement.ranks("rollout"):
        return
    if adapters:
        console.print("a publish moves the adapter alone")
    if found.ours is None:
        console.print("a publish moves nothing: rollouts sample from the actor's own parameters")
    rows = {"this run": found.ours, "all ranks gather all": found.everything, "model-parallel groups": found.groups}
    table = Table("publish of the whole policy", "received", "peak", "held twice", box=None)
    for name, cost in rows.items():
        if cost is not None:
            table.add_row(name, *(_size(n) for n in (cost.received, cost.peak, cost.redundant)))
    console.print(table)
    console.print("bytes of weights on one worker, the most of all")


def _weights(cfg: RunConfig, itemsize: int) -> list:
    source: Any = cfg.actor_model_config.model_name_or_path
    if is_adapter_folder(source):
        source = base_of(source)
    if isinstance(source, str) and list(Path(source).glob("*.safetensors")):
        return weights_of(Path(source), itemsize)
    if isinstance(source, nn.Module):
        lm: Any = source
    else:
        lm = outline(source, cfg.actor_model_config.trust_remote_code)
    return table_of({name: (tuple(p.shape), itemsize) for name, p in lm.named_parameters()})


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
