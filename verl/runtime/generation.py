"""Which engine samples: the one place that knows the classes behind ``rollout.engine``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from verl.config.errors import RequestError
from verl.config.model import ModelConfig
from verl.config.run import RunConfig
from verl.data.chat import has_template
from verl.models.adapters import base_of, is_adapter_folder, lora_config, settings_of
from verl.models.factory import end_ids, eos_ids, outline
from verl.models.naming import aliases
from verl.models.packing import ATTENTION
from verl.models.policy import Policy
from verl.rollout.base import RolloutEngine
from verl.rollout.cache import Budget, bytes_per_token
from verl.rollout.native import NativeEngine
from verl.workers.environment import Environment, EpisodeWorker
from verl.workers.rollout import RolloutWorker


def environment_of(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Environment | None:
    """What answers the policy; ``RequestError`` where it can't."""
    r = cfg.rollout
    if r.environment is None:
        return None
    if not has_template(tokenizer):
        raise RequestError(
            "rollout.environment needs a chat template, which says how turns are written; the tokenizer has none"
        )
    return Environment(r.environment, r.turn_timeout)


def rollout_worker(
    cfg: RunConfig, engine: RolloutEngine, environment: Environment | None, tokenizer: PreTrainedTokenizerBase
) -> RolloutWorker:
    """Samples rows; with an environment, episodes. The native engine computes those in step, so that runs stay the
    same to the bit, as what it computes together is fixed for as long as it takes."""
    if environment is None:
        return RolloutWorker(engine)
    return EpisodeWorker(engine, environment, tokenizer, cfg.rollout.max_turns, together=not cfg.rollout.outside)


def check_cache(cfg: RunConfig, dtype: torch.dtype) -> None:
    """``RequestError`` where ``rollout.cache_gib`` is too small for one row: from the model's configuration alone,
    before weights are read. What computes nothing without weights is left to the engine, which checks again."""
    source, trust = cfg.actor_model_config.model_name_or_path, cfg.actor_model_config.trust_remote_code
    if cfg.rollout.cache_gib is None or not isinstance(source, str):
        return
    base = base_of(source) if is_adapter_folder(source) else source
    try:
        lm = outline(base, trust, dtype=dtype, attn_implementation=ATTENTION)
        with torch.device("meta"):
            per_token = bytes_per_token(Policy(lm))
    except (NotImplementedError, RuntimeError):
        return
    Budget(cfg.rollout.cache_gib, per_token).check(cfg.max_prompt_length + cfg.max_response_length)


def rollout_engine(
    cfg: RunConfig, policy: Policy | None, tokenizer: PreTrainedTokenizerBase, device: torch.device, dtype: torch.dtype,
    gpus: Sequence[str] = (),
) -> RolloutEngine:  # fmt: skip
    """What samples on a host. ``policy``: whose parameters the native engine generates with; ``gpus``: the numbers of
    those that share an engine, as the machine has them.

    Raises:
        RequestError: a missing key or package, or settings that the engine refuses.
    """
    r, actor = cfg.rollout, cfg.actor_model_config
    if not r.outside:
        assert policy is not None
        return NativeEngine(
            policy, eos_ids(policy.lm, tokenizer), r.max_rows, tokenizer, cache_gib=r.cache_gib,
            max_tokens=cfg.max_prompt_length + cfg.max_response_length,
        )  # fmt: skip
    source = actor.model_name_or_path
    assert isinstance(source, str)  # the configuration's rules see to it
    adapter = _adapter(actor)
    model = base_of(source) if is_adapter_folder(source) else source
    ends = _ends(model, tokenizer, actor.trust_remote_code)
    if r.kind == "vllm":
        from verl.rollout.vllm import VllmEngine

        return VllmEngine(
            model, ends, tokenizer, device=device, dtype=dtype, max_rows=r.max_rows,
            max_tokens=cfg.max_prompt_length + cfg.max_response_length, seed=cfg.seed, adapter=adapter,
            trust_remote_code=actor.trust_remote_code, options=r.options,
            tensor_parallel_size=r.tensor_parallel_size, gpus=gpus,
        )  # fmt: skip
    key = os.environ.get(r.api_key_env) if r.api_key_env else None
    if r.api_key_env and key is None:
        raise RequestError(f"rollout.api_key_env names {r.api_key_env}, which the environment doesn't have")
    common: Any = {
        "model": r.model, "api_key": key, "timeout": r.timeout, "max_rows": r.max_rows, "folder": r.weights_dir,
    }  # fmt: skip
    urls = [r.url] if isinstance(r.url, str) else list(r.url or ())
    if r.engine == "openai":
        from verl.rollout.vllm_server import ServerEngine

        tied = aliases(outline(model, actor.trust_remote_code)) if adapter is None else None
        return ServerEngine(urls, ends, adapter=adapter, tied=tied, **common)
    from verl.rollout.sglang import SglangEngine

    return SglangEngine(urls, ends, **common)


def _adapter(cfg: ModelConfig) -> dict[str, Any] | None:
    """peft's configuration of the policy's adapter, as a file has it."""
    source = cfg.model_name_or_path
    if is_adapter_folder(source):
        return settings_of(source)
    return lora_config(cfg).to_dict() if cfg.use_lora else None


def _ends(model: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool) -> frozenset[int]:
    """As ``eos_ids``, of a model that isn't loaded."""
    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    try:
        generation = GenerationConfig.from_pretrained(model)
    except OSError:
        generation = None
    return end_ids(tokenizer, config, generation)
