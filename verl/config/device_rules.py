"""Rules about devices: what an entry of ``device_map`` may name, how a model and rows divide over its devices."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from verl.config import batch_words
from verl.config.devices import MOST, Device, devices_of, entry_of, parse, workers, written
from verl.config.model import CriticConfig, FsdpConfig, ModelConfig
from verl.config.run import RunConfig

Found = tuple[tuple[str, ...], str]
"""The keys that a broken rule speaks of, and what it says."""


def faults(cfg: RunConfig, roles: Collection[str]) -> Iterator[Found]:
    """Every broken rule. ``roles``: those that the run has."""
    yield from _entries(cfg)
    yield from _spread(cfg, roles)
    if "rollout" in roles:
        yield from _engines(cfg)
    yield from _rows_for_all(cfg, roles)
    yield from modules(cfg, len(workers(cfg.device_map, roles)))


def _entries(cfg: RunConfig) -> Iterator[Found]:
    """What an entry may name."""
    for role, place in cfg.device_map.items():
        devices = parse(place)
        if cfg.cluster.backend == "local" and any(d.node for d in devices):
            here = written([Device(d.kind, i) for i, d in enumerate(devices)])
            yield (
                ("device_map", "cluster.backend"),
                f"device_map.{role} is {written(devices)}: nodes and labels are those of a cluster, it needs "
                f"cluster.backend ray; cluster.backend ray or device_map.{role} {here} would fit",
            )
    critic = cfg.critic_model_config
    if critic is not None and critic.shares == "actor" and "critic" in cfg.device_map:
        actors, own = devices_of(cfg.device_map, "actor"), devices_of(cfg.device_map, "critic")
        if actors != own:
            where = f"the actor is on {written(actors)}" if actors else "the actor has no entry"
            yield (
                ("device_map", "critic_model_config.shares"),
                f"device_map.critic is {written(own)} and {where}, but critic_model_config.shares is actor: a head on "
                f"the actor's backbone is where that is; leave out device_map.critic or set device_map.actor "
                f"{written(own)}",
            )


def _spread(cfg: RunConfig, roles: Collection[str]) -> Iterator[Found]:
    """How a role's devices share its model."""
    seen: set[tuple[str | None, int, bool]] = set()  # roles that follow another with its settings say nothing new
    for role in roles:
        section, model = _section(cfg, role)
        same = (entry_of(cfg.device_map, role), id(model and model.fsdp_config), bool(model and model.load_in_4bit))
        if model is None or same in seen:
            continue
        seen.add(same)
        devices = devices_of(cfg.device_map, role)
        count, fsdp, key = max(len(devices), 1), model.fsdp_config, f"{section}.fsdp_config"
        tp, size = fsdp.tensor_parallel_size, fsdp.shard_size
        has = f"the {role} has {count} device{'s' if count > 1 else ''}"
        if (uneven := _uneven(role, devices, key, fsdp, has)) is not None:
            yield uneven
        elif fsdp.sharding_strategy == "HYBRID_SHARD" and model.engine == "fsdp":
            ranks = count // tp
            shares = [d for d in range(1, ranks) if ranks % d == 0]
            if size not in shares:
                near = _nearest(shares, size or ranks)
                fits = [f"{key}.shard_size {' or '.join(map(str, near))}"] if near else []
                others = ("FULL_SHARD", "NO_SHARD")[: 2 - len(near)]
                fits += [f"{key}.sharding_strategy {' or '.join(others)}"] if others else []
                given = "needs its shard_size" if size is None else f"has shard_size {size}"
                apart = f", {ranks} of them data parallel" if tp > 1 else ""
                yield (
                    (f"{key}.sharding_strategy", f"{key}.shard_size", "device_map"),
                    f"{key}.sharding_strategy HYBRID_SHARD {given}, ranks that share one of several copies, and {has}"
                    f"{apart}: it must divide these and be fewer; {' or '.join(fits)} would fit",
                )
        if model.engine == "megatron" and count == 1:
            yield (
                (f"{section}.engine", "device_map"),
                f"{section}.engine is megatron, which spreads a model over devices, and {has}; {section}.engine fsdp "
                f"or device_map.{role} {_first(devices, 2)} would fit",
            )
        if fsdp.cpu_offload and devices and all(d.kind == "cpu" for d in devices):
            yield (
                (f"{key}.cpu_offload", "device_map"),
                f"{key}.cpu_offload is true, but the {role} is on {written(devices)}, whose memory is the CPU's "
                f"already; {key}.cpu_offload false or device_map.{role} 0 would fit",
            )
        if model.load_in_4bit and count > 1 and (fsdp.sharding_strategy != "NO_SHARD" or tp > 1):
            yield (
                (f"{section}.load_in_4bit", f"{key}.sharding_strategy", f"{key}.tensor_parallel_size", "device_map"),
                f"{section}.load_in_4bit is true and {has}: 4-bit weights stay whole on each device; "
                f"{key}.sharding_strategy NO_SHARD{f' with {key}.tensor_parallel_size 1' if tp > 1 else ''} or "
                f"device_map.{role} {written(devices[:1])} would fit",
            )


