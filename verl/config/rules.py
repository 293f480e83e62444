"""Rules between keys. Each violation says what is wrong, the value, the rule, and settings that would be valid."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config import batch_words, device_rules
from verl.config.devices import devices_of, written
from verl.config.errors import ConfigError
from verl.config.model import ModelConfig
from verl.config.run import RunConfig
from verl.config.section import Section


@dataclass(frozen=True)
class Violation:
    """``keys``: the dotted keys it speaks of. Where one of them is wrong by itself, this isn't reported as well."""

    keys: tuple[str, ...]
    text: str


def violations(cfg: RunConfig, *, partial: bool) -> Iterator[Violation]:
    """Broken rules of a configuration whose single values are all valid. ``partial``: the rest comes later."""
    if not partial:
        yield from _required(cfg)
    yield from _batch(cfg)
    yield from _lengths(cfg)
    yield from _algorithm(cfg)
    yield from _offline(cfg)
    yield from _models(cfg)
    yield from _megatron(cfg)
    yield from _rewards(cfg)
    yield from _staleness(cfg)
    yield from _rollout(cfg)
    for keys, text in device_rules.faults(cfg, roles_of(cfg)):
        yield Violation(keys, text)
    if cfg.checkpoint.save == "actor" and cfg.cluster.max_restarts:
        yield Violation(
            ("checkpoint.save", "cluster.max_restarts"),
            f"checkpoint.save is actor and cluster.max_restarts is {cfg.cluster.max_restarts}: new workers can't go on "
            "from the policy alone; checkpoint.save global or cluster.max_restarts 0",
        )
    if cfg.total_steps is not None and cfg.total_epochs is not None:
        yield Violation(
            ("total_steps", "total_epochs"),
            f"total_steps is {cfg.total_steps} and total_epochs is {cfg.total_epochs:g}: only one can end the run; "
            f"keep total_steps {cfg.total_steps} or total_epochs {cfg.total_epochs:g}",
        )


def check_context(cfg: RunConfig, limit: int) -> None:
    """``ConfigError`` if prompt and response may not fit a model of ``limit`` positions, known once it is loaded."""
    found = _context(cfg, limit)
    if found:
        raise ConfigError(found.text)


def check_modules(cfg: RunConfig, count: int) -> None:
    """``ConfigError`` if a model is a loaded module but the run has several workers, ``count``, known once the default
    device is."""
    for _, text in device_rules.modules(cfg, count):
        raise ConfigError(text)


def roles_of(cfg: RunConfig) -> list[str]:
    """The roles that the algorithm's own flow has."""
    recipe = cfg.algorithm.recipe
    there = {
        "actor": True,
        "critic": cfg.algorithm.needs_critic,
        "reference": "reference" in recipe.needs
        or (recipe.samples and bool(default_kl_coef(cfg) or cfg.kl_sample_rows)),
        "reward_model": recipe.samples and bool(cfg.reward_models),
        "rollout": recipe.samples,
        "teacher": "teacher" in recipe.needs,
        "process_reward": "process_reward" in recipe.needs,
    }
    return [role for role, is_there in there.items() if is_there]


def number_of_rewards(cfg: RunConfig) -> int:
    return len(cfg.reward_fn) + (cfg.reward_model_config is not None)


def _required(cfg: RunConfig) -> Iterator[Violation]:
    if cfg.actor_model_config.model_name_or_path is None:
        yield _missing("actor_model_config.model_name_or_path", "the model to train", "gpt2", "models/mine")
    if cfg.dataset is None:
        yield _missing("dataset", "the prompts", "data/prompts.jsonl", "{name: arithmetic}")
    if "teacher" in cfg.algorithm.recipe.needs and (
        cfg.teacher_model_config is None or cfg.teacher_model_config.model_name_or_path is None
    ):
        yield _missing("teacher_model_config.model_name_or_path", "the model to learn from", "some/model", "models/big")
    if "reward" in cfg.algorithm.recipe.needs and number_of_rewards(cfg) == 0:
        keys = ("reward_fn", "reward_model_config", "reward_weights")
        text = "there is no reward: set reward_fn my_rewards:score or reward_model_config.model_name_or_path some/model"
        yield Violation(keys, text)


