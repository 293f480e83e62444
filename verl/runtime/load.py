"""Turns the roles of a host into workers. The one place that knows which class stands for which role."""

from __future__ import annotations

import contextlib
import copy
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from verl.algorithms.advantages import ESTIMATORS
from verl.algorithms.policy import POLICY_LOSSES
from verl.algorithms.preference import PAIR_LOSSES
from verl.cluster.group import Context
from verl.config.errors import RequestError
from verl.config.load import check_context
from verl.config.model import CriticConfig, FsdpConfig, ModelConfig
from verl.config.recipes import RECIPES
from verl.config.rules import number_of_rewards
from verl.config.run import RunConfig
from verl.dataflow.placement import Placement
from verl.engines.base import TrainEngine
from verl.engines.context_parallel import context_group
from verl.engines.fsdp import FsdpEngine
from verl.engines.sharding import device_mesh
from verl.hybrid.table import parts_in
from verl.layout import Layout
from verl.models.adjacent import put_together
from verl.models.decoder import base_model
from verl.models.factory import load_model, load_scorer, load_tokenizer, resolve_dtype
from verl.models.policy import Policy
from verl.models.scorer import Scorer
from verl.models.value import SharedValue, Value
from verl.models.vocabulary import check_embeddings, embedding_rows
from verl.rewards.base import Rewards, build_rewards
from verl.runtime.generation import check_cache, environment_of, rollout_engine, rollout_worker
from verl.runtime.publish import Plainly, Publisher, Through
from verl.workers.actor import ActorWorker
from verl.workers.critic import CriticWorker, ProcessRewardWorker
from verl.workers.frozen import ReferenceWorker, TeacherWorker
from verl.workers.offline import OfflineWorker, offline_worker
from verl.workers.rollout import RolloutWorker

TABLES: tuple[dict[str, Any], ...] = (RECIPES, ESTIMATORS, POLICY_LOSSES, PAIR_LOSSES)
Registered = Sequence[tuple[int, str, Any]]
"""Entries of ``TABLES``: the table's place, the name, what stands there."""
MEETING = timedelta(minutes=30)  # longest wait of a collective: a rank may compute for long while others are there


def registered(algorithm: str) -> Registered:
    """What the tables have of an algorithm: a script's own one is in no other process's."""
    recipe = RECIPES[algorithm]
    names = (algorithm, recipe.advantage, recipe.loss, recipe.loss)
    return [(i, name, TABLES[i][name]) for i, name in enumerate(names) if name is not None and name in TABLES[i]]


def register(entries: Registered) -> None:
    for i, name, entry in entries:
        TABLES[i][name] = entry


