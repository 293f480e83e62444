"""Starts the hosts of a run: where each role goes, and in which processes."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from verl.cluster.group import Inline, Spec, WorkerGroup
from verl.config.devices import Device, check_exists
from verl.config.errors import RequestError
from verl.config.rules import number_of_rewards
from verl.config.run import RunConfig
from verl.dataflow.graph import Plan
from verl.dataflow.nodes import Data
from verl.dataflow.placement import Placement, place
from verl.runtime.crew import ROLES, Crew
from verl.runtime.host import make_host
from verl.runtime.load import registered


def default_device() -> Device:
    """Where roles go that the device map doesn't name: the first GPU, or the CPU where there is none."""
    return Device("cuda" if torch.cuda.device_count() else "cpu", 0)


def first_device(cfg: RunConfig) -> torch.device:
    """The actor's first device, for work that needs one of this process's own."""
    device = place(cfg, default_device(), {"actor"}).devices[0]
    check_exists([device], torch.cuda.device_count(), "actor")
    return torch.device(str(device) if device.kind == "cuda" else "cpu")


def placement_of(cfg: RunConfig, plan: Plan) -> Placement:
    """Ranks of every role of the plan. ``RequestError`` for a device that doesn't exist on this machine."""
    roles = {ROLES.get(node.kind, node.kind) for node in plan.nodes if not isinstance(node, Data)}
    if not number_of_rewards(cfg):
        roles.discard("reward_model")
    placement = place(cfg, default_device(), roles)
    if cfg.cluster.backend == "local":
        placement.check(torch.cuda.device_count())
    return placement


def launch(
    cfg: RunConfig, placement: Placement, tokenizer: PreTrainedTokenizerBase, folder: Path | None = None
) -> Crew:
    """Hosts that have loaded nothing yet. ``folder``: the run's, for logs."""
    logs = None if folder is None else folder / "logs"
    timeline = logs / "timeline.json" if logs is not None and cfg.log_level == "DEBUG" else None
    if logs is not None and (timeline is not None or len(placement.devices) > 1 or cfg.cluster.backend == "ray"):
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"run_dir: can't write to {folder}: {error}") from error
    specs = [
        Spec(device.plain, ", ".join(placement.hosted(rank)), device.node)
        for rank, device in enumerate(placement.devices)
    ]
    group: WorkerGroup
    own = registered(cfg.algorithm.name)
    if cfg.cluster.backend == "ray":
        from verl.cluster.ray import RayGroup

        group = RayGroup(
            make_host, (cfg, placement, None, own), specs, logs=logs, address=cfg.cluster.address,
            heartbeat=cfg.cluster.heartbeat_seconds,
        )  # fmt: skip
    elif len(specs) == 1:
        group = Inline(make_host, (cfg, placement, tokenizer), specs[0])
    else:
        from verl.cluster.processes import Processes

        group = Processes(
            make_host, (cfg, placement, None, own), specs, logs=logs, preload=_imports(cfg),
            heartbeat=cfg.cluster.heartbeat_seconds,
        )  # fmt: skip
    return Crew(group, placement, timeline)


def _imports(cfg: RunConfig) -> tuple[str, ...]:
    """Modules that every host of a machine needs and that take seconds to import."""
    megatron = cfg.actor_model_config.engine == "megatron"
    return ("verl.runtime.host", "verl.engines.megatron") if megatron else ("verl.runtime.host",)
