"""What a person should know before the run starts, and what to change when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.algorithm import BUILT_IN, read_only_by
from verl.config.batch_words import words_of
from verl.config.devices import cores, devices_of, workers
from verl.config.rules import roles_of
from verl.config.run import RunConfig

MOST_WORKERS_PER_CORE = 1.5


def notes(cfg: RunConfig) -> list[str]:
    """Lines for the start of a run: what a lap is made of, which worker hosts what, who samples, then warnings."""
    return [*_batch(cfg), *_workers(cfg), *_engine(cfg), *(f"warning: {line}" for line in _warnings(cfg))]


def memory_advice(cfg: RunConfig) -> str:
    """What to change when memory runs out; the mini-batch stays, so the training does too."""
    micro, mini = cfg.micro_batch_size, cfg.mini_batch_size
    tips: list[str] = []
    words = words_of(cfg)
    least = 2 if words.whole_groups else words.unit or 1  # rows that stay together
    fit = [d for d in range(least, micro // 2 + 1) if mini % d == 0 and d % (words.unit or 1) == 0]
    if fit:
        less = max(fit)
        tips.append(
            f"micro_batch_size={less} gradient_accumulation_steps={mini // less} instead of {micro}, {mini // micro} "
            f"(the same training: an optimizer step keeps its {mini} rows)"
        )
    if not cfg.gradient_checkpointing:
        tips.append("gradient_checkpointing=true (the same training, slower)")
    if cfg.rollout.max_rows > 1 and cfg.algorithm.recipe.samples:
        tips.append(f"while generating: rollout.max_rows={cfg.rollout.max_rows // 2} instead of {cfg.rollout.max_rows}")
    if not cfg.actor_model_config.use_lora:
        tips.append("actor_model_config.use_lora=true (another training: only adapters learn)")
    tips.append(f"max_response_length={max(cfg.max_response_length // 2, 1)} instead of {cfg.max_response_length}")
    return "out of memory; in this order, try: " + "; ".join(tips)


def _batch(cfg: RunConfig) -> list[str]:
    train, rollout, group, mini = cfg.train_batch_size, cfg.rollout_batch_size, cfg.group_size, cfg.mini_batch_size
    steps, epochs = train // mini, cfg.algorithm.update_epochs
    if cfg.algorithm.recipe.samples:
        sampled = f"{_count(rollout // group, 'prompt')} x {_count(group, 'response')}"
        lap = f"{_count(train // rollout, 'rollout')} of {rollout} rows ({sampled})"
    else:
        lap = _count(train // group, "pair") if group == 2 else "rows of the data set"
    forwards = f"{_count(cfg.gradient_accumulation_steps, 'micro-batch')} of {cfg.micro_batch_size} rows"
    passes = f" ({steps} x {epochs} passes)" if epochs > 1 else ""
    taken = f"{_count(steps * epochs, 'step')} per lap{passes}"
    return [
        f"a lap: {train} rows = {lap}",
        f"an optimizer step: {mini} rows over all devices = {forwards}; {taken}",
    ]


def _actor_is_anywhere(cfg: RunConfig) -> bool:
    """Whether only the machine tells how many devices there are: some roles are placed, the actor isn't."""
    return bool(cfg.device_map) and "actor" not in cfg.device_map


def _workers(cfg: RunConfig) -> list[str]:
    """Nothing where there is one worker."""
    if _actor_is_anywhere(cfg):
        return ["device_map has no actor: it, and what has no entry either, is on the first GPU, else on cpu"]
    hosted = workers(cfg.device_map, roles_of(cfg))
    if len(hosted) < 2:
        return []
    listed = (f"{rank} on {device}: {', '.join(roles)}" for rank, (device, roles) in enumerate(hosted.items()))
    return [f"{len(hosted)} workers: {'; '.join(listed)}"]


def _engine(cfg: RunConfig) -> list[str]:
    """Nothing where nothing is sampled."""
    r = cfg.rollout
    if not cfg.algorithm.recipe.samples:
        return []
    why = {
        "native": "it needs no package, and no second copy where a worker holds the actor whole",
        "vllm": "native computes on one device, and rollout.tensor_parallel_size is above 1",
    }
    auto = f" (rollout.engine auto: {why.get(r.kind)})" if r.engine == "auto" else ""
    told = f"rows are sampled by {r.kind}{auto}"
    count, width = len(devices_of(cfg.device_map, "rollout")), r.tensor_parallel_size
    if width > 1:
        told += f", {_count(count // width, 'engine')} on {width} devices{' each' if count > width else ''}"
    elif count > 1:
        told += f", an engine on each of {count} devices"
    if r.environment is not None:
        name = r.environment if isinstance(r.environment, str) else getattr(r.environment, "__name__", "a function")
        told += f"; {name} answers them, {_count(r.max_turns, 'message')} at most"
    return [told]


