"""Whole runs on a tiny model: what every lap must satisfy, whatever the algorithm and the split."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from verl.config.errors import RequestError, RunError
from verl.metrics.names import find
from verl.trainer.base import Run

PPO = {"algorithm": {"name": "ppo"}, "critic_model_config": {}, "group_size": 1}
REQUIRED = [
    "step",
    "reward/mean",
    "kl/mean",
    "policy/loss",
    "policy/entropy",
    "policy/clip_fraction",
    "policy/grad_norm",
    "time/step",
    "time/generate",
    "time/reward",
    "time/update",
    "time/publish",
    "throughput/tokens_per_second",
    "memory/peak_gib",
]


def run(cfg, **how):
    with Run(cfg, console=False) as r:
        r.prepare(**how)
        summary = r.train()
        weights = {n: t.detach().clone() for n, t in r.controller.workers.actor.engine.shards()}
    lines = [json.loads(line) for line in (Path(cfg.run_dir) / "metrics.jsonl").read_text().splitlines()]
    return summary, weights, lines


def same(a, b, tolerance=0.0):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm": {"name": "grpo"}, "init_kl_coef": 0.1},
        {"algorithm": {"name": "rloo"}, "init_kl_coef": 0.1},
        {"algorithm": {"name": "grpo"}, "kl_sample_rows": 4},
        {"algorithm": {"name": "grpo"}, "init_kl_coef": 0.1, "rollout": {"temperature": 0.5}},
        PPO | {"init_kl_coef": 0.1},
        PPO | {"critic_model_config": {"shares": "actor"}, "init_kl_coef": 0.0, "kl_sample_rows": 4},
        {"algorithm": {"name": "grpo"}, "init_kl_coef": 0.1, "mini_batch_size": 8},
    ],
    ids=["grpo-kl", "rloo-kl", "grpo", "half-temperature", "ppo-kl", "ppo-shared", "grpo-two-steps"],
)
def test_first_lap_starts_from_the_sampled_policy(config, keys):
    """Before the first update: trainer and sampler agree, the ratio is exactly 1, KL is 0."""
    summary, _, lines = run(config(**keys))
    first = lines[0]
    assert first["rollout/logprob_diff_max"] < 1e-4
    assert first["kl/mean"] == pytest.approx(0, abs=1e-6)
    if "mini_batch_size" not in keys:
        assert first["policy/ratio_max"] == 1.0 and first["policy/clip_fraction"] == 0.0
    for line in lines:
        assert set(REQUIRED) <= line.keys()
        assert [name for name in line if name != "step" and find(name) is None] == []
    assert ("critic/loss" in first) == (keys["algorithm"]["name"] == "ppo")
    assert summary.step == 2 and lines[-1]["step"] == 2
    assert lines[1]["kl/mean"] > 0  # the policy has moved
    assert (Path(summary.run_dir) / "checkpoints" / "step_2" / "actor.safetensors").exists()


def test_gpt2_has_the_same_exact_start(config, tmp_path):
    """Learned positions and default dropout 0.1, the two things a rotary model hides."""
    from tests.tiny import f_bpe, f_gpt2, save

    folder = save(tmp_path / "gpt2", f_gpt2(), f_bpe(template=None))
    _, _, lines = run(
        config(actor_model_config={"model_name_or_path": folder, "dtype": "fp32"}, init_kl_coef=0.1, total_steps=1)
    )
    assert lines[0]["rollout/logprob_diff_max"] < 1e-4 and lines[0]["kl/mean"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("keys", [{}, PPO, {"mini_batch_size": 8}], ids=["grpo", "ppo", "two-steps"])
def test_micro_batch_size_changes_memory_only(config, keys, tmp_path):
    weights = []
    for micro in (1, 4, 8):
        cfg = config(**keys, micro_batch_size=micro, total_steps=1, run_dir=str(tmp_path / str(micro)))
        weights.append(run(cfg)[1])
    same(weights[0], weights[1], 2e-5)
    same(weights[0], weights[2], 2e-5)


def test_workers_and_token_budget_change_nothing(config, tmp_path):
    one = run(config(run_dir=str(tmp_path / "a")))[1]
    same(one, run(config(num_rollout_workers=3, run_dir=str(tmp_path / "b")))[1])
    same(one, run(config(max_tokens_per_micro_batch=40, run_dir=str(tmp_path / "c")))[1], 2e-5)


def test_several_rollouts_of_one_version_are_merged(config):
    summary, _, lines = run(config(rollout_batch_size=8, train_batch_size=16))
    assert lines[0]["policy/optimizer_steps"] == 1 and summary.step == 2


def test_flat_groups_are_skipped_exactly(config, tmp_path, monkeypatch):
    """Rows without gradient are not computed; computing them gives the same weights."""
    keys = {"reward_fn": lambda response_ids, prompt: float(response_ids[0] < 16 and prompt in ("xa", "ab", "bc"))}
    skipped = run(config(**keys, run_dir=str(tmp_path / "a")))
    assert any(line["policy/rows_trained"] < 16 for line in skipped[2])
    from verl.workers.actor import ActorWorker

    monkeypatch.setattr(ActorWorker, "trained_rows", lambda self, batch: [True] * len(batch))
    computed = run(config(**keys, run_dir=str(tmp_path / "b")))
    assert all(line["policy/rows_trained"] == 16 for line in computed[2])
    same(skipped[1], computed[1], 2e-5)


def test_kl_target_aims_at_the_kl_of_a_response(config, tmp_path):
    """Lap 1 has KL 0, so the coefficient falls by a fifth; lap 2 is above the target per response, not per token."""
    keys = {"init_kl_coef": 0.1, "total_steps": 3}
    free = run(config(**keys, run_dir=str(tmp_path / "free")))[2]
    target = free[1]["kl/per_response"] / 2
    assert free[1]["kl/mean"] < target
    lines = run(config(**keys, kl_target=target, kl_horizon=16, run_dir=str(tmp_path / "steered")))[2]
    assert [line["kl/coef"] for line in lines] == pytest.approx([0.1, 0.08, 0.08 * 1.2])


def test_promised_names_are_null_where_there_is_no_value(config):
    _, _, lines = run(config(total_steps=1))
    assert lines[0]["kl/mean"] is None and set(REQUIRED) <= lines[0].keys()


def test_constant_reward_trains_nothing_and_says_so(config):
    before = run(config(total_steps=1, reward_fn=lambda x: 1.0))
    assert before[2][0]["reward/flat_groups"] == 1.0 and before[2][0]["policy/rows_trained"] == 0
    assert before[2][0]["policy/empty_steps"] == 1 and before[2][0]["policy/grad_norm"] == 0


def test_a_failing_reward_stops_the_run_and_says_where(config):
    def broken(response):
        raise ValueError("no such grade")

    with pytest.raises(RunError, match=r"step 1, reward\.score on \S+: .*broken.*no such grade") as caught:
        run(config(reward_fn=broken))
    assert re.search(r"Prompt \d: '<bos>u:\w\w", str(caught.value))  # the prompt's id and text


def test_abstaining_rows_leave_the_loss(config):
    """A row that no reward judged is counted and has no part in loss or statistics."""
    _, _, lines = run(config(reward_fn=lambda response_ids: None if response_ids[0] < 16 else float(response_ids[-1])))
    assert any(line["reward/abstained"] > 0 for line in lines)


def test_unknown_column_of_a_reward_is_refused_before_the_first_step(config):
    with pytest.raises(RequestError, match="grade_level"):
        run(config(reward_fn=lambda response, grade_level: 0.0))


def test_it_learns(config):
    _, _, lines = run(config(rollout_batch_size=32, micro_batch_size=32, group_size=8, total_steps=25))
    first, last = (sum(line["reward/mean"] for line in part) / 5 for part in (lines[:5], lines[-5:]))
    assert last > first + 0.15


def test_lora_trains_adapters_only_and_the_reference_is_the_base(config, tiny):
    cfg = config(
        actor_model_config={"model_name_or_path": tiny, "use_lora": True, "lora_r": 4, "optimizer": {"lr": 1e-2}},
        init_kl_coef=0.1,
    )
    _, weights, lines = run(cfg)
    assert weights and all("lora" in name for name in weights)
    assert lines[0]["kl/mean"] == pytest.approx(0, abs=1e-6) and lines[1]["kl/mean"] > 1e-6
