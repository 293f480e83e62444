"""Mistyped keys, rules in words, and the page of all keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.config.samples import load, refusal
from verl.config import schema
from verl.config.load import load_config
from verl.config.reference import reference
from verl.config.run import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("ppo_mini_batchsize", "mini_batch_size"),
        ("rollout_batchsize", "rollout_batch_size"),
        ("gamma", "algorithm.gamma"),
        ("temperature", "rollout.temperature"),
        ("lr", "actor_model_config.optimizer.lr"),
        ("rollout.temprature", "rollout.temperature"),
        ("rollout.gamma", "algorithm.gamma"),
        ("critic_model_config.optimizer.learning_rate", "critic_model_config.optimizer.lr"),
        ("actor_model_config.fsdp_config.shard_strategy", "actor_model_config.fsdp_config.sharding_strategy"),
        ("reward_model", "reward_model_config"),
        ("learning_rate", "actor_model_config.optimizer.lr"),
        ("lora_target_module", "actor_model_config.lora_target_modules"),
        ("actor_model_config.lora_rank", "actor_model_config.lora_r"),
    ],
)
def test_unknown_key_names_the_nearest(typed, meant):
    *sections, leaf = typed.split(".")
    values: dict = {leaf: 1}
    for section in reversed(sections):
        values = {section: values}
    if "actor_model_config" in values:
        values["actor_model_config"]["model_name_or_path"] = "m"
    text = refusal(**values)
    assert text.startswith("1 setting is wrong")
    assert f"{typed} is not a key; did you mean " in text
    assert text.endswith(f"{meant}?")


@pytest.mark.parametrize(("path", "field"), [(p, f) for p, f in schema.every_key() if not schema.section_of(f)])
def test_every_key_is_described_and_its_examples_are_accepted(path, field):
    assert field.description
    assert schema.rule(field)
    for setting in schema.valid_settings(field):
        values: dict = {path[-1]: setting}
        if path[-1] == "load_in_4bit":
            values["use_lora"] = True  # what is trained over a 4-bit base
        if path[:1] == ("rollout",) and path[-1] in SERVERS:
            values = {"engine": "openai", "url": "http://h:1"} | values
            if values["engine"] not in ("openai", "sglang"):
                del values["url"]
        if path[-1] in ("max_turns", "turn_timeout"):
            values["environment"] = "my_game:turn"
        if path == ("rollout", "options"):
            values["engine"] = "vllm"
        for section in reversed(path[:-1]):
            values = {section: values}
        if path[-1] == "pipeline_parallel_size":
            values[path[0]]["engine"] = "megatron"
        if path[-1] in ("engine", "tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"):
            values["device_map"] = {"actor": [0, 1]}
        load_config(None, partial=True, **values) if path[0] not in LINKED else RunConfig.model_validate(values)


SERVERS = ("engine", "url", "model", "api_key_env", "timeout", "weights_dir")  # under rollout


# Keys that a rule ties to others: a setting that is valid by itself need not fit the rest.
LINKED = {
    "train_batch_size", "mini_batch_size", "micro_batch_size", "gradient_accumulation_steps", "group_size", "algorithm",
    "max_tokens_per_micro_batch", "reward_model_config", "critic_model_config", "reward_weights", "rollout_batch_size",
}  # fmt: skip


def test_page_is_up_to_date():
    assert PAGE.read_text() == reference(), "run: python -m verl.config.reference docs/configuration.md"


def test_the_pages_example_loads():
    example = PAGE.read_text().partition("```yaml\n")[2].partition("```")[0]
    values = OmegaConf.to_container(OmegaConf.create(example))
    assert load(**values).reward_fn == ["my_rewards:score"]
