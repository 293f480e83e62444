"""Whole runs whose rows are episodes: a game that is learned, the exact gradient, every algorithm and engine."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.rollout import vllm_starts
from tests.rollout.stand_in import SglangStandIn, VllmStandIn
from tests.tiny import f_bpe, save
from tests.trainer.cluster_runs import lines, same_lines, same_numbers, same_weights, train
from verl.cli.main import main
from verl.config.errors import ConfigError, RequestError, RunError
from verl.config.load import load_config
from verl.config.recipes import RECIPES
from verl.config.run import RunConfig
from verl.trainer.base import Run

LETTERS = ["x", "a", "b", "c", "u", "s", "t", ":", "\n"]  # each ends a message
PROMPTS = [{"prompt": "x", "answer": letter} for letter in "abab"]


def llama(folder: Path, **keys: Any) -> str:
    """Heads of 32, which vLLM computes on a CPU, too; every id is a token of F-bpe."""
    tokenizer = f_bpe(template="bos")
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 128,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    return save(folder, LlamaForCausalLM(LlamaConfig(**sizes | keys)), tokenizer)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return llama(tmp_path_factory.mktemp("model"))


def keys(model: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Episodes of up to four messages, which end at an ``a`` or a ``b``."""
    rollout = {"environment": "tests.trainer.game:chatter", "max_turns": 4, "stop": ["a", "b"]}
    base = {
        "actor_model_config": {"model_name_or_path": model, "dtype": "fp32", "optimizer": {"lr": 1e-3}},
        "dataset": [{"prompt": p} for p in ("xa", "xb", "xc", "ab", "ba", "bc")],
        "reward_fn": "tests.trainer.game:closeness",
        "algorithm": {"name": "grpo"},
        "group_size": 4,
        "rollout_batch_size": 16,
        "micro_batch_size": 4,
        "max_prompt_length": 16,
        "max_response_length": 48,
        "total_steps": 3,
        "run_dir": str(folder / "run"),
        "metrics": {"tensorboard": False},
    }
    return base | more | {"rollout": rollout | more.get("rollout", {})}


def config(model: str, folder: Path, **more: Any) -> RunConfig:
    return load_config(None, **keys(model, folder, **more))


# -- what a run tells ------------------------------------------------------------------------------------------------


def test_numbers_are_those_of_the_policys_tokens(model: str, tmp_path: Path):
    """Of one group, all of whose rows are shown: means by hand, and trainer and sampler agree on every token."""
    folder = train(config(model, tmp_path, rollout_batch_size=4, init_kl_coef=0.1))
    told = lines(folder)
    samples = lines(folder, "samples.jsonl")
    assert any("response_mask" in s for s in samples)
    for line in told:
        mine = [s for s in samples if s["step"] == line["step"]]
        masks = [s.get("response_mask", [1] * len(s["response_ids"])) for s in mine]
        sampled = [sum(mask) for mask in masks]
        turns = [1 + sum(b > a for a, b in itertools.pairwise(mask)) for mask in masks]
        assert line["response/sampled_mean"] == pytest.approx(sum(sampled) / 4)
        assert line["response/turns_mean"] == pytest.approx(sum(turns) / 4)
        assert line["response/length_mean"] == pytest.approx(sum(map(len, masks)) / 4)
        assert line["response/length_max"] <= 48
        assert [s["logprobs"]["sum"] / n for s, n in zip(mine, sampled, strict=True)] == pytest.approx(
            [s["logprobs"]["mean"] for s in mine]
        )
        for s, mask in zip(mine, masks, strict=True):
            assert [logprob is not None for logprob in s["token_logprobs"]] == [bool(here) for here in mask]
            assert sum(p for p in s["token_logprobs"] if p is not None) == pytest.approx(s["logprobs"]["sum"], abs=3e-3)
            assert s["group_rewards"] == [other["reward"] for other in mine]
        assert line["rollout/logprob_diff_max"] < 1e-4 and line["policy/bad_steps"] == 0
        assert line["policy/ratio_max"] == 1.0
    assert told[0]["kl/mean"] == pytest.approx(0, abs=1e-6) and told[1]["kl/mean"] > 0
    words = [s["response"] for s in samples if "response_mask" in s]
    assert all("\nu:" in text and "\na:" in text for text in words)  # what the environment said is shown


