"""Configurations that several tests share."""

from __future__ import annotations

from typing import Any

import pytest

from verl.config.errors import ConfigError
from verl.config.load import load_config
from verl.config.run import RunConfig

README_FILE = """\
rollout_batch_size: 128
train_batch_size: 512
micro_batch_size: 32
gradient_accumulation_steps: 4
num_rollout_workers: 4                 # default 1
max_prompt_length: 200
max_response_length: 256
init_kl_coef: 0.1
actor_model_config: {model_name_or_path: meta-llama/Llama-2-7b-hf, use_lora: true, lora_r: 64}
reward_model_config:
  {model_name_or_path: OpenAssistant/reward-model-deberta-v3-large, trainable: false, micro_batch_size: 64}
dataset: data/prompts.jsonl
algorithm: {name: ppo}
"""
SIBLINGS = {
    "bigger": """\
rollout_batch_size: 256
train_batch_size: 1024
micro_batch_size: 16
gradient_accumulation_steps: 4
num_rollout_workers: 6
max_prompt_length: 128
max_response_length: 192
actor_model_config: {model_name_or_path: some/policy, fsdp_config: {sharding_strategy: FULL_SHARD, cpu_offload: false}}
reward_model_config: {model_name_or_path: some/reward}
dataset: data/prompts.jsonl
algorithm: {name: ppo}
""",
    "smaller": """\
rollout_batch_size: 64
train_batch_size: 256
micro_batch_size: 8
gradient_accumulation_steps: 4
num_rollout_workers: 2
max_prompt_length: 96
max_response_length: 128
actor_model_config: {model_name_or_path: some/policy, use_lora: true, lora_r: 32}
reward_model_config: {model_name_or_path: some/reward}
dataset: data/prompts.jsonl
algorithm: {name: ppo}
""",
}


def load(**values: Any) -> RunConfig:
    """A configuration that lacks nothing, with ``values`` in place."""
    given = {
        "actor_model_config": {"model_name_or_path": "some/policy"},
        "dataset": "data/prompts.jsonl",
        "reward_fn": "my_rewards:score",
    }
    return load_config(None, **(given | values))


def refusal(**values: Any) -> str:
    """The message with which ``load(**values)`` is refused."""
    with pytest.raises(ConfigError) as caught:
        load(**values)
    return str(caught.value)
