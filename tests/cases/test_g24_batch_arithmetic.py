"""G24: sizes that don't fit are refused at once, all together, each with its key, value and rule; sound ones pass."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.config.samples import load, refusal
from verl.config.load import notes

GRPO = {"name": "grpo"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mini_batch_size": 4, "micro_batch_size": 8}, ["micro_batch_size is 8", "must divide mini_batch_size 4"]),
        ({"group_size": 0}, ["group_size is 0", ">= 1"]),
        ({"device_map": {"actor": []}}, ["device_map", "actor has no device", "at least 1"]),
        ({"rollout": {"tensor_parallel_size": 0}}, ["rollout.tensor_parallel_size is 0", ">= 1"]),
        ({"micro_batch_size": 0}, ["micro_batch_size is 0", ">= 1"]),
        ({"group_size": 1, "algorithm": GRPO}, ["group_size is 1", "needs at least 2"]),
        ({"group_size": 1, "algorithm": {"name": "rloo"}}, ["group_size is 1", "needs at least 2"]),
        ({"rollout_batch_size": 6, "group_size": 4, "algorithm": GRPO}, ["rollout_batch_size is 6", "group_size 4"]),
        ({"ppo_mini_batchsize": 64}, ["ppo_mini_batchsize is not a key", "did you mean mini_batch_size?"]),
    ],
)
def test_refused(values, words):
    text = refusal(**values)
    assert text.startswith("1 setting is wrong"), text
    for word in words:
        assert word in text


def test_refused_together():
    text = refusal(
        mini_batch_size=4, micro_batch_size=8, device_map={"actor": []}, rollout={"tensor_parallel_size": 0},
        rollout_batch_size=6, group_size=4, ppo_mini_batchsize=1, max_response_length=0,
    )  # fmt: skip
    assert text.startswith("7 settings are wrong")


def test_several_words_out_of_range_at_once():
    """The bad ones don't hide the others, and don't drag their neighbours in."""
    text = refusal(group_size=0, mini_batch_size=4, micro_batch_size=8)
    assert text.startswith("2 settings are wrong")


@pytest.mark.parametrize("train", [2, 4, 8, 12])
def test_one_divides_everything(train):
    assert load(rollout_batch_size=train, micro_batch_size=1, mini_batch_size=1).gradient_accumulation_steps == 1


def test_mini_batch_counts_rows():
    cfg = load(rollout_batch_size=256, group_size=8, mini_batch_size=64, algorithm=GRPO)
    assert cfg.train_batch_size // cfg.mini_batch_size == 4
    assert notes(cfg)[0] == "a lap: 256 rows = 1 rollout of 256 rows (32 prompts x 8 responses)"


def test_a_group_of_one_where_it_means_something():
    assert load(group_size=1).algorithm.name == "ppo"
    assert load(group_size=1, algorithm={"name": "grpo", "allow_singletons": True}).group_size == 1


def test_evaluation_is_not_tied_to_the_group():
    cfg = load(algorithm=GRPO, eval={"dataset": "data/held_out.jsonl", "every_steps": 5, "limit": 3})
    assert (cfg.group_size, cfg.eval.limit) == (8, 3)


def test_a_fresh_process_refuses_in_seconds_and_loads_no_torch():
    code = """
import sys
from verl.config.errors import ConfigError
from verl.config.load import load_config
try:
    load_config(None, rollout_batch_size=192, train_batch_size=512)
except ConfigError:
    print("torch" in sys.modules)
"""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert time.perf_counter() - start < 5