def test_the_gradient_is_that_of_the_sampled_tokens_alone(model: str, tmp_path: Path):
    """A group of four episodes and one step of plain gradient descent, beside a loop over rows and tokens."""
    sgd = {"optimizer": {"name": "sgd", "lr": 0.1, "max_grad_norm": 1e9}, "model_name_or_path": model, "dtype": "fp32"}
    cfg = config(
        model, tmp_path, actor_model_config=sgd, algorithm={"name": "rloo"}, rollout_batch_size=4, total_steps=1
    )
    with Run(cfg, console=False) as run:
        run.prepare()
        result = run.step()
        trained = {n: t.detach().clone() for n, t in run.controller.workers.actor.engine.shards()}
    assert result.collected is not None
    rows, shown = result.collected.rows, [result.collected.shown[i] for i in range(4)]
    assert max(row.turns for row in rows) > 1
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rewards = result.collected.scores.totals
    sampled = [told.chosen or (True,) * len(told.ids) for told in shown]
    loss, tokens = torch.zeros(()), sum(map(sum, sampled))
    for i, told in enumerate(shown):
        others = [r for k, r in enumerate(rewards) if k != i]
        advantage = rewards[i] - sum(others) / len(others)
        ids = [*rows[i].draw.prompt.ids, *told.ids]
        logprobs = lm(torch.tensor([ids])).logits[0].log_softmax(-1)
        for k, chosen in enumerate(sampled[i], start=len(rows[i].draw.prompt.ids)):
            if chosen:
                loss = loss - advantage * logprobs[k - 1, ids[k]] / tokens
    loss.backward()
    assert result.metrics["policy/grad_norm"] > 0.01
    for name, parameter in lm.named_parameters():
        expected = parameter - 0.1 * parameter.grad if parameter.grad is not None else parameter
        torch.testing.assert_close(trained[name], expected.detach(), rtol=1e-4, atol=1e-6, msg=name)


