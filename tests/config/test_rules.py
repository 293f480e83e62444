"""Rules between keys other than sizes."""

from __future__ import annotations

import json
import re

import pytest
from omegaconf import OmegaConf

from tests.config.samples import load, refusal
from tests.engine_table import REFUSED
from verl.config.errors import ConfigError
from verl.config.load import load_config

BOTH_FIT = "algorithm.clip_ratio 0.2, or algorithm.clip_ratio_low 0.2 with algorithm.clip_ratio_high 0.28, would fit"
GRPO = {"name": "grpo"}
NO_SHARD = {"sharding_strategy": "NO_SHARD"}


def actor(**keys):
    return {"actor_model_config": {"model_name_or_path": "m", **keys}}


def on(*devices, **keys):
    """``devices`` for the actor; ``keys`` of its ``fsdp_config``."""
    return {"device_map": {"actor": list(devices)}, **actor(fsdp_config=keys)}


class Module:
    """Stands for a loaded model."""

    def parameters(self):
        return iter(())


SHARD = "actor_model_config.fsdp_config.shard_size"
STRATEGY = "actor_model_config.fsdp_config.sharding_strategy"
TENSOR = "actor_model_config.fsdp_config.tensor_parallel_size"
CONTEXT = "actor_model_config.fsdp_config.context_parallel_size"
DEVICES = [
    (
        {"device_map": {"actor": "node1:0-1"}},
        ["device_map.actor is [node1:0, node1:1]", "backend ray or device_map.actor [0, 1] would fit"],
    ),
    (
        {"device_map": {"actor": 0, "reward_model": {"label": "l4", "count": 1}}},
        ["device_map.reward_model is {label: l4, count: 1}", "needs cluster.backend ray", "reward_model [0] would fit"],
    ),
    (
        {"critic_model_config": {"shares": "actor"}, "device_map": {"actor": [0, 1], "critic": [1]}},
        ["device_map.critic is [1] and the actor is on [0, 1]", "leave out device_map.critic or set device_map.actor"],
    ),
    (
        {"critic_model_config": {"shares": "actor"}, "device_map": {"critic": [1]}},
        ["device_map.critic is [1] and the actor has no entry", "set device_map.actor [1]"],
    ),
    (
        {"rollout": {"tensor_parallel_size": 2}},
        ["rollout.tensor_parallel_size is 2, but the rollout has 1 device:", "1 or device_map.rollout [0, 1] would"],
    ),
    (
        {"rollout": {"tensor_parallel_size": 2}, "device_map": {"actor": "0-2"}},
        ["the rollout has 3 devices", "rollout.tensor_parallel_size 1 or 3 or device_map.actor 0-3 would"],
    ),
    (
        {"rollout": {"tensor_parallel_size": 2}, "device_map": {"actor": ["a:0", "b:0"]},
         "cluster": {"backend": "ray"}},
        ["[a:0, b:0], which would share an engine, are of different nodes", "1 or device_map.actor [a:0, a:1] would"],
    ),
    (
        {"rollout": {"tensor_parallel_size": 2}, "device_map": {"actor": [0], "rollout": "1-4", "reward_model": [1]},
         "rollout_batch_size": 1},
        ["device_map.rollout names 4 devices, 2 to a row, but a rollout has 1 row", "rollout [1, 2] or", "would"],
    ),
    (
        {"rollout": {"tensor_parallel_size": 2, "engine": "native"}, "device_map": {"actor": [0, 1]}},
        ["rollout.engine native doesn't read it; leave it out, or rollout.engine vllm"],
    ),
    (on(0, 1, 2, tensor_parallel_size=2), [f"{TENSOR} is 2, but the actor has 3 devices", f"{TENSOR} 1 or 3 would"]),
    (actor(fsdp_config={"tensor_parallel_size": 2}), ["has 1 device:", f"{TENSOR} 1 or device_map.actor [0, 1]"]),
    (
        {**on(0, 1, tensor_parallel_size=2), "device_map": {"actor": [0, 1], "reference": [2]}},
        [f"{TENSOR} is 2, but the reference has 1 device:", "device_map.reference [2, 3]"],
    ),
    (
        {"critic_model_config": {"fsdp_config": {"tensor_parallel_size": 4}}, "device_map": {"actor": "cpu:0-5"}},
        ["critic_model_config.fsdp_config.tensor_parallel_size is 4, but the critic has 6 devices", "2 or 3 would fit"],
    ),
    (on(0, 1, 2, context_parallel_size=2), [f"{CONTEXT} is 2, but the actor has 3 devices", f"{CONTEXT} 1 or 3 would"]),
    (
        on("0-3", tensor_parallel_size=2, context_parallel_size=4),
        [f"{CONTEXT} is 4", "times tensor_parallel_size 2 it must divide them", f"{CONTEXT} 1 or 2 would"],
    ),
    (on("cpu", cpu_offload=True), ["but the actor is on cpu", "fsdp_config.cpu_offload false or device_map.actor 0"]),
    (on(0, context_parallel_size=2), ["has 1 device: it must divide", f"{CONTEXT} 1 or device_map.actor [0, 1]"]),
    (
        {**on("0-3", context_parallel_size=4), "device_map": {"actor": "0-7", "critic": [0]},
         "rollout_batch_size": 16, "micro_batch_size": 1, "mini_batch_size": 1},
        ["names 8 devices, 4 to a row, but an optimizer step has 1 row:", "mini_batch_size 2 would fit"],
    ),
    (on(0, 1, 2, 3, sharding_strategy="HYBRID_SHARD"), ["needs its shard_size", f"{SHARD} 1 or 2 would fit"]),
    (on("0-7", sharding_strategy="HYBRID_SHARD", shard_size=3), ["has shard_size 3", f"{SHARD} 2 or 4 would fit"]),
    (on("0-3", sharding_strategy="HYBRID_SHARD", shard_size=4), ["be fewer", f"{SHARD} 1 or 2 would fit"]),
    (
        on("0-3", sharding_strategy="HYBRID_SHARD", shard_size=2, tensor_parallel_size=2),
        ["4 devices, 2 of them data parallel", f"{SHARD} 1 or {STRATEGY} FULL_SHARD would fit"],
    ),
    (on(0, sharding_strategy="HYBRID_SHARD", shard_size=1), ["1 device", f"{STRATEGY} FULL_SHARD or NO_SHARD would"]),
    (
        {"device_map": {"actor": [0, 1]}, **actor(load_in_4bit=True, use_lora=True)},
        ["actor_model_config.load_in_4bit is true and the actor has 2 devices", f"{STRATEGY} NO_SHARD or device_map"],
    ),
    (
        {"device_map": {"actor": "0-3"}, "mini_batch_size": 2},
        ["actor names 4 devices, but an optimizer step has 2 rows", "actor [0, 1] or mini_batch_size 4 would fit"],
    ),
    (
        {"device_map": {"actor": "0-3"}, "rollout_batch_size": 2, "train_batch_size": 4},
        ["device_map.actor (where the rollout is) names 4", "a rollout has 2 rows", "rollout_batch_size 4 would fit"],
    ),
    (
        {"device_map": {"actor": 0, "critic": "1-3"}, "micro_batch_size": 1, "gradient_accumulation_steps": 2},
        ["device_map.critic names 3", "critic [1, 2] or gradient_accumulation_steps 4 would fit"],
    ),
    (
        {**on("0-7", tensor_parallel_size=2), "rollout_batch_size": 16, "micro_batch_size": 1, "mini_batch_size": 2,
         "device_map": {"actor": "0-7", "critic": [0]}},
        ["names 8 devices, 2 to a row, but an optimizer step has 2 rows", "actor 0-3 or mini_batch_size 4 would fit"],
    ),
    (
        {"device_map": {"actor": "0-3"}, "group_size": 8, "rollout_batch_size": 16, "init_kl_coef": 0.0,
         "algorithm": {"name": "online_dpo"}},
        ["an optimizer step has 2 groups", "rollout_batch_size 32 would fit"],
    ),
    (
        {"device_map": {"actor": [0], "critic": [1]}, "actor_model_config": {"model_name_or_path": Module()}},
        ["actor_model_config.model_name_or_path is a loaded Module, but device_map makes 2 workers", "gpt2 or models/"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("values", "words"), DEVICES)
def test_devices_that_do_not_fit(values, words):
    text = refusal(**values)
    assert text.startswith("1 setting is wrong"), text
    for word in words:
        assert word in text


@pytest.mark.parametrize("values", [values for values, words in DEVICES if "would" in words[-1]])
def test_what_is_offered_for_devices_is_valid(values, tmp_path):
    path, key = tmp_path / "run.yaml", ""
    OmegaConf.save(OmegaConf.create({**actor(), "dataset": "d", "reward_fn": "a:b", **values}), path)
    for offered in refusal(**values).rpartition("; ")[2].removesuffix(" would fit").split(" or "):
        named = re.fullmatch(r"([a-z][\w.]*) (.+)", offered)
        key, value = named.groups() if named else (key, offered)
        load_config(path, [f"{key}={value}"])


def test_too_few_rows_are_told_once_for_all_that_share_the_devices():
    text = refusal(device_map={"actor": "0-3"}, rollout_batch_size=1)
    assert text.startswith("1 setting is wrong") and "actor [0] or rollout_batch_size 4 would fit" in text


def test_a_pair_is_never_divided_over_devices():
    with pytest.raises(
        ConfigError, match=r"an optimizer step has 2 pairs: .* \[0, 1\] or train_batch_size 8 would fit"
    ):
        load_config(
            None, algorithm={"name": "dpo"}, dataset="d", train_batch_size=4, device_map={"actor": "0-3"}, **actor()
        )


def test_the_process_reward_is_judged_by_the_settings_it_takes_from_the_actor():
    prime = {"algorithm": {"name": "prime"}, "device_map": {"actor": [0, 1], "process_reward": [2]}}
    text = refusal(**prime, **actor(fsdp_config={"tensor_parallel_size": 2}))
    assert "but the process_reward has 1 device:" in text
    own = {"process_reward_model_config": {"fsdp_config": {"tensor_parallel_size": 1}}}
    load(**prime, **own, **actor(fsdp_config={"tensor_parallel_size": 2}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"algorithm": {"clip_ratio": 0.1, "clip_ratio_high": 0.3}},
            ["algorithm.clip_ratio is 0.1 beside algorithm.clip_ratio_high 0.3", BOTH_FIT],
        ),
        ({"algorithm": {"clip_ratio_low": 0.1}}, ["clip_ratio_low is 0.1 without algorithm.clip_ratio_high", BOTH_FIT]),
        (
            {"algorithm": {"clip_ratio_high": 0.1}},
            ["clip_ratio_high is 0.1 without algorithm.clip_ratio_low", BOTH_FIT],
        ),
        ({"kl_target": 6.0, "init_kl_coef": 0.0}, ["kl_target is 6", "init_kl_coef is 0", "0.1 or 0.01"]),
        ({"kl_target": 6.0, "algorithm": GRPO}, ["kl_target is 6", "init_kl_coef is 0"]),
        (
            {
                "actor_model_config": {"model_name_or_path": "m", "dtype": "bf16"},
                "critic_model_config": {"dtype": "fp32"},
            },
            ["actor_model_config.dtype is bf16", "critic_model_config.dtype is fp32", "bf16 or fp32 for both"],
        ),
        ({"critic_model_config": {}, "algorithm": GRPO}, ["grpo has no critic", "null or algorithm.name ppo"]),
        ({"critic_model_config": {"use_lora": True}, "algorithm": {"name": "rloo"}}, ["rloo has no critic"]),
        (
            {"critic_model_config": {"shares": "actor", "model_name_or_path": "x"}},
            ["critic_model_config.model_name_or_path is x", "leave out"],
        ),
        ({"critic_model_config": {"shares": "actor", "use_lora": True}}, ["critic_model_config.use_lora"]),
        (
            {"actor_model_config": {"model_name_or_path": "m", "load_in_4bit": True}},
            ["actor_model_config.use_lora is false", "use_lora true or actor_model_config.load_in_4bit false"],
        ),
        ({"critic_model_config": {"load_in_4bit": True}}, ["critic_model_config.load_in_4bit is true"]),
        ({"reward_model_config": {}}, ["reward_model_config.model_name_or_path is missing"]),
        ({"reward_fn": [{"name": "reward_model"}]}, ["reward_fn[0].model_name_or_path is missing", "models/reward"]),
        (
            {"reward_fn": ["a:b", {"name": "reward_model", "model_name_or_path": "r", "micro_batch": 0, "dtype": "x"}]},
            [
                "micro_batch is not a key; did you mean micro_batch_size?",
                "reward_fn: dtype is 'x': must be one of auto, bf16, fp32",
            ],
        ),
        ({"reward_fn": {"name": "a:b", "as": 3}}, ["reward_fn is ", "what a reward is called in metrics", "not 3"]),
        (
            {"reward_fn": {"name": "reward_model", "model_name_or_path": Module()}, "device_map": {"actor": [0, 1]}},
            ["reward_fn[0].model_name_or_path is a loaded Module, but device_map makes 2 workers"],
        ),
        ({"reward_weights": [1.0, 0.5]}, ["2 weights for 1 rewards", "[1.0] or [0.5]"]),
        (
            {"reward_model_config": {"model_name_or_path": "r"}, "reward_weights": [1.0]},
            ["1 weights for 2 rewards", "[1.0, 1.0] or [1.0, 0.5]"],
        ),
        ({"total_steps": 3, "total_epochs": 2.0}, ["total_steps is 3 and total_epochs is 2"]),
        ({"max_tokens_per_micro_batch": 1023}, ["must hold one row", "1024 or 2048 would fit"]),
        (
            {"algorithm": {"correction": "icepop", "correction_floor": 3.0}},
            [
                "algorithm.correction_floor is 3, above algorithm.correction_cap 2, so icepop keeps no token",
                "cap 3 would",
            ],
        ),
        ({"algorithm": {"correction": "reject", "correction_cap": 0.1}}, ["reject keeps", "correction_floor 0.1 or"]),
        (
            {"algorithm": {"name": "clip_cov", "covariance_low": 6.0}},
            ["algorithm.covariance_low is 6, above algorithm.covariance_high 5, so clip_cov chooses no token"],
        ),
        (
            {"algorithm": {"name": "dapo", "allow_singletons": True}, "group_size": 1},
            ["group_size is 1: it replaces groups", "group_size 2 or algorithm.dynamic_sampling false would fit"],
        ),
    ],
)
def test_broken(values, words):
    text = refusal(**values)
    assert text.startswith("1 setting is wrong"), text
    for word in words:
        assert word in text