@dataclass
class Workers:
    """What hosts the ops of one device's roles: one worker per role, and the thread that computes for all of them."""

    compute: Executor
    publisher: Publisher
    trained: Policy | Scorer | None = None
    actor: ActorWorker | OfflineWorker | None = None
    rollout: RolloutWorker | None = None
    rewards: Rewards | None = None
    critic: CriticWorker | None = None
    reference: ReferenceWorker | None = None
    teacher: TeacherWorker | None = None
    process_reward: ProcessRewardWorker | None = None

    @property
    def engines(self) -> dict[str, TrainEngine]:
        """Everything that is trained here, by role."""
        roles = {"actor": self.actor, "critic": self.critic, "process_reward": self.process_reward}
        return {role: worker.engine for role, worker in roles.items() if worker is not None}

    def close(self) -> None:
        """End scoring processes, engines and threads; a second call does nothing."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.compute.shutdown, wait=False, cancel_futures=True)  # a second Ctrl-C waits for nothing
            if self.rewards is not None:
                stack.callback(self.rewards.close)
            if self.rollout is not None:
                stack.callback(self.rollout.engine.close)


def load(
    cfg: RunConfig, placement: Placement, context: Context, tokenizer: PreTrainedTokenizerBase, device: torch.device,
    laps: int,
) -> Workers:  # fmt: skip
    """Load the models of ``context.rank``'s roles and build their workers. All hosts call it together."""
    recipe, actor_cfg = cfg.algorithm.recipe, cfg.actor_model_config
    mine = {role for role, ranks in placement.roles.items() if context.rank in ranks}
    if "rollout" in mine:
        check_cache(cfg, resolve_dtype(actor_cfg.dtype, device))
    environment = environment_of(cfg, tokenizer) if "rollout" in mine else None
    meshes = _Meshes(cfg, placement, context, device)
    gpus = _sharing(placement, context, device) if placement.spans else ()
    critic_cfg = judge_cfg = None
    if "critic" in mine:
        critic_cfg = cfg.critic_model_config or CriticConfig()
        if critic_cfg.shares is None:
            critic_cfg = _with_model(critic_cfg, actor_cfg)
    if "process_reward" in mine:  # what its section doesn't say was filled in from the actor's
        judge_cfg = _with_model(cfg.process_reward_model_config or actor_cfg, actor_cfg)
    for role in ("actor", "critic", "process_reward", "teacher"):
        if role in mine:
            key = f"{role}_model_config"
            _check_ids(key, getattr(cfg, key), actor_cfg, tokenizer)
    steps_per_lap = cfg.train_batch_size // cfg.mini_batch_size * cfg.algorithm.update_epochs

    def engine(
        module: Policy | Value | SharedValue | Scorer, config: ModelConfig, role: str,
        steps: int = laps * steps_per_lap,
    ) -> TrainEngine:  # fmt: skip
        if not isinstance(module, SharedValue):  # it has the policy's positions
            model_config: Any = module.config
            if limit := getattr(model_config.get_text_config(), "max_position_embeddings", None):
                check_context(cfg, limit)
        mesh, context = meshes.of(role)
        fsdp = config.fsdp_config
        if config.engine == "megatron":
            assert isinstance(module, Policy) and mesh is not None
            options: Any = config.optimizer, steps, cfg.gradient_checkpointing, mesh, context, fsdp.cpu_offload
            return _megatron().MegatronEngine(module, *options)
        return FsdpEngine(
            module, config.optimizer, steps, cfg.gradient_checkpointing, mesh, fsdp.sharding_strategy, context=context,
            cpu_offload=fsdp.cpu_offload, compile_backend="inductor" if fsdp.torch_compile else None,
        )  # fmt: skip

    def sharded(*roles: str) -> bool:
        """Whether no rank needs the roles' models whole."""
        sections = [section_of(cfg, role) for role in roles if meshes.of(role)[0] is not None]
        cut = [s.engine == "megatron" or s.fsdp_config.sharding_strategy != "NO_SHARD" for s in sections]
        return 0 < len(roles) == len(cut) and all(cut)

    # first all modules: what is copied from the actor's start must be copied while it is whole
    trained: Policy | Scorer | None = None
    start: Policy | None = None  # the starting policy, where something but the actor itself needs it
    if mine & ({"actor", "reference"} if cfg.rollout.outside else {"actor", "rollout", "reference"}):
        dtype = resolve_dtype(actor_cfg.dtype, device)
        with _seeded(cfg.seed):
            if recipe.trains == "scorer":
                trained = Scorer(load_scorer(actor_cfg, device, dtype, cfg.seed))
            else:
                shares = critic_cfg is not None and critic_cfg.shares is not None
                in_parts = not shares and sharded(*mine & {"actor", "reference"})
                trained = start = Policy(load_model(actor_cfg, device, dtype, in_parts))
    in_place = samples_in_place(cfg, placement)
    together = "reference" in placement.roles and set(placement.ranks("reference")) == set(placement.ranks("actor"))
    adapters_off = together and start is not None and start.has_adapters
    copied: Policy | None = None  # what generates, where that isn't the actor itself
    if "rollout" in mine and not in_place and not cfg.rollout.outside:
        assert start is not None
        if start.unread is not None:  # what generates is whole
            copied = Policy(load_model(actor_cfg, device, start.dtype)).requires_grad_(False)
        else:
            copied = _frozen(start) if "actor" in mine else start.requires_grad_(False)
    frozen = _frozen(start) if "reference" in mine and start is not None and not adapters_off else None
    if "actor" not in mine:
        trained = None
    if adapters_off and isinstance(trained, Policy):
        trained.keep_reference()
    value = judge = judge_start = None
    if critic_cfg is not None:
        with _seeded(cfg.seed):
            value = _value_model(critic_cfg, trained, device, cfg.seed, sharded("critic"))
    if judge_cfg is not None:
        with _seeded(cfg.seed):
            dtype = resolve_dtype(judge_cfg.dtype, device)
            judge = Policy(load_model(judge_cfg, device, dtype, sharded("process_reward")))
        judge_start = _frozen(judge)

    generates = trained if copied is None else copied
    if "rollout" in mine and device.type == "cuda" and not cfg.rollout.outside and isinstance(generates, Policy):
        put_together(base_model(generates.lm))  # before anything holds its memory
        torch.cuda.empty_cache()
    workers = Workers(ThreadPoolExecutor(1, "compute"), Publisher())
    if trained is not None:
        actor = engine(trained, actor_cfg, "actor")
        learns_from_pairs = recipe.advantage is None
        workers.trained = trained
        workers.actor = offline_worker(actor, cfg) if learns_from_pairs else ActorWorker(actor, cfg)
        if adapters_off and isinstance(trained, Policy):
            workers.reference = ReferenceWorker(actor, cfg, adapters_of=trained)
    if frozen is not None:
        workers.reference = ReferenceWorker(engine(frozen, actor_cfg, "reference"), cfg)
    if "teacher" in mine:
        teacher_cfg = cfg.teacher_model_config
        assert teacher_cfg is not None
        dtype = resolve_dtype(teacher_cfg.dtype, device)
        teacher = Policy(load_model(teacher_cfg, device, dtype, sharded("teacher")))
        workers.teacher = TeacherWorker(engine(teacher.requires_grad_(False), teacher_cfg, "teacher"), cfg)
    if judge is not None and judge_start is not None and judge_cfg is not None:
        frozen_engine = engine(judge_start, judge_cfg, "process_reward")
        learning = engine(judge, judge_cfg, "process_reward", laps)  # a step per lap
        workers.process_reward = ProcessRewardWorker(learning, frozen_engine, cfg)
    if value is not None and critic_cfg is not None:
        workers.critic = CriticWorker(engine(value, critic_cfg, "critic"), cfg)
    if "rollout" in mine:
        dtype = resolve_dtype(actor_cfg.dtype, device)
        mine_policy = generates if isinstance(generates, Policy) else None
        rollout = rollout_engine(cfg, mine_policy, tokenizer, device, dtype, gpus)
        if (thread := getattr(rollout, "thread", None)) is not None:  # who samples and who trains take turns
            workers.compute.shutdown()
            workers.compute = thread
        workers.rollout = rollout_worker(cfg, rollout, environment, tokenizer)
    generating = workers.rollout.engine if workers.rollout is not None else None
    if in_place or not recipe.samples:
        workers.publisher = Publisher(generating)
    elif mine & {"actor", "rollout"}:
        policy = trained if isinstance(trained, Policy) else None
        if cfg.hybrid_engine or cfg.rollout.outside:
            link = placement, context, policy, meshes.corridor, generating, device
            trainer: Any = workers.actor.engine if workers.actor is not None else None
            parts = parts_in(trainer.pieces()) if trainer is not None and actor_cfg.engine == "megatron" else None
            workers.publisher = Through(*link, cfg.hybrid_config, cfg.rollout.outside, parts)
        else:
            source = workers.actor.engine if workers.actor is not None else None
            like = dict(copied.shards()) if copied is not None and source is None else {}
            workers.publisher = Plainly(placement, context, source, meshes.senders, generating, like)
    if "reward_model" in mine and number_of_rewards(cfg):
        workers.rewards = build_rewards(cfg, device)
    if device.type == "cuda":
        workers.compute.submit(torch.cuda.set_device, device).result()
    return workers