def test_a_game_is_learned(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """By the command: two letters, told after the first message; who repeats them listens to the environment."""
    file = tmp_path / "game.yaml"
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    game = keys(
        model, tmp_path, dataset=str(data), reward_fn="tests.trainer.game:repeated", rollout_batch_size=64,
        group_size=16, micro_batch_size=64, total_steps=26, max_response_length=24, gradient_checkpointing=False,
        actor_model_config={"model_name_or_path": model, "dtype": "fp32", "optimizer": {"lr": 2e-3}},
        algorithm={"name": "rloo", "entropy_coef": 0.1},  # else one letter may win before the other is heard
        rollout={"environment": "tests.trainer.game:turn", "stop": LETTERS, "max_turns": 2},
        eval={"dataset": str(data)},
    )  # fmt: skip
    file.write_text(yaml.safe_dump(game))
    monkeypatch.setattr(sys, "argv", ["verl", "train", str(file)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0, capsys.readouterr()
    told = [line["reward/mean"] for line in lines(tmp_path / "run")]
    assert told[0] < 0.3 and sum(told[-3:]) / 3 > 0.9, told
    before, after = (line["eval/accuracy"] for line in lines(tmp_path / "run", "eval.jsonl"))
    assert before < 1.0 == after  # greedy answers are episodes, too


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.samples])
def test_every_algorithm_leaves_the_environments_tokens_out(model: str, tmp_path: Path, name: str):
    """They have no log-probability: one that was used anywhere would make a metric or the gradient NaN."""
    more: dict[str, Any] = {
        "algorithm": {"name": name},
        "total_steps": 1,
        "rollout_batch_size": 8,
        "mini_batch_size": 4,
        "init_kl_coef": 0.1,
    }
    if name in ("ppo", "reinforce_plus_plus", "remax", "distill"):
        more |= {"group_size": 1}
    if name == "distill":
        more |= {
            "reward_fn": [],
            "teacher_model_config": {"model_name_or_path": llama(tmp_path / "t"), "dtype": "fp32"},
        }
    if name == "pass_k":
        more |= {"algorithm": {"name": name, "pass_k": 2}, "reward_fn": "tests.trainer.game:even"}
    if name in ("online_dpo", "distill"):
        del more["init_kl_coef"]
    elif name not in ("dppo",):
        more["algorithm"] |= {"correction": "tis"}
    cfg = config(model, tmp_path, **more)
    for line in lines(train(cfg)):
        assert all(v is None or math.isfinite(v) for v in line.values()), line
        assert line["response/turns_mean"] > 1.2 and line["policy/bad_steps"] == 0
        assert line["policy/grad_norm"] > 0 or name == "distill"
        if cfg.algorithm.old_logprobs == "trainer":  # else it tells of the first step, too
            assert 0 <= (line.get("rollout/kl") or 0.0) < 1e-4


@pytest.mark.parametrize("more", [{}, {"algorithm": {"old_logprobs": "sampler", "correction": "reject"}}])
def test_resumed_from_every_step_it_is_the_run_that_was_never_stopped(model: str, tmp_path: Path, more: dict):
    """To the bit: weights, rows and numbers."""
    more = {"checkpoint": {"every_steps": 1, "keep": 9}, "mini_batch_size": 8, **more}
    if "algorithm" in more:
        more["algorithm"] = {"name": "grpo"} | more["algorithm"]
    whole = train(config(model, tmp_path, run_dir=str(tmp_path / "whole"), **more))
    for stop in (1, 2):
        folder = str(tmp_path / f"stopped{stop}")
        with Run(config(model, tmp_path, run_dir=folder, **more), console=False) as run:
            run.prepare()
            for _ in range(stop):
                run.step()
        resumed = train(config(model, tmp_path, run_dir=folder, **more), resume=True)
        assert lines(resumed, "samples.jsonl") == lines(whole, "samples.jsonl")
        same_lines(lines(resumed), lines(whole))
        for name in ("actor.safetensors", "actor_optimizer.safetensors"):
            mine, theirs = ((at / "checkpoints" / "step_3" / name).read_bytes() for at in (resumed, whole))
            assert mine == theirs


# -- on several workers, by other engines ----------------------------------------------------------------------------


def test_on_two_workers_it_is_the_same_run(model: str, tmp_path: Path):
    """Messages, masks and what was sampled travel with the rows."""
    places = {"actor": "cpu:0", "rollout": "cpu:1", "reward_model": "cpu:0"}
    one = train(config(model, tmp_path, run_dir=str(tmp_path / "one")))
    two = train(config(model, tmp_path, run_dir=str(tmp_path / "two"), device_map=places))
    same_numbers(two, one)
    same_weights(two, one)


@pytest.mark.parametrize("kind", ["openai", "sglang"])
def test_servers_sample_episodes(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    monkeypatch.setattr("verl.rollout.http.BACK_OFF", 0.05)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = f_bpe(template="bos")
    server: Any = SglangStandIn(lm, tokenizer=tokenizer) if kind == "sglang" else VllmStandIn(lm, tokenizer=tokenizer)
    try:
        folder = train(config(model, tmp_path, rollout={"engine": kind, "url": server.url}))
    finally:
        server.stop()
    for line in lines(folder):
        assert line["rollout/logprob_diff_max"] < 1e-4 and line["response/turns_mean"] > 1.2


def test_vllm_samples_the_episodes_of_the_native_engine(model: str, tmp_path: Path):
    pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
    native = train(config(model, tmp_path, run_dir=str(tmp_path / "native")))
    with vllm_starts.quick():
        vllm = train(config(model, tmp_path, run_dir=str(tmp_path / "vllm"), rollout={"engine": "vllm"}))
    same_lines(lines(vllm), lines(native))
    same_weights(vllm, native)


# -- what is wrong ---------------------------------------------------------------------------------------------------


def test_a_failure_ends_the_run_and_names_the_row(model: str, tmp_path: Path):
    with pytest.raises(
        RunError, match=r"rollout.generate on cpu: environment tests.trainer.game:fails: row \d@\d/\d failed: "
        r"ValueError: no such door \(game.py:\d+\) in turn 1. Prompt \d: '<bos>u:",
    ):  # fmt: skip
        train(config(model, tmp_path, rollout={"environment": "tests.trainer.game:fails"}))


def test_requests_that_can_not_be_served(model: str, tmp_path: Path):
    for environment, word in (
        ("tests.trainer.game:torn", "has no 'torn'"),
        ("no_such_module:turn", "no module 'no_such_module'"),
        ("tests.trainer.game:turn", "nothing matches its argument 'answer'"),
    ):
        with pytest.raises(RequestError, match=f"rollout.environment.*{word}"):
            train(config(model, tmp_path, rollout={"environment": environment}))
    plain = save(tmp_path / "plain", AutoModelForCausalLM.from_pretrained(model), f_bpe())
    with pytest.raises(RequestError, match=r"rollout.environment needs a chat template"):
        train(config(plain, tmp_path))
    with pytest.raises(ConfigError, match=r"rollout.environment is 'turn': must be 'module:function'"):
        config(model, tmp_path, rollout={"environment": "turn"})
    with pytest.raises(ConfigError, match=r"rollout.max_turns is given, but there is no environment"):
        config(model, tmp_path, rollout={"environment": None})
