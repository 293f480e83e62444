"""Turns the nodes of a plan into workers on a device. The one place that knows which class stands for which node."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from verl.config.errors import RequestError
from verl.config.load import check_context
from verl.config.model import CriticConfig, ModelConfig
from verl.config.rules import number_of_rewards
from verl.config.run import RunConfig
from verl.dataflow.graph import Plan
from verl.dataflow.nodes import Critic, ProcessReward, Reference, Teacher
from verl.engines.fsdp import FsdpEngine
from verl.models.factory import eos_ids, load_model, load_scorer, load_tokenizer, resolve_dtype
from verl.models.policy import Policy
from verl.models.scorer import Scorer
from verl.models.value import SharedValue, Value
from verl.rewards.base import build_rewards
from verl.rollout.native import NativeEngine
from verl.runtime.controller import Workers
from verl.workers.actor import ActorWorker
from verl.workers.critic import CriticWorker, ProcessRewardWorker
from verl.workers.frozen import ReferenceWorker, TeacherWorker
from verl.workers.offline import offline_worker
from verl.workers.rollout import RolloutWorker

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


def launch(cfg: RunConfig, plan: Plan, tokenizer: PreTrainedTokenizerBase, laps: int, device: torch.device) -> Workers:
    """Load models and build the workers. ``laps``: of the whole run, for learning-rate schedules."""
    recipe, actor_cfg = cfg.algorithm.recipe, cfg.actor_model_config
    critic_cfg = judge_cfg = None
    if plan.node(Critic) is not None:
        critic_cfg = cfg.critic_model_config or CriticConfig()
        if critic_cfg.shares is None:
            critic_cfg = _with_model(critic_cfg, actor_cfg)
    if plan.node(ProcessReward) is not None:  # what its section doesn't say was filled in from the actor's
        judge_cfg = _with_model(cfg.process_reward_model_config or actor_cfg, actor_cfg)
    readers = {
        Critic: "critic_model_config",
        ProcessReward: "process_reward_model_config",
        Teacher: "teacher_model_config",
    }
    for node, key in readers.items():
        if plan.node(node) is not None:
            _check_ids(key, getattr(cfg, key), actor_cfg, tokenizer)
    dtype = resolve_dtype(actor_cfg.dtype, device)
    trained: Policy | Scorer
    with _seeded(cfg.seed):
        if recipe.trains == "scorer":
            trained = Scorer(load_scorer(actor_cfg, device, dtype, cfg.seed))
        else:
            trained = Policy(load_model(actor_cfg, device, dtype))
    steps_per_lap = cfg.train_batch_size // cfg.mini_batch_size * cfg.algorithm.update_epochs

    def engine(
        module: Policy | Value | SharedValue | Scorer, config: ModelConfig, steps: int = laps * steps_per_lap
    ) -> FsdpEngine:
        if not isinstance(module, SharedValue):  # it has the policy's positions
            model_config: Any = module.config
            if limit := getattr(model_config.get_text_config(), "max_position_embeddings", None):
                check_context(cfg, limit)
        return FsdpEngine(module, config.optimizer, steps, cfg.gradient_checkpointing)

    actor = engine(trained, actor_cfg)
    learns_from_pairs = recipe.advantage is None
    workers = Workers(
        trained, offline_worker(actor, cfg) if learns_from_pairs else ActorWorker(actor, cfg), device,
        ThreadPoolExecutor(1, "compute"),
    )  # fmt: skip
    if plan.node(Reference) is not None:
        assert isinstance(trained, Policy)
        if trained.has_adapters:
            trained.keep_reference()
            workers.reference = ReferenceWorker(actor, cfg, adapters_of=trained)
        else:
            workers.reference = ReferenceWorker(engine(_frozen(trained), actor_cfg), cfg)
    if plan.node(Teacher) is not None:
        assert cfg.teacher_model_config is not None
        teacher = load_model(cfg.teacher_model_config, device, resolve_dtype(cfg.teacher_model_config.dtype, device))
        workers.teacher = TeacherWorker(engine(Policy(teacher).requires_grad_(False), actor_cfg), cfg)
    if judge_cfg is not None:
        with _seeded(cfg.seed):
            judge = Policy(load_model(judge_cfg, device, resolve_dtype(judge_cfg.dtype, device)))
        start = engine(_frozen(judge), judge_cfg)
        workers.process_reward = ProcessRewardWorker(engine(judge, judge_cfg, laps), start, cfg)  # a step per lap
    if critic_cfg is not None:
        assert isinstance(trained, Policy)
        with _seeded(cfg.seed):
            value = _value_model(critic_cfg, trained, device, cfg.seed)
        workers.critic = CriticWorker(engine(value, critic_cfg), cfg)
    if recipe.samples:
        assert isinstance(trained, Policy)
        rollout = NativeEngine(trained, eos_ids(trained.lm, tokenizer), cfg.rollout.max_rows, tokenizer)
        workers.compute.shutdown()
        workers.compute = rollout.thread  # who samples and who trains take turns
        workers.rollout = RolloutWorker(rollout)
    if number_of_rewards(cfg):
        workers.rewards = build_rewards(cfg, device)
    return workers


def _frozen(policy: Policy) -> Policy:
    return copy.deepcopy(policy).requires_grad_(False)


def _check_ids(key: str, cfg: ModelConfig | None, actor_cfg: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """``RequestError`` where the policy's token ids mean other texts to a model that reads them.

    A model that has no tokenizer of its own is taken to share the policy's.
    """
    source = None if cfg is None else cfg.model_name_or_path
    if cfg is None or source is None or source == actor_cfg.model_name_or_path:
        return
    try:
        theirs = load_tokenizer(source, cfg.trust_remote_code)
    except RequestError:
        return
    if theirs.get_vocab() != tokenizer.get_vocab():
        raise RequestError(
            f"{key}: {source if isinstance(source, str) else type(source).__name__} has another vocabulary than the "
            f"policy ({len(theirs.get_vocab())} and {len(tokenizer.get_vocab())} tokens), but it reads the policy's "
            "tokens; both need the same tokenizer"
        )


S = TypeVar("S", bound=ModelConfig)


def _with_model(section: S, actor_cfg: ModelConfig) -> S:
    """The section with its model named: by default the actor's start.

    A loaded module is copied here, before the actor takes it over (adapters are put into it in place).
    """
    source = actor_cfg.model_name_or_path if section.model_name_or_path is None else section.model_name_or_path
    if isinstance(source, torch.nn.Module):
        source = copy.deepcopy(source)
    return section.model_copy(update={"model_name_or_path": source})


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """New weights (adapters) follow from ``seed``: they are drawn on the CPU. The caller's random state comes back."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _value_model(cfg: CriticConfig, policy: Policy, device: torch.device, seed: int) -> Value | SharedValue:
    """A head on the actor's backbone, or on a backbone of its own."""
    if cfg.shares == "actor":
        return SharedValue(policy, seed)
    return Value(load_model(cfg, device, resolve_dtype(cfg.dtype, device)), seed)


def close(workers: Workers) -> None:
    """End worker processes and threads; a second call does nothing."""
    with contextlib.ExitStack() as stack:
        stack.callback(workers.compute.shutdown, wait=False, cancel_futures=True)  # a second Ctrl-C waits for nothing
        if workers.rewards is not None:
            stack.callback(workers.rewards.close)