def test_an_adapter_s_folder_over_4_bits_needs_no_use_lora(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    load(actor_model_config={"model_name_or_path": str(tmp_path), "load_in_4bit": True})


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}},
        {"algorithm": {"correction": "tis", "correction_cap": 0.1}},  # which reads no floor
        {"algorithm": {"correction": "reject", "correction_cap": 2.0, "correction_floor": 2.0}},
        {"kl_target": 6.0},
        {"kl_target": 6.0, "init_kl_coef": 0.1, "algorithm": GRPO},
        {"actor_model_config": {"model_name_or_path": "m", "dtype": "fp32"}, "critic_model_config": {"dtype": "fp32"}},
        {"critic_model_config": {"shares": "actor"}},
        {"actor_model_config": {"model_name_or_path": "m", "load_in_4bit": True, "use_lora": True}},
        {"critic_model_config": None, "algorithm": GRPO},
        {"reward_fn": ["a:b", "c:d"], "reward_weights": [1.0, 0.5]},
        {"max_tokens_per_micro_batch": 1024},
        {"algorithm": {"name": "dapo", "allow_singletons": True, "dynamic_sampling": False}, "group_size": 1},
        {"algorithm": {"name": "dapo", "allow_singletons": True}, "group_size": 2},
        {"device_map": {"actor": "node1:0-1", "critic": {"label": "a100", "count": 2}}, "cluster": {"backend": "ray"}},
        {"device_map": {"actor": [0], "critic": "cpu:0-1"}},
        {"critic_model_config": {"shares": "actor"}, "device_map": {"actor": [0, 1], "critic": "0-1"}},
        on("0-3", tensor_parallel_size=2),
        {"device_map": {"actor": "0-3"}, "rollout": {"tensor_parallel_size": 2}},
        {"device_map": {"actor": 0, "rollout": "1-4"}, "rollout": {"tensor_parallel_size": 4, "engine": "vllm"}},
        on("0-3", tensor_parallel_size=2, context_parallel_size=2),
        on(0, cpu_offload=True),
        on("0-3", sharding_strategy="HYBRID_SHARD", shard_size=2, context_parallel_size=4),
        on("0-7", sharding_strategy="HYBRID_SHARD", shard_size=2, tensor_parallel_size=2),
        {"device_map": {"actor": [0, 1]}, **actor(load_in_4bit=True, use_lora=True, fsdp_config=NO_SHARD)},
        {"device_map": {"actor": "0-3"}, "mini_batch_size": 4},
        {"device_map": {"actor": [0], "teacher": "1-3"}, "rollout_batch_size": 1},
        {"device_map": {"actor": [0]}, "actor_model_config": {"model_name_or_path": Module()}},
    ],
)
def test_sound(values):
    load(**values)


