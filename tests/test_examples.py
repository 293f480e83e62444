"""Configuration files that come with the project are valid; the script of the three stages names them."""

from __future__ import annotations

import json
import re
import runpy
import string
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.data.chatml import chatml
from tests.tiny import f_bpe, f_llama, save
from verl.config.load import load_config
from verl.trainer.base import Run

ROOT = Path(__file__).parents[1]
FILES = sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("examples/**/*.yaml"), *ROOT.glob("benchmarks/**/*.yaml")])
STAGES = ROOT / "examples" / "rlhf_three_stages.sh"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_files_load(file):
    assert load_config(file).actor_model_config.model_name_or_path


def test_each_stage_starts_from_what_the_one_before_exports():
    text = STAGES.read_text()
    stages = [load_config(ROOT / name) for name in re.findall(r"verl train (\S+\.yaml)", text)]
    assert [cfg.algorithm.name for cfg in stages] == ["sft", "reward_model", "ppo"]
    exported = dict(re.findall(r"verl export (\S+) (\S+)", text))
    sft, reward, ppo = stages
    assert reward.actor_model_config.model_name_or_path == ppo.actor_model_config.model_name_or_path
    assert exported[sft.run_dir] == ppo.actor_model_config.model_name_or_path
    assert exported[reward.run_dir] == ppo.reward_model_config.model_name_or_path
    assert ppo.reward_weights == [0.0, 1.0]  # the sum is reported, the reward model trains


def test_runs_share_a_reward_server(tmp_path):
    """Two runs are scored by one process, just as by the same rewards of their own."""
    model = save(tmp_path / "model", f_llama(), f_bpe(template="bos"))
    (tmp_path / "rewards.yaml").write_text("reward_fn: [{name: regex, pattern: a|b}]\n")
    command = [sys.executable, str(ROOT / "examples" / "reward_server.py"), str(tmp_path / "rewards.yaml")]
    server = subprocess.Popen([*command, "--port", "0", "--device", "cpu"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        means = []
        served, own = {"name": "http", "url": url}, {"name": "regex", "pattern": "a|b"}
        for reward in (served, served, own):
            cfg = load_config(
                None,
                actor_model_config={"model_name_or_path": model, "dtype": "fp32"},
                dataset=[{"prompt": p} for p in ("xa", "xb", "xc", "ab")],
                algorithm={"name": "grpo"}, group_size=4, rollout_batch_size=16, max_prompt_length=16,
                max_response_length=6, total_steps=1, reward_fn=[reward], metrics={"tensorboard": False},
                run_dir=str(tmp_path / f"run{len(means)}"),
            )  # fmt: skip
            with Run(cfg, console=False) as run:
                run.prepare()
                means.append(run.step().metrics["reward/mean"])
        assert means[0] == means[1] == means[2] and 0 < means[0] < 1
    finally:
        server.kill()
        server.wait()


def test_a_sum_may_be_tried_again(tmp_path, monkeypatch):
    """The environment's words by hand; and a run in which it answers a small model of bytes."""
    from examples.try_again import score, turn

    asked, *said = ({"role": r, "content": c} for r, c in (("user", "2 + 3?"), ("assistant", "4"), ("assistant", "=5")))
    (low,) = turn([asked, said[0]], "5")
    assert low == {"role": "user", "content": "That is too low. Try again."} and turn([asked, said[1]], "5") is None
    assert "too high" in turn([asked, said[1]], "4")[0]["content"]
    assert "say a number" in turn([asked, {"role": "assistant", "content": "well"}], "4")[0]["content"]
    assert score([asked, said[0], low, said[1]], "5") == {"score": 0.5, "first_try": False, "in_the_end": True}
    assert score([asked, said[0]], "5")["score"] == 0.0

    monkeypatch.chdir(ROOT)
    tokenizer = chatml()
    config = f_llama().config.to_dict() | {"vocab_size": len(tokenizer)}
    model = save(tmp_path / "model", LlamaForCausalLM(LlamaConfig.from_dict(config)), tokenizer)
    cfg = load_config(
        ROOT / "examples" / "try_again.yaml",
        actor_model_config={"model_name_or_path": model, "dtype": "fp32"}, rollout_batch_size=8, micro_batch_size=8,
        total_steps=1, max_response_length=256, run_dir=str(tmp_path / "run"), metrics={"tensorboard": False},
        rollout={"stop": [*string.ascii_letters, *string.digits]}, eval={"dataset": None},
    )  # fmt: skip
    with Run(cfg, console=False) as run:
        run.prepare()
        run.train()
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert any("Try again." in s["response"] and 0 in s["response_mask"] for s in samples)
    assert all(s["rewards"].keys() == {"score", "score/first_try", "score/in_the_end"} for s in samples)


def test_a_flow_of_one_s_own_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["custom_flow.py"])
    said = runpy.run_path(str(ROOT / "examples" / "custom_flow.py"), run_name="__main__")["metrics"]
    text = capsys.readouterr().out
    assert "helpful.score" in text and "brief: reward brevity, weight 0.2" in text and text.count("reward/helpful") == 3
    assert said["reward/mean"] == pytest.approx(said["reward/helpful"] + 0.2 * said["reward/brief"])
    assert said["reward/brief"] < 0 and len(Path("runs/default/metrics.jsonl").read_text().splitlines()) == 3