def _count(n: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{n} {what}{plural if n != 1 else ''}"


def _warnings(cfg: RunConfig) -> list[str]:
    found: list[str] = []
    rollout, algorithm = cfg.rollout, cfg.algorithm
    for key, value, off in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0)):
        if value != off:
            found.append(
                f"rollout.{key} is {value:g}: responses come from a renormalised density, which the trainer does not "
                f"recompute, so ratio and KL are off from the start; {key} {off:g} samples the density that is trained"
            )
    if cfg.num_rollout_workers > MOST_WORKERS_PER_CORE * (n := cores()):
        found.append(
            f"num_rollout_workers is {cfg.num_rollout_workers}, more than {MOST_WORKERS_PER_CORE} x the {n} cores: "
            "they will wait for each other"
        )
    plain = type(algorithm)(name=algorithm.name).filled
    for key, readers in read_only_by().items():
        value = getattr(algorithm, key)
        if algorithm.name in BUILT_IN and algorithm.name not in readers and value != getattr(plain, key):
            some = ", ".join(readers[:5]) + (", ..." if len(readers) > 5 else "")
            found.append(f"algorithm.{key} is {value}, but {algorithm.name} doesn't read it ({some} does)")
    others = (
        ("teacher_model_config", "teacher", "distill"),
        ("process_reward_model_config", "process_reward", "prime"),
    )
    for key, need, reader in others:
        if getattr(cfg, key) is not None and need not in algorithm.recipe.needs:
            found.append(f"{key} is given, but {algorithm.name} doesn't read it ({reader} does)")
    roles = {"actor_model_config": cfg.actor_model_config, "critic_model_config": cfg.critic_model_config}
    for role, model in roles.items():
        if model is None:
            continue
        lora = ("lora_r", "lora_alpha", "lora_target_modules")
        unread = [key for key in lora if getattr(model, key) != type(model).model_fields[key].default]
        if unread and not model.use_lora:
            found.append(f"{role}.{', '.join(unread)} without use_lora: no adapters are made")
        fsdp, alone = model.fsdp_config, len(devices_of(cfg.device_map, role.removesuffix("_model_config"))) < 2
        if alone and fsdp.sharding_strategy not in ("NO_SHARD", type(fsdp).model_fields["sharding_strategy"].default):
            found.append(
                f"{role}.fsdp_config.sharding_strategy is {fsdp.sharding_strategy}: on one device nothing is sharded"
            )
        if fsdp.shard_size is not None and fsdp.sharding_strategy != "HYBRID_SHARD":
            found.append(
                f"{role}.fsdp_config.shard_size is {fsdp.shard_size}, which only HYBRID_SHARD reads; the strategy is "
                f"{fsdp.sharding_strategy}"
            )
        steps, warmup = _optimizer_steps(cfg), model.optimizer.warmup_steps
        if steps is not None and warmup >= steps:
            found.append(
                f"{role}.optimizer.warmup_steps is {warmup}, and the run has {_count(steps, 'optimizer step')}: lr is "
                f"reached {'in the last one' if warmup == steps else 'in none'}"
            )
    found += [*_of_devices(cfg), *_unread(cfg), *_alarms(cfg)]
    if cfg.eval.every_steps and cfg.eval.dataset is None:
        found.append(f"eval.every_steps is {cfg.eval.every_steps} without eval.dataset: nothing is evaluated")
    return found


def _optimizer_steps(cfg: RunConfig) -> int | None:
    """Of the whole run, where the laps are known."""
    if cfg.total_steps is None:
        return None
    return cfg.total_steps * (cfg.train_batch_size // cfg.mini_batch_size) * cfg.algorithm.update_epochs


def _unread(cfg: RunConfig) -> Iterator[str]:
    """Keys with a value of their own beside another that keeps them from being read."""
    sections = {"": cfg, "algorithm.": cfg.algorithm, "eval.": cfg.eval}
    samples = cfg.algorithm.recipe.samples
    for section, key, without, missing in (
        ("", "kl_horizon", "kl_target", samples and cfg.kl_target is None),
        ("", "reward_default", "reward_failure default", samples and cfg.reward_failure != "default"),
        ("algorithm.", "max_refills", "dynamic_sampling", samples and not cfg.algorithm.dynamic_sampling),
        ("eval.", "limit", "eval.dataset", cfg.eval.dataset is None),
        ("eval.", "columns", "eval.dataset", cfg.eval.dataset is None),
    ):
        value, field = getattr(sections[section], key), type(sections[section]).model_fields[key]
        if missing and value != field.default:
            yield f"{section}{key} is {value} without {without}: nothing reads it"


def _alarms(cfg: RunConfig) -> Iterator[str]:
    """Limits of metrics that the algorithm never logs."""
    recipe, name = cfg.algorithm.recipe, cfg.algorithm.name
    logged = dict.fromkeys(("reward", "extra", "kl", "rollout", "response", "generate", "correction"), recipe.samples)
    logged |= {"critic": "values" in recipe.needs, "distill": "teacher" in recipe.needs, "sft": name == "sft"}
    logged |= {"process_reward": "process_reward" in recipe.needs}
    logged |= {"preference": recipe.pairs_sampled or recipe.data in ("pairs", "labelled")}
    for key in ("alarms", "alarms_below"):
        for metric in getattr(cfg.metrics, key) if name in BUILT_IN else ():
            if not logged.get(metric.partition("/")[0], True):
                yield f"metrics.{key} has a limit for {metric}, which {name} never logs"


def _of_devices(cfg: RunConfig) -> list[str]:
    there, cluster = roles_of(cfg), cfg.cluster
    found = [
        f"device_map.{role} is given, but {cfg.algorithm.name} as it is set runs no {role}: nothing is put there"
        for role in cfg.device_map
        if role not in there
    ]
    if cluster.backend == "local" and cluster.address is not None:
        found.append(f"cluster.address is {cluster.address}, which only cluster.backend ray reads")
    alone = len(workers(cfg.device_map, there)) < 2 and not _actor_is_anywhere(cfg)
    if cluster.backend == "local" and cluster.max_restarts and alone:
        found.append(
            f"cluster.max_restarts is {cluster.max_restarts}, but the one worker is this process: nobody starts it anew"
        )
    return found