def test_sglang_takes_no_adapters(record_property):
    text = refusal(**actor(use_lora=True), rollout={"engine": "sglang", "url": "http://h:1"})
    assert "takes whole weights, but the policy trains an adapter; rollout.engine vllm or openai would fit" in text
    record_property(REFUSED, "whole weights")


@pytest.mark.parametrize(
    "settings, named",
    [({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"), ({"use_dora": True}, "use_dora"),
     ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"), ({"target_parameters": None}, ""),
     ({"init_lora_weights": "olora", "lora_bias": True}, "init_lora_weights 'olora', lora_bias"),
     ({"init_lora_weights": "gaussian"}, ""), ({"init_lora_weights": False}, "")],
)  # fmt: skip
@pytest.mark.parametrize("engine", ["vllm", "openai", "native"])
def test_adapters_that_change_the_base_are_sampled_by_the_policy_itself(tmp_path, settings, named, engine):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4} | settings))
    keys = actor() | {"rollout": {"engine": engine} | ({"url": "http://h:1"} if engine == "openai" else {})}
    keys["actor_model_config"]["model_name_or_path"] = str(tmp_path)
    if named and engine != "native":
        text = refusal(**keys)
        assert f"has {named}: an engine" in text and "rollout.engine native would fit" in text
    else:
        load(**keys)
    for unread in ("[1]", "{"):  # whoever loads it says so
        (tmp_path / "adapter_config.json").write_text(unread)
        load(**keys)
