"""Turns the nodes of a plan into workers on a device. The one place that knows which class stands for which node."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from verl.config.errors import RequestError
from verl.config.load import check_context
from verl.config.model import CriticConfig, ModelConfig
from verl.config.run import RunConfig
from verl.dataflow.graph import Plan
from verl.dataflow.nodes import Critic, Reference
from verl.engines.fsdp import FsdpEngine
from verl.models.factory import eos_ids, load_model, resolve_dtype
from verl.models.policy import Policy
from verl.models.value import SharedValue, Value
from verl.rewards.base import build_rewards
from verl.rollout.native import NativeEngine
from verl.runtime.controller import Workers
from verl.workers.rollout import RolloutWorker
from verl.workers.train import ActorWorker, CriticWorker, ReferenceWorker

log = logging.getLogger(__name__)


def device_of(device_map: Mapping[str, Any]) -> torch.device:
    """The device of all roles. In one process they share one: the first GPU, or the CPU where there is none."""
    there = torch.cuda.device_count()
    wanted = {role: _listed(place) for role, place in device_map.items()}
    for role, places in wanted.items():
        for place in places:
            if place != "cpu" and not (isinstance(place, int) and 0 <= place < there):
                have = f"GPUs 0 to {there - 1} and cpu" if there else "no GPU, only cpu"
                raise RequestError(f"device_map.{role}: device {place!r} does not exist; this machine has {have}")
    distinct = {place for places in wanted.values() for place in places}
    if len(distinct) > 1:
        raise RequestError(
            f"device_map names {len(distinct)} devices ({', '.join(map(str, sorted(distinct, key=str)))}); "
            "with cluster.backend local every role runs in this process on one device: name the same one everywhere"
        )
    if distinct:
        (place,) = distinct
        return torch.device("cpu" if place == "cpu" else f"cuda:{place}")
    return torch.device("cuda:0" if there else "cpu")


def _listed(place: Any) -> list[Any]:
    return list(place) if isinstance(place, list | tuple) else [place]


def launch(
    cfg: RunConfig, plan: Plan, tokenizer: PreTrainedTokenizerBase, optimizer_steps: int | None, device: torch.device
) -> Workers:
    """Load models and build the workers. ``optimizer_steps``: of the whole run, for learning-rate schedules."""
    actor_cfg = cfg.actor_model_config
    critic_cfg = _critic_config(cfg, actor_cfg) if plan.node(Critic) is not None else None
    with _seeded(cfg.seed):
        policy = Policy(load_model(actor_cfg, device, resolve_dtype(actor_cfg.dtype, device)))
    if limit := getattr(policy.config.get_text_config(), "max_position_embeddings", None):
        check_context(cfg, limit)

    def engine(module: Policy | Value | SharedValue, config: ModelConfig) -> FsdpEngine:
        return FsdpEngine(module, config.optimizer, optimizer_steps, cfg.gradient_checkpointing)

    actor = engine(policy, actor_cfg)
    reference = None
    if plan.node(Reference) is not None:
        if actor_cfg.use_lora:  # training starts from the base, so the base is the starting policy
            reference = ReferenceWorker(actor, cfg, adapters_of=policy)
        else:
            frozen = copy.deepcopy(policy).requires_grad_(False)
            reference = ReferenceWorker(engine(frozen, actor_cfg), cfg)
    critic = None
    if critic_cfg is not None:
        with _seeded(cfg.seed):
            value = _value_model(critic_cfg, policy, device, cfg.seed)
        critic = CriticWorker(engine(value, critic_cfg), cfg)
    rollout = NativeEngine(policy, eos_ids(policy.lm, tokenizer), cfg.rollout.max_rows, tokenizer)
    rewards = build_rewards(cfg, device)
    return Workers(
        policy, ActorWorker(actor, cfg), RolloutWorker(rollout), rewards, critic, reference, device, rollout.thread
    )


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """New weights (adapters) follow from ``seed``: they are drawn on the CPU. The caller's random state comes back."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _critic_config(cfg: RunConfig, actor_cfg: ModelConfig) -> CriticConfig:
    """The critic's section with its model named: by default a copy of the actor's start.

    A loaded module is copied here, before the actor takes it over (adapters are put into it in place).
    """
    critic = cfg.critic_model_config or CriticConfig()
    if critic.shares == "actor":
        return critic
    source = actor_cfg.model_name_or_path if critic.model_name_or_path is None else critic.model_name_or_path
    if isinstance(source, torch.nn.Module):
        source = copy.deepcopy(source)
    return critic.model_copy(update={"model_name_or_path": source})


def _value_model(cfg: CriticConfig, policy: Policy, device: torch.device, seed: int) -> Value | SharedValue:
    """A head on the actor's backbone, or on a backbone of its own."""
    if cfg.shares == "actor":
        return SharedValue(policy, seed)
    return Value(load_model(cfg, device, resolve_dtype(cfg.dtype, device)), seed)


def close(workers: Workers) -> None:
    """End worker processes and threads; a second call does nothing."""
    with contextlib.ExitStack() as stack:
        stack.callback(workers.compute.shutdown, wait=False, cancel_futures=True)  # a second Ctrl-C waits for nothing
        stack.callback(workers.rewards.close)