def layout_of(cfg: FsdpConfig, ranks: int) -> Layout:
    """How a role's ranks share its work."""
    return Layout.of(ranks, tp=cfg.tensor_parallel_size, cp=cfg.context_parallel_size, pp=cfg.pipeline_parallel_size)


def section_of(cfg: RunConfig, role: str) -> ModelConfig:
    """The section that says how a role's model is spread."""
    shared = cfg.critic_model_config is not None and cfg.critic_model_config.shares is not None
    if role in ("actor", "reference", "rollout") or (role == "critic" and shared):
        return cfg.actor_model_config
    section: ModelConfig | None = getattr(cfg, f"{role}_model_config", None)
    return section if section is not None else cfg.actor_model_config


def samples_in_place(cfg: RunConfig, placement: Placement) -> bool:
    """Whether rollouts use the actor's own parameters: each rank of theirs holds the actor whole, and they are to be
    the newest."""
    if "rollout" not in placement.roles or cfg.hybrid_config.reshard_interval > 1 or cfg.rollout.outside:
        return False
    actor, fsdp = placement.ranks("actor"), cfg.actor_model_config.fsdp_config
    whole = len(actor) == 1 or (fsdp.sharding_strategy == "NO_SHARD" and fsdp.tensor_parallel_size == 1)
    whole = whole and cfg.actor_model_config.engine != "megatron"
    return whole and set(placement.ranks("rollout")) <= set(actor)