def _missing(key: str, what: str, *examples: str) -> Violation:
    return Violation((key,), f"{key} is missing ({what}): set it to {' or '.join(examples)}")


def _batch(cfg: RunConfig) -> Iterator[Violation]:
    words = batch_words.words_of(cfg)
    for fault in batch_words.faults(words):
        keys = fault.keys + (("algorithm.name",) if "group_size" in fault.keys else ())
        yield Violation(keys, f"{fault.text}; {batch_words.advice(words, fault)}")


def _lengths(cfg: RunConfig) -> Iterator[Violation]:
    prompt, response, recipe = cfg.max_prompt_length, cfg.max_response_length, cfg.algorithm.recipe
    longest, what = prompt + response, "one row, max_prompt_length {p} + max_response_length {r}"
    if recipe.data == "pairs":  # prompt and answer share one limit
        longest, what = 2 * longest, "a pair, 2 x (max_prompt_length {p} + max_response_length {r})"
    elif recipe.pairs_sampled:  # the prompt is computed once
        longest, what = prompt + 2 * response, "a pair, max_prompt_length {p} + 2 x max_response_length {r}"
    budget = cfg.max_tokens_per_micro_batch
    if budget is not None and budget < longest:
        key = "max_tokens_per_micro_batch"
        yield Violation(
            (key, "max_prompt_length", "max_response_length"),
            f"{key} is {budget}: must hold {what.format(p=prompt, r=response)}; "
            f"{key} {longest} or {2 * longest} would fit",
        )
    limit = _positions(cfg.actor_model_config.model_name_or_path)
    found = _context(cfg, limit) if limit is not None else None
    if found:
        yield found