def _engines(cfg: RunConfig) -> Iterator[Found]:
    """How rollout engines share their devices."""
    width, devices = cfg.rollout.tensor_parallel_size, devices_of(cfg.device_map, "rollout")
    count, keys = max(len(devices), 1), ("rollout.tensor_parallel_size", "device_map")
    entry = entry_of(cfg.device_map, "rollout") or "rollout"
    if count % width:
        near = _nearest([d for d in range(1, count + 1) if count % d == 0], width)
        yield (
            keys,
            f"rollout.tensor_parallel_size is {width}, but the rollout has {count} device{'s' if count > 1 else ''}: "
            f"it must divide them; rollout.tensor_parallel_size {' or '.join(map(str, near))} or device_map.{entry} "
            f"{_first(devices, -(-count // width) * width)} would fit",
        )
        return
    for first in range(0, len(devices), width):
        together = devices[first : first + width]
        if len({d.node for d in together}) > 1:
            yield (
                keys,
                f"rollout.tensor_parallel_size is {width}, and {written(together)}, which would share an engine, are "
                f"of different nodes; rollout.tensor_parallel_size 1 or device_map.{entry} "
                f"{_first(together[:1], width)} would fit",
            )
            return


def _uneven(role: str, devices: list[Device], key: str, fsdp: FsdpConfig, has: str) -> Found | None:
    """Devices that don't divide by those that compute the same rows."""
    block, before = 1, list[str]()
    for axis in ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"):
        asked, room = getattr(fsdp, axis), max(len(devices), 1) // block
        if room % asked:
            near = _nearest([d for d in range(1, room + 1) if room % d == 0], asked)
            times = f"times {' and '.join(before)} " if before else ""
            few = len(near) == 1 and block * asked <= MOST
            more = f" or device_map.{role} {_first(devices, block * asked)}" if few else ""
            return (
                (f"{key}.{axis}", "device_map"),
                f"{key}.{axis} is {asked}, but {has}: {times}it must "
                f"divide them; {key}.{axis} {' or '.join(map(str, near))}{more} would fit",
            )
        block *= asked
        before += [f"{axis} {asked}"] if asked > 1 else []
    return None


def _nearest(sizes: list[int], asked: int) -> list[int]:
    """The two of ``sizes`` that are nearest to what was asked."""
    return sorted(sorted(sizes, key=lambda size: abs(size - asked))[:2])


def _section(cfg: RunConfig, role: str) -> tuple[str, ModelConfig | None]:
    """The section that says how a role's model is spread, and its name; None: the role's model isn't."""
    actor, critic, judge = cfg.actor_model_config, cfg.critic_model_config, cfg.process_reward_model_config
    if role == "critic":
        return "critic_model_config", None if critic is not None and critic.shares else critic or CriticConfig()
    if role == "process_reward":
        own = {} if judge is None else {key: getattr(judge, key) for key in judge.model_fields_set}
        return "process_reward_model_config", actor.model_copy(update=own)
    if role == "teacher":
        return "teacher_model_config", cfg.teacher_model_config
    return "actor_model_config", actor if role in ("actor", "reference") else None


