"""What a checkpoint remembers of the request behind it, and what of that is another now."""

from __future__ import annotations

import copy
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from verl.config.load import dump
from verl.config.run import RunConfig
from verl.data import chat
from verl.models.stored import mark

# Where a run writes, how long it is and what it runs on: none of it changes what a step computes. Data, template and
# tokenizer are compared by their content.
FREE = {
    *("run_dir", "total_steps", "total_epochs", "eval", "checkpoint", "metrics", "cluster", "device_map", "log_level"),
    *("micro_batch_size", "max_tokens_per_micro_batch", "gradient_checkpointing", "num_rollout_workers"),
    *("rollout.url", "rollout.timeout", "rollout.api_key_env", "rollout.weights_dir", "rollout.cache_gib"),
    *("hybrid_engine", "hybrid_config.bucket_mib", "hybrid_config.incremental"),
    *("dataset", "columns", "dataset_cache_dir", "reward_timeout", "rollout.max_rows", "rollout.tensor_parallel_size"),
    *(
        f"{model}_model_config.{key}"
        for model in ("actor", "critic", "reward", "teacher", "process_reward")
        for key in ("engine", "fsdp_config")
    ),
}

MODELS = (
    *("actor_model_config", "critic_model_config", "reward_model_config", "teacher_model_config"),
    "process_reward_model_config",
)


def fingerprint(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, data: str, rows: str) -> dict[str, Any]:
    """Plain JSON. ``data``: the data set's own mark; ``rows``: that of its tokenised rows."""
    words = copy.copy(tokenizer)
    words.chat_template = None
    template = hashlib.sha256(repr(tokenizer.chat_template).encode()).hexdigest()
    named = {key: getattr(getattr(cfg, key), "model_name_or_path", None) for key in MODELS}
    return {
        "data": data, "template": template, "tokenizer": chat.fingerprint(words), "rows": rows, "config": dump(cfg),
        "models": {key: mark(name) for key, name in named.items() if isinstance(name, str)}, "code": _code(cfg),
    }  # fmt: skip


def _code(cfg: RunConfig) -> dict[str, str]:
    """Of what ``module:function`` names, the mark of its file; of what can't be found nothing, which others tell."""
    entries = cfg.reward_fn if isinstance(cfg.reward_fn, list) else [cfg.reward_fn]
    specs = [("reward_fn", entry.get("name") if isinstance(entry, Mapping) else entry) for entry in entries]
    found = {}
    for key, spec in (*specs, ("rollout.environment", cfg.rollout.environment)):
        module, _, name = spec.partition(":") if isinstance(spec, str) else ("", "", "")
        if name and (file := _file(module)) and file.is_file():
            found[f"{key} {spec}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def _file(module: str) -> Path | None:
    """A module's file, looked for as an import would, but nothing is run."""
    path: Any = [os.getcwd(), *sys.path]
    origin = None
    for name in module.split("."):
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return None
        path, origin = spec.submodule_search_locations, spec.origin if spec.has_location else None
    return Path(origin) if origin else None


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two fingerprints, for people; ``data`` stands first. None: nothing does."""
    names = {"data": "the data set", "template": "the chat template", "tokenizer": "the tokenizer"}
    found = [name for key, name in names.items() if saved[key] != now[key]]
    marks = [(key, was, now["models"].get(key)) for key, was in saved.get("models", {}).items()]
    found += [f"the files of {key}.model_name_or_path" for key, was, new in marks if was and new and was != new]
    code = now.get("code", {})
    found += [f"the file of {what}" for what, was in saved.get("code", {}).items() if code.get(what, was) != was]
    found += _settings(yaml.safe_load(saved["config"]), yaml.safe_load(now["config"]))
    return found or ([] if saved["rows"] == now["rows"] else ["how rows become tokens"])


def _settings(saved: Mapping[str, Any], now: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Keys with another value. A key that one side lacks is one that its version of this package didn't have."""
    for key in (key for key in saved if key in now):
        name, old, new = above + key, saved[key], now[key]
        if name in FREE:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _settings(old, new, f"{name}.")
        elif old != new:
            yield f"{name} ({_shown(old)} then, {_shown(new)} now)"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "set"
    return "null" if value is None else str(value) if len(str(value)) < 60 else f"{str(value)[:57]}..."
