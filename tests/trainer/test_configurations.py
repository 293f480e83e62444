"""Configuration files as people write them: each really trains one lap, with a tiny policy and reward model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests import tiny
from tests.config.samples import README_FILE, SIBLINGS
from tests.rewards.test_model import deberta, word_tokenizer
from tests.trainer.brief import brief_llama
from verl.config.errors import ConfigError
from verl.config.load import load_config
from verl.trainer.base import Run

MINIMAL = """\
rollout_batch_size: 16
micro_batch_size: 4
actor_model_config: {model_name_or_path: some/policy}
reward_fn: tests.trainer.reward:low_ids
dataset: data/prompts.jsonl
"""
HALVED = SIBLINGS["smaller"].replace("micro_batch_size: 8", "micro_batch_size: 4")  # and with it the mini-batch
FILES = {"readme": README_FILE, **SIBLINGS, "halved": HALVED, "minimal": MINIMAL}
# rows per lap, rows per optimizer step, as the files say them
ROWS = {"readme": (512, 128), "bigger": (1024, 64), "smaller": (256, 32), "halved": (256, 16), "minimal": (16, 16)}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A policy without pad token and chat template whose responses are short, and a reward model; as folders."""
    policy = tiny.save(tmp_path_factory.mktemp("policy"), brief_llama(), tiny.f_bpe(template=None, pad=None))
    return policy, tiny.save(tmp_path_factory.mktemp("reward"), deberta(), word_tokenizer())


@pytest.fixture
def written(models, tmp_path):
    """The file under a name, with nothing changed but model names, data, the dtype and what the test wants. ``auto``
    is another dtype on some machines."""

    def write(name, **changes):
        policy, reward = models
        keys = OmegaConf.create(FILES[name])
        named = {"actor_model_config": policy, "reward_model_config": reward}
        for section in named.keys() & keys.keys():
            keys[section] |= {"model_name_or_path": named[section], "dtype": "fp32"}
        keys.dataset = str(tmp_path / "prompts.jsonl")
        texts = ["".join("abcxust"[(i * k) % 7] for k in range(1, 3 + i % 5)) for i in range(40)]
        Path(keys.dataset).write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        file = tmp_path / "config.yaml"
        file.write_text(OmegaConf.to_yaml(OmegaConf.merge(keys, changes)))
        return file

    return write


def trained(file, run_dir, *overrides):
    """One lap of the file: its metrics and the weights after it."""
    cfg = load_config(file, ["total_steps=1", f"run_dir={run_dir}", *overrides])
    with Run(cfg, console=False) as run:
        run.prepare()
        last = run.train().last
        return last, {n: t.detach().clone() for n, t in run.controller.workers.actor.engine.shards()}


@pytest.mark.parametrize("name", FILES)
def test_the_file_trains(written, tmp_path, name):
    metrics, weights = trained(written(name), tmp_path / "run")
    rows, mini = ROWS[name]
    assert metrics["policy/rows_trained"] == rows
    assert metrics["policy/optimizer_steps"] == rows // mini
    assert metrics["policy/grad_norm"] > 0 and metrics["rollout/logprob_diff_max"] < 1e-4
    assert metrics["critic/loss"] > 0 and 1 <= metrics["response/length_mean"] < 20
    if name in ("readme", "smaller"):
        assert weights and all("lora" in key for key in weights)
        rank = {"readme": 64, "smaller": 32}[name]
        assert {len(w) for key, w in weights.items() if "lora_A" in key} == {rank}


def test_micro_batch_size_halved(written, tmp_path):
    """With the accumulation doubled the mini-batch stays, and with it every weight."""
    before, weights = trained(written("smaller", train_batch_size=64), tmp_path / "a")
    halves = {"micro_batch_size": 4, "gradient_accumulation_steps": 8}
    after, same = trained(written("smaller", train_batch_size=64, **halves), tmp_path / "b")
    assert before["policy/optimizer_steps"] == after["policy/optimizer_steps"] == 2
    assert any(weights[name].any() for name in weights if "lora_B" in name)  # starts at 0, so it has moved
    for name in weights:
        torch.testing.assert_close(weights[name], same[name], rtol=0, atol=2e-5, msg=name)


def test_rollout_times_one_and_a_half_is_refused_with_train_sizes_that_fit(written):
    with pytest.raises(ConfigError, match=r"train_batch_size 384 or (train_batch_size )?(576|768)") as caught:
        load_config(written("readme", rollout_batch_size=192))
    offered = [int(word) for word in str(caught.value).split("train_batch_size")[-1].split() if word.isdigit()]
    assert len(offered) == 2
    for size in offered:
        load_config(written("readme", rollout_batch_size=192, train_batch_size=size))