def _first(devices: list[Device], count: int) -> str:
    """``count`` devices, the first ones of ``devices`` and what follows these, as a setting."""
    last = devices[-1] if devices else Device("cuda", 0)
    more = [Device(last.kind, last.index + 1 + i, last.node) for i in range(count - max(len(devices), 1))]
    return written([*(devices or [last])[:count], *more])


def _rows_for_all(cfg: RunConfig, roles: Collection[str]) -> Iterator[Found]:
    """No device goes without rows: each gets a part of every rollout, or of every optimizer step."""
    words = batch_words.words_of(cfg)
    if batch_words.faults(words):
        return  # the sizes mean nothing yet
    unit, what = (words.unit or 1), "pair" if words.unit == 2 else "row"
    if words.whole_groups:
        unit, what = words.group_size, "group"
    seen: set[tuple[str, tuple[str, ...]]] = set()
    for role in roles:
        entry, sampling = entry_of(cfg.device_map, role), role in ("rollout", "reward_model")
        if entry is None:
            continue
        model = _section(cfg, role)[1]
        fsdp = model.fsdp_config if model is not None else FsdpConfig()
        # devices that compute the same rows
        alike = fsdp.tensor_parallel_size * fsdp.context_parallel_size * fsdp.pipeline_parallel_size
        if role == "rollout":
            alike = cfg.rollout.tensor_parallel_size
        devices = devices_of(cfg.device_map, role)
        rows, each, name = (words.rollout_batch_size, 1, "row") if sampling else (words.mini, unit, what)
        have, ranks = rows // each, len(devices) // alike
        if ranks <= have:
            continue
        fits = [f"device_map.{entry} {written(devices[: have * alike])}"]
        more = _more_rows(words, ranks * each, sampling)
        if more is not None:
            fits.append(more)
        elif have > 1:
            fits.append(written(devices[:alike]))
        if (entry, tuple(fits)) in seen:
            continue
        seen.add((entry, tuple(fits)))
        who = "" if role == entry else f" (where the {role} is)"
        yield (
            ("device_map", *batch_words.KEYS),
            f"device_map.{entry}{who} names {len(devices)} devices{f', {alike} to a row' if alike > 1 else ''}, but "
            f"{'a rollout' if sampling else 'an optimizer step'} has {have} {name}{'s' if have > 1 else ''}: some "
            f"would never get one; {' or '.join(fits)} would fit",
        )


def _more_rows(words: batch_words.BatchWords, least: int, of_rollout: bool) -> str | None:
    """The nearest multiple of one size with which a rollout, or an optimizer step, has at least so many rows."""
    for key in ("rollout_batch_size",) if of_rollout else reversed(batch_words.KEYS):
        now = getattr(words, key)
        if now is None or key == "group_size" or (key == "rollout_batch_size" and words.unit):
            continue
        for value in range(2 * now, 2 * least + now + 1, now):
            changed: dict[str, Any] = {key: value}
            more = replace(words, **changed)
            if (value if of_rollout else more.mini) >= least and not batch_words.faults(more):
                return f"{key} {value}"
    return None


def modules(cfg: RunConfig, count: int) -> Iterator[Found]:
    """Each worker loads for itself, by name."""
    models = {
        "actor_model_config": cfg.actor_model_config,
        "critic_model_config": cfg.critic_model_config,
        **cfg.reward_models,
        "teacher_model_config": cfg.teacher_model_config,
        "process_reward_model_config": cfg.process_reward_model_config,
    }
    for section, model in models.items():
        source = model.model_name_or_path if model is not None else None
        if count > 1 and source is not None and not isinstance(source, str):
            key = f"{section}.model_name_or_path"
            yield (
                (key, "device_map"),
                f"{key} is a loaded {type(source).__name__}, but device_map makes {count} workers, each of which loads "
                f"for itself: give its name or folder, such as {key} gpt2 or models/mine, or name one device for all",
            )