def _context(cfg: RunConfig, limit: int) -> Violation | None:
    prompt, response = cfg.max_prompt_length, cfg.max_response_length
    if prompt + response <= limit:
        return None
    half = max(limit // 2, 1)
    settings = [f"max_prompt_length {limit - response}"] if response < limit else []
    settings += [f"max_response_length {limit - prompt}"] if prompt < limit else []
    settings += [f"max_prompt_length {limit - half} with max_response_length {half}"]
    return Violation(
        ("max_prompt_length", "max_response_length", "actor_model_config.model_name_or_path"),
        f"max_prompt_length is {prompt} and max_response_length is {response}: together they must not exceed the "
        f"model's {limit} positions; {' or '.join(settings[:2])} would fit",
    )


def _positions(model: Any) -> int | None:
    """Positions of a model whose configuration can be read without loading anything: a folder, or a loaded module."""
    if isinstance(model, str):
        file = Path(model) / "config.json"
        try:
            config = json.loads(file.read_text()) if file.is_file() else {}
        except (OSError, ValueError):  # loading says what is wrong with it
            return None
    else:
        to_dict = getattr(getattr(model, "config", None), "to_dict", None)
        config = to_dict() if callable(to_dict) else {}
    for owner in (config, config.get("text_config") or {}):
        for key in ("max_position_embeddings", "n_positions"):
            if isinstance(owner.get(key), int):
                return owner[key]
    return None


def _algorithm(cfg: RunConfig) -> Iterator[Violation]:
    algorithm = cfg.algorithm
    group = batch_words.words_of(cfg).group_size
    if algorithm.name == "pass_k" and group < algorithm.pass_k:
        yield Violation(
            ("algorithm.pass_k", "group_size"),
            f"algorithm.pass_k is {algorithm.pass_k} and group_size is {group}: a group needs k rows; "
            f"group_size {algorithm.pass_k} or algorithm.pass_k {group} would fit",
        )
    if algorithm.recipe.pairs_sampled:
        unread = [key for key in ("init_kl_coef", "kl_target") if getattr(cfg, key)]
        for key in unread:
            yield Violation(
                (key, "algorithm.name"),
                f"{key} is {getattr(cfg, key):g}, but {algorithm.name} has no KL penalty: algorithm.beta holds the "
                f"policy to the reference; {key} 0 or null would fit",
            )
    for key in ("overlong_share", "dynamic_sampling"):
        if getattr(algorithm.filled, key) and algorithm.name in ("gdpo", "distill"):
            yield Violation(
                (f"algorithm.{key}", "algorithm.name"),
                f"algorithm.{key} is {str(getattr(algorithm.filled, key)).lower()}, but {algorithm.name} doesn't train "
                f"on the sum of rewards that it changes or judges; algorithm.{key} null would fit",
            )
    filled = algorithm.filled
    if filled.old_logprobs == "sampler" and filled.correction not in ("none", "reject"):
        yield Violation(
            ("algorithm.correction", "algorithm.old_logprobs"),
            f"algorithm.correction is {filled.correction} with algorithm.old_logprobs sampler: the ratio starts at the "
            "sampler already, so its weight would count twice; algorithm.correction none or reject would fit",
        )
    if algorithm.name in ("pass_k", "gdpo", "distill") and filled.kl_in == "reward":
        yield Violation(
            ("algorithm.kl_in", "algorithm.name"),
            f"algorithm.kl_in is reward, but {algorithm.name} reads no sum of rewards that a KL penalty could be part "
            "of; algorithm.kl_in loss or null would fit",
        )
    penalised = filled.kl_in == "reward" and bool(default_kl_coef(cfg))
    if algorithm.recipe.advantage == "grpo" and penalised and filled.scale == "std":
        yield Violation(
            ("algorithm.kl_in", "algorithm.scale"),
            "algorithm.kl_in is reward with algorithm.scale std: in a group of equal scores the deviation is the KL "
            "penalty's alone, and dividing by it makes advantages of rounding; algorithm.kl_in loss or algorithm.scale "
            "none would fit",
        )
    if algorithm.name == "kto" and cfg.eval.limit == 1:
        yield Violation(
            ("eval.limit", "algorithm.name"),
            "eval.limit is 1: KTO's baseline needs another row's answer; eval.limit 2 or 64 would fit",
        )
    if filled.dynamic_sampling and not algorithm.needs_groups:
        yield Violation(
            ("algorithm.dynamic_sampling", "algorithm.name"),
            f"algorithm.dynamic_sampling is true, but {algorithm.name} compares no rows of a group; "
            "algorithm.dynamic_sampling false or algorithm.name dapo would fit",
        )
    elif filled.dynamic_sampling and group == 1 and algorithm.allow_singletons:  # else group_size is wrong by itself
        yield Violation(
            ("algorithm.dynamic_sampling", "algorithm.allow_singletons", "group_size"),
            "algorithm.dynamic_sampling is true and group_size is 1: it replaces groups whose rows all got the same "
            "reward, and one row always did; group_size 2 or algorithm.dynamic_sampling false would fit",
        )
    ranges = (
        ("correction_floor", "correction_cap", ("icepop", "reject"), filled.correction, "keeps no token"),
        ("covariance_low", "covariance_high", ("clip_cov",), algorithm.recipe.loss, "chooses no token"),
    )
    for lower, upper, readers, reader, outcome in ranges:
        least, most = getattr(algorithm, lower), getattr(algorithm, upper)
        if least > most and reader in readers:
            yield Violation(
                (f"algorithm.{lower}", f"algorithm.{upper}"),
                f"algorithm.{lower} is {least:g}, above algorithm.{upper} {most:g}, so {reader} {outcome}; "
                f"algorithm.{lower} {most:g} or algorithm.{upper} {least:g} would fit",
            )
    low, high, both = algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.clip_ratio
    clip_keys = ("algorithm.clip_ratio", "algorithm.clip_ratio_low", "algorithm.clip_ratio_high")
    fit = "algorithm.clip_ratio 0.2, or algorithm.clip_ratio_low 0.2 with algorithm.clip_ratio_high 0.28, would fit"
    if both is not None and (low is not None or high is not None):
        sides = " and ".join(f"{k} {v:g}" for k, v in zip(clip_keys[1:], (low, high), strict=True) if v is not None)
        yield Violation(
            clip_keys, f"algorithm.clip_ratio is {both:g} beside {sides}: the clip is symmetric or asymmetric; {fit}"
        )
    elif (low is None) != (high is None):
        given, absent = (clip_keys[1], clip_keys[2]) if high is None else (clip_keys[2], clip_keys[1])
        yield Violation(clip_keys, f"{given} is {low or high:g} without {absent}: an asymmetric clip needs both; {fit}")
    if cfg.kl_target is not None and default_kl_coef(cfg) == 0:
        yield Violation(
            ("kl_target", "init_kl_coef", "algorithm.name"),
            f"kl_target is {cfg.kl_target:g} and init_kl_coef is 0: the controller scales the coefficient, so it must "
            "start above 0; init_kl_coef 0.1 or 0.01 would fit",
        )


def default_kl_coef(cfg: RunConfig) -> float:
    """``init_kl_coef``, or the algorithm's default where it isn't given."""
    given: float | None = cfg.init_kl_coef
    return given if given is not None else cfg.algorithm.recipe.defaults.get("init_kl_coef", 0.0)


def default_correction(cfg: RunConfig) -> bool:
    """Whether rows may be stale and nothing is said about their correction: then their weights are truncated."""
    stale = cfg.max_staleness or cfg.hybrid_config.reshard_interval > 1
    algorithm = cfg.algorithm
    loss = algorithm.recipe.samples and algorithm.recipe.advantage is not None  # one with a ratio
    return bool(stale and loss and "correction" not in algorithm.model_fields_set) and (
        algorithm.filled.old_logprobs == "trainer"
    )


def _megatron(cfg: RunConfig) -> Iterator[Violation]:
    """What Megatron doesn't train, and what FSDP doesn't do."""
    actor, critic = cfg.actor_model_config, cfg.critic_model_config
    sections = ("actor", "critic", "teacher", "process_reward")
    named = {f"{name}_model_config": getattr(cfg, f"{name}_model_config") for name in sections}
    for name, model in named.items():
        if model is None:
            continue
        stages, optimizer = model.fsdp_config.pipeline_parallel_size, model.optimizer.name
        if model.engine == "fsdp":
            if stages > 1:
                yield Violation(
                    (f"{name}.engine", f"{name}.fsdp_config.pipeline_parallel_size"),
                    f"{name}.fsdp_config.pipeline_parallel_size is {stages}, but {name}.engine is fsdp, which has no "
                    f"stages; pipeline_parallel_size 1 or {name}.engine megatron would fit",
                )
            continue
        faults = {
            "use_lora": "use_lora false" if model.use_lora else "",
            "load_in_4bit": "load_in_4bit false" if model.load_in_4bit else "",
            "optimizer.name": "optimizer adamw or sgd" if callable(optimizer) or optimizer == "muon" else "",
        }
        for key, fit in faults.items():
            if fit:
                yield Violation(
                    (f"{name}.engine", f"{name}.{key}"),
                    f"{name}.engine is megatron, which trains all weights, each rank its part of fused matrices, so "
                    f"{key} isn't for it; {name}.{fit} or {name}.engine fsdp would fit",
                )
    if critic is not None and critic.engine == "megatron":
        yield Violation(
            ("critic_model_config.engine",),
            "critic_model_config.engine is megatron, which trains policies, not value models; fsdp would fit",
        )
    if actor.engine == "megatron" and critic is not None and critic.shares is not None:
        yield Violation(
            ("critic_model_config.shares", "actor_model_config.engine"),
            "critic_model_config.shares is actor, but Megatron's actor gives a value head no hidden states; "
            "critic_model_config.shares null or actor_model_config.engine fsdp would fit",
        )
    if actor.engine == "megatron" and cfg.algorithm.recipe.trains == "scorer":
        yield Violation(
            ("actor_model_config.engine", "algorithm.name"),
            f"actor_model_config.engine is megatron, which trains policies, and {cfg.algorithm.name} a reward model; "
            "actor_model_config.engine fsdp would fit",
        )


def _staleness(cfg: RunConfig) -> Iterator[Violation]:
    interval = cfg.hybrid_config.reshard_interval
    if cfg.max_staleness is not None and cfg.max_staleness < interval - 1:
        yield Violation(
            ("max_staleness", "hybrid_config.reshard_interval"),
            f"max_staleness is {cfg.max_staleness} and hybrid_config.reshard_interval is {interval}: rows of the last "
            f"lap before a publish are {interval - 1} laps stale; max_staleness {interval - 1} or "
            f"hybrid_config.reshard_interval {cfg.max_staleness + 1} would fit",
        )


def _rollout(cfg: RunConfig) -> Iterator[Violation]:
    """Keys that an engine needs, and those that it doesn't read."""
    r = cfg.rollout
    servers = r.served
    if servers and not r.url:
        yield Violation(
            ("rollout.url", "rollout.engine"),
            f"rollout.engine is {r.engine} and rollout.url is missing (where the servers are): rollout.url "
            "http://127.0.0.1:8000 or a list of such would fit",
        )
    readers = {"url": servers, "model": r.engine == "openai", "api_key_env": servers, "weights_dir": servers}
    readers |= {"timeout": servers, "cache_gib": r.kind == "native"}
    readers |= dict.fromkeys(("options", "tensor_parallel_size"), r.kind == "vllm")
    for key in ("max_turns", "turn_timeout"):
        if _given(r, key) and r.environment is None:
            yield Violation(
                (f"rollout.{key}", "rollout.environment"),
                f"rollout.{key} is given, but there is no environment that takes turns; leave it out, or "
                "rollout.environment my_game:turn would fit",
            )
    for key, read in readers.items():
        if _given(r, key) and not read:
            whose = {"options": "vllm", "tensor_parallel_size": "vllm", "model": "openai", "cache_gib": "native"}
            which = whose.get(key, "openai or sglang")
            yield Violation(
                (f"rollout.{key}", "rollout.engine"),
                f"rollout.{key} is given, but rollout.engine {r.engine} doesn't read it; leave it out, or "
                f"rollout.engine {which} would fit",
            )
    actor = cfg.actor_model_config
    if r.engine == "sglang" and (actor.use_lora or _holds_adapter(actor)):
        yield Violation(
            ("rollout.engine", "actor_model_config.use_lora"),
            "rollout.engine is sglang, which takes whole weights, but the policy trains an adapter; rollout.engine "
            "vllm or openai would fit",
        )
    if r.outside and (kind := _unlike_lora(actor)):
        yield Violation(
            ("rollout.engine", "actor_model_config.model_name_or_path"),
            f"rollout.engine is {r.engine}, but the adapter in {actor.model_name_or_path} has {kind}: an engine that "
            "has the plain base and plain LoRA would sample another policy; rollout.engine native would fit",
        )
    if r.outside and actor.load_in_4bit:
        yield Violation(
            ("rollout.engine", "actor_model_config.load_in_4bit"),
            f"rollout.engine is {r.engine}, whose base isn't quantised as the trainer's is, so another policy would "
            "sample; rollout.engine native or actor_model_config.load_in_4bit false would fit",
        )
    where = devices_of(cfg.device_map, "rollout")
    if servers and len(where) > 1:
        yield Violation(
            ("rollout.engine", "device_map"),
            f"rollout.engine is {r.engine} and the rollout has {len(where)} devices, each of which would load the same "
            f"servers: they need one worker that asks them; device_map.rollout cpu or {written(where[:1])} would fit",
        )
    if r.outside and not isinstance(cfg.actor_model_config.model_name_or_path, str | None):
        yield Violation(
            ("rollout.engine", "actor_model_config.model_name_or_path"),
            f"rollout.engine is {r.engine}, which reads a model's files, but the model is a loaded module: "
            "rollout.engine native or the model's folder would fit",
        )


def _given(section: Section, key: str) -> bool:
    """Whether the key has another value than its default."""
    return getattr(section, key) != type(section).model_fields[key].get_default(call_default_factory=True)


# Keys about sampling, rewards and the KL penalty, which mean nothing where rows are trained on as they are.
SAMPLING_KEYS = (
    "rollout_batch_size", "group_size", "num_rollout_workers", "rollout", "reward_fn", "reward_weights",
    "reward_model_config", "reward_timeout", "reward_failure", "reward_default", "init_kl_coef", "kl_target",
    "kl_horizon", "kl_sample_rows", "hybrid_engine", "hybrid_config", "max_staleness",
)  # fmt: skip


def _offline(cfg: RunConfig) -> Iterator[Violation]:
    """Algorithms that sample nothing refuse the keys of those that do."""
    algorithm = cfg.algorithm
    if algorithm.recipe.samples:
        return
    given = tuple(key for key in SAMPLING_KEYS if key in cfg.model_fields_set)
    if given:
        yield Violation(
            (*given, "algorithm.name"),
            f"{', '.join(given)}: {algorithm.name} trains on the data set's own rows, nothing is sampled or scored; "
            f"leave out {'it' if len(given) == 1 else 'them'}, or choose an algorithm that samples, such as grpo or "
            "online_dpo",
        )


def _holds_adapter(model: ModelConfig) -> bool:
    """Whether training goes on with an adapter: of a folder, or of a loaded module."""
    source = model.model_name_or_path
    if isinstance(source, str):
        return os.path.isfile(os.path.join(source, "adapter_config.json"))  # False for what is no path, too
    return hasattr(source, "peft_config")


def _unlike_lora(model: ModelConfig) -> str:
    """What of the adapter that training goes on with changes the base, or isn't plain LoRA."""
    source = model.model_name_or_path
    if not isinstance(source, str) or not _holds_adapter(model):
        return ""
    try:
        settings = json.loads(Path(source, "adapter_config.json").read_text())
    except (OSError, ValueError):
        settings = None
    if not isinstance(settings, dict):  # whoever loads it says so
        return ""
    start = settings.get("init_lora_weights")
    changes = isinstance(start, str) and start.lower() not in ("gaussian", "eva", "orthogonal")
    return ", ".join(
        [f"init_lora_weights {start!r}"] * changes
        + [key for key in ("use_dora", "lora_bias", "target_parameters") if settings.get(key)]
    )


def _models(cfg: RunConfig) -> Iterator[Violation]:
    critic, actor, algorithm = cfg.critic_model_config, cfg.actor_model_config, cfg.algorithm
    for key, scorer in cfg.reward_models.items():
        if scorer.model_name_or_path is None:
            yield _missing(f"{key}.model_name_or_path", "the model that scores", "some/model", "models/reward")
    for key in ("actor_model_config", "critic_model_config", "process_reward_model_config"):
        model = getattr(cfg, key)
        if model is not None and model.load_in_4bit and not (model.use_lora or _holds_adapter(model)):
            yield Violation(
                (f"{key}.load_in_4bit", f"{key}.use_lora"),
                f"{key}.load_in_4bit is true and {key}.use_lora is false: 4-bit weights stay as they are, what is "
                f"trained are adapters over them; {key}.use_lora true or {key}.load_in_4bit false would fit",
            )
    if critic is None:
        return
    if not algorithm.needs_critic:
        yield Violation(
            ("critic_model_config", "algorithm.name"),
            f"critic_model_config is given, but {algorithm.name} has no critic; critic_model_config null or "
            "algorithm.name ppo would fit",
        )
    if "dtype" in critic.model_fields_set and critic.dtype != actor.dtype:
        yield Violation(
            ("actor_model_config.dtype", "critic_model_config.dtype"),
            f"actor_model_config.dtype is {actor.dtype} and critic_model_config.dtype is {critic.dtype}: actor and "
            f"critic compute in one dtype; {actor.dtype} or {critic.dtype} for both would fit",
        )
    if critic.shares is not None:
        own = [
            name
            for name, given in (
                ("model_name_or_path", critic.model_name_or_path is not None),
                ("use_lora", critic.use_lora),
            )
            if given
        ]
        for name in own:
            key = f"critic_model_config.{name}"
            yield Violation(
                (key, "critic_model_config.shares"),
                f"{key} is {getattr(critic, name)!s} with critic_model_config.shares {critic.shares}: a head on the "
                f"actor's backbone has no model of its own; leave out {key} or critic_model_config.shares",
            )


def _rewards(cfg: RunConfig) -> Iterator[Violation]:
    count, weights = number_of_rewards(cfg), cfg.reward_weights
    if weights is not None and count and len(weights) != count:
        ones, halves = [1.0] * count, [1.0] + [0.5] * (count - 1)
        yield Violation(
            ("reward_weights", "reward_fn", "reward_model_config"),
            f"reward_weights is {weights}: {len(weights)} weights for {count} rewards (each reward_fn, then the reward "
            f"model); {ones} or {halves if count > 1 else [0.5]} would fit",
        )