class _Meshes:
    """The process group of all hosts, and a mesh for every set of ranks that shares a model."""

    def __init__(self, cfg: RunConfig, placement: Placement, context: Context, device: torch.device) -> None:
        self._of: dict[str, tuple[DeviceMesh, Any]] = {}
        self.corridor: Any = None  # process group of actor and rollouts
        self.senders: Any = None  # of the actor's first rank and the hosts that only sample
        if context.size == 1:
            return
        cuda = any(d.kind == "cuda" for d in placement.devices)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, context.meet, MEETING, world_size=context.size, rank=context.rank)
        made: dict[Any, tuple[DeviceMesh, Any]] = {}
        for role, ranks in sorted(placement.roles.items()):
            if len(ranks) == 1 or role in ("rollout", "reward_model"):
                continue
            section = section_of(cfg, role)
            fsdp, engine = section.fsdp_config, section.engine
            layout = layout_of(fsdp, len(ranks))
            hybrid = fsdp.sharding_strategy == "HYBRID_SHARD" and engine == "fsdp"
            data = layout.dp * layout.cp
            replicas = data // (fsdp.shard_size or data) if hybrid else 1
            kind = placement.devices[ranks[0]].kind
            key = (ranks, layout, replicas, engine)
            if key not in made:  # every host makes every mesh, in the same order
                if engine == "megatron":
                    mesh = _megatron().megatron_mesh(layout, kind, ranks)
                else:
                    mesh = device_mesh(layout, kind, replicas, ranks)
                made[key] = mesh, context_group(layout, ranks)
            self._of[role] = made[key]
        if cfg.algorithm.recipe.samples and not samples_in_place(cfg, placement):
            both = sorted({*placement.ranks("actor"), *placement.ranks("rollout")})
            only = [r for r in placement.ranks("rollout") if r not in placement.ranks("actor")]
            if (cfg.hybrid_engine or cfg.rollout.outside) and len(both) > 1:
                self.corridor = dist.new_group(both)
            if only and not cfg.hybrid_engine:
                self.senders = dist.new_group([placement.ranks("actor")[0], *only])

    def of(self, role: str) -> tuple[DeviceMesh | None, Any]:
        """The role's mesh, and this rank's group of those that share its rows."""
        return self._of.get(role, (None, None))


def _sharing(placement: Placement, context: Context, device: torch.device) -> tuple[str, ...]:
    """The GPUs of this rank's rollout engine, by the numbers that the machine gives them. All hosts call it.

    ``RequestError``, on all hosts: an engine's devices aren't of one machine.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = str(device.index or 0)
    mine = socket.gethostname(), listed.split(",")[int(number)] if listed and device.type == "cuda" else number
    found: list[Any] = [mine] * context.size
    dist.all_gather_object(found, mine)
    for ranks in placement.spans.values():
        if len(machines := {found[rank][0] for rank in ranks}) > 1:
            raise RequestError(
                f"rollout.tensor_parallel_size is {len(ranks)}, and workers {', '.join(map(str, ranks))}, which would "
                f"share an engine, are on {len(machines)} machines ({', '.join(sorted(machines))}); "
                "rollout.tensor_parallel_size 1 or a device_map that names their node would fit"
            )
    return tuple(found[rank][1] for rank in placement.spans.get(context.rank, ()))


def _megatron() -> Any:
    """Its module, which takes seconds to import and isn't always installed."""
    try:
        from verl.engines import megatron
    except ImportError as error:
        raise RequestError(f"engine megatron needs megatron-core: pip install 'verl[megatron]' ({error})") from error
    return megatron


def _frozen(policy: Policy) -> Policy:
    return copy.deepcopy(policy).requires_grad_(False)


def _check_ids(key: str, cfg: ModelConfig | None, actor_cfg: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """``RequestError`` where the policy's token ids mean other texts to a model that reads them, or have no embedding.

    A model that has no tokenizer of its own is taken to share the policy's.
    """
    source = None if cfg is None else cfg.model_name_or_path
    other = cfg is not actor_cfg
    if cfg is None or source is None or (other and source == actor_cfg.model_name_or_path):
        return
    who, theirs = f"{key}: {source if isinstance(source, str) else type(source).__name__}", tokenizer
    if other:
        with contextlib.suppress(RequestError):
            theirs = load_tokenizer(source, cfg.trust_remote_code)
    if theirs is not tokenizer and theirs.get_vocab() != tokenizer.get_vocab():
        raise RequestError(
            f"{who} has another vocabulary than the policy ({len(theirs.get_vocab())} and {len(tokenizer.get_vocab())} "
            "tokens), but it reads the policy's tokens; both need the same tokenizer"
        )
    check_embeddings(who, embedding_rows(source, cfg.trust_remote_code), tokenizer)


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


def _value_model(
    cfg: CriticConfig, policy: Policy | Scorer | None, device: torch.device, seed: int, in_parts: bool
) -> Value | SharedValue:
    """A head on the actor's backbone, or on a backbone of its own."""
    if cfg.shares == "actor":
        assert isinstance(policy, Policy)
        return SharedValue(policy, seed)
    return Value(load_model(cfg, device, resolve_dtype(cfg.dtype, device), in_parts, headless=True), seed)
