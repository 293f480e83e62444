"""What the start prints, and the advice when memory runs out."""

from __future__ import annotations

import os
import re

import pytest

from tests.config.samples import load
from verl.config.load import dump, load_config, memory_advice, notes

FILE = {"rollout_batch_size": 128, "train_batch_size": 512, "micro_batch_size": 32, "gradient_accumulation_steps": 4}
TWO = {"device_map": {"actor": [0, 1]}}


def warnings(**values) -> list[str]:
    return [n.removeprefix("warning: ") for n in notes(load(**values)) if n.startswith("warning: ")]


def warmup(steps: int) -> dict:
    return {"actor_model_config": {"model_name_or_path": "m", "optimizer": {"warmup_steps": steps}}}


def test_rows_per_step_and_steps_per_lap():
    lap, step, _ = notes(load(**FILE, algorithm={"name": "grpo", "update_epochs": 2}))
    assert lap == "a lap: 512 rows = 4 rollouts of 128 rows (16 prompts x 8 responses)"
    assert step.endswith("128 rows over all devices = 4 micro-batches of 32 rows; 8 steps per lap (4 x 2 passes)")


def test_no_warning_without_a_reason():
    assert warnings() == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rollout": {"top_p": 0.9}}, ["rollout.top_p is 0.9", "renormalised"]),
        ({"rollout": {"top_k": 40}}, ["rollout.top_k is 40", "renormalised"]),
        ({"num_rollout_workers": 2 * (os.cpu_count() or 1) + 2}, ["num_rollout_workers", "1.5 x"]),
        ({"algorithm": {"name": "grpo", "lam": 0.95}}, ["algorithm.lam is 0.95", "grpo doesn't read it"]),
        (
            {"actor_model_config": {"model_name_or_path": "m", "lora_r": 8}},
            ["actor_model_config.lora_r without use_lora"],
        ),
        (
            {"actor_model_config": {"model_name_or_path": "m", "fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}}},
            ["SHARD_GRAD_OP", "nothing is sharded"],
        ),
        (
            {"actor_model_config": {"model_name_or_path": "m", "fsdp_config": {"shard_size": 2}}, **TWO},
            ["shard_size is 2, which only HYBRID_SHARD reads", "FULL_SHARD"],
        ),
        ({"device_map": {"actor": [0], "teacher": [1]}}, ["device_map.teacher is given, but ppo as it is set runs no"]),
        ({"device_map": {"actor": 0, "reference": 1}, "init_kl_coef": 0.0}, ["runs no reference"]),
        ({"cluster": {"address": "10.0.0.1:6379"}}, ["cluster.address", "only cluster.backend ray"]),
        ({"cluster": {"max_restarts": 1}}, ["max_restarts is 1", "this process"]),
        ({"eval": {"every_steps": 5}}, ["eval.every_steps is 5 without eval.dataset"]),
        ({"eval": {"limit": 5}}, ["eval.limit is 5 without eval.dataset"]),
        ({"eval": {"columns": {"prompt": "q"}}}, ["eval.columns is {'prompt': 'q'} without eval.dataset"]),
        ({"kl_horizon": 5}, ["kl_horizon is 5 without kl_target"]),
        ({"reward_default": 0.5}, ["reward_default is 0.5 without reward_failure default"]),
        ({"algorithm": {"max_refills": 3}}, ["algorithm.max_refills is 3 without dynamic_sampling"]),
        ({"total_steps": 2, **warmup(9)}, ["warmup_steps is 9, and the run has 2 optimizer steps", "in none"]),
        ({"total_steps": 1, **warmup(1)}, ["the run has 1 optimizer step: lr is reached in the last one"]),
        (
            {"algorithm": {"name": "grpo"}, "metrics": {"alarms": {"critic/loss": 1.0}}},
            ["metrics.alarms has a limit for critic/loss, which grpo never logs"],
        ),
        ({"metrics": {"alarms_below": {"sft/nll": 1.0}}}, ["metrics.alarms_below has a limit for sft/nll, which ppo"]),
    ],
)
def test_warnings(values, words):
    (text,) = warnings(**values)
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    "values",
    [
        {
            "actor_model_config": {"model_name_or_path": "m", "fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}},
            **TWO,
        },
        {"cluster": {"max_restarts": 1}, **TWO},
        {"cluster": {"max_restarts": 1, "backend": "ray", "address": "10.0.0.1:6379"}},
        {"device_map": {"actor": 0, "reference": 1}},
        {"total_steps": 3, **warmup(2)},
        {"kl_horizon": 5, "kl_target": 1.0},
        {"reward_default": 0.5, "reward_failure": "default"},
        {"eval": {"limit": 3, "dataset": "d.jsonl"}},
        {"algorithm": {"name": "dapo", "max_refills": 3}},
        {"metrics": {"alarms": {"critic/loss": 1.0, "reward/mean": 2.0, "time/step": 60.0}}},
    ],
)
def test_no_warning_where_it_means_something(values):
    assert warnings(**values) == []


def test_a_limit_on_rewards_means_nothing_where_nothing_is_sampled():
    limits = {"reward/mean": 1.0, "preference/accuracy": 1.0}
    cfg = load_config(None, partial=True, algorithm={"name": "dpo"}, metrics={"alarms": limits})
    told = [note for note in notes(cfg) if "never logs" in note]
    assert told == ["warning: metrics.alarms has a limit for reward/mean, which dpo never logs"]


def test_a_dumped_file_warns_of_nothing_that_the_first_did_not(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(dump(load()))
    assert notes(load_config(path)) == notes(load())


def test_workers_are_told_where_there_are_several():
    assert len(notes(load(device_map={"actor": "cpu"}))) == len(notes(load())) == 3
    apart = {"actor": [0, 1], "critic": [1], "reward_model": "cpu"}
    line = notes(load(device_map=apart, reward_model_config={"model_name_or_path": "r"}, init_kl_coef=0.0))[2]
    assert (
        line == "3 workers: 0 on cuda:0: actor, rollout; 1 on cuda:1: actor, critic, rollout; 2 on cpu:0: reward_model"
    )
    assert notes(load(device_map={"critic": [1]}))[2].startswith("device_map has no actor: it,")


def test_who_samples_is_told():
    assert notes(load())[2].startswith("rows are sampled by native (rollout.engine auto: it needs no package, ")
    four = {"actor": 0, "rollout": [0, 1, 2, 3]}
    rollout = {"engine": "vllm", "environment": "my_game:turn", "max_turns": 4}
    line = "rows are sampled by vllm, an engine on each of 4 devices; my_game:turn answers them, 4 messages at most"
    assert notes(load(device_map=four, rollout=rollout))[3] == line
    offline = load_config(None, **{"algorithm": {"name": "sft"}}, partial=True)
    assert not any("sampled by" in note for note in notes(offline))


def test_memory_advice_keeps_the_mini_batch():
    cfg = load(**FILE)
    text = memory_advice(cfg)
    assert "micro_batch_size=16 gradient_accumulation_steps=8 instead of 32, 4" in text
    advised = {
        key: int(value) for key, value in re.findall(r"(micro_batch_size|gradient_accumulation_steps)=(\d+)", text)
    }
    assert load(**(FILE | advised)).mini_batch_size == cfg.mini_batch_size


def test_memory_advice_when_the_micro_batch_is_one_row():
    text = memory_advice(load(micro_batch_size=1, gradient_checkpointing=False))
    assert "micro_batch_size" not in text
    assert "gradient_checkpointing=true" in text
