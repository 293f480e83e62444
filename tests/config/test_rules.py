"""Rules between keys other than sizes."""

from __future__ import annotations

import pytest

from tests.config.samples import load, refusal

BOTH_FIT = "algorithm.clip_ratio 0.2, or algorithm.clip_ratio_low 0.2 with algorithm.clip_ratio_high 0.28, would fit"
GRPO = {"name": "grpo"}


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
        ({"reward_weights": [1.0, 0.5]}, ["2 weights for 1 rewards", "[1.0] or [0.5]"]),
        (
            {"reward_model_config": {"model_name_or_path": "r"}, "reward_weights": [1.0]},
            ["1 weights for 2 rewards", "[1.0, 1.0] or [1.0, 0.5]"],
        ),
        ({"total_steps": 3, "total_epochs": 2.0}, ["total_steps is 3 and total_epochs is 2"]),
        ({"max_tokens_per_micro_batch": 1023}, ["must hold one row", "1024 or 2048 would fit"]),
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
        {"kl_target": 6.0},
        {"kl_target": 6.0, "init_kl_coef": 0.1, "algorithm": GRPO},
        {"actor_model_config": {"model_name_or_path": "m", "dtype": "fp32"}, "critic_model_config": {"dtype": "fp32"}},
        {"critic_model_config": {"shares": "actor"}},
        {"actor_model_config": {"model_name_or_path": "m", "load_in_4bit": True, "use_lora": True}},
        {"critic_model_config": None, "algorithm": GRPO},
        {"reward_fn": ["a:b", "c:d"], "reward_weights": [1.0, 0.5]},
        {"max_tokens_per_micro_batch": 1024},
    ],
)
def test_sound(values):
    load(**values)
