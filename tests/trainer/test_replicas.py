"""Rollouts on devices of their own: an engine on each, and so many times the rows in the same time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import f_bpe, f_llama, save
from tests.trainer.cluster_runs import lines, train
from tests.trainer.conftest import PROMPTS
from verl.config.load import load_config

SECONDS = 0.05  # of one pass of the model, however many rows are in it
SLOW = f"""
import time
from transformers import LlamaForCausalLM

class SlowLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.register_forward_pre_hook(lambda *_: time.sleep({SECONDS}))
"""


@pytest.fixture
def slow(tmp_path: Path) -> str:
    """A model whose passes take a fixed time and no processor: only what runs side by side is faster."""
    folder = tmp_path / "slow"
    save(folder, f_llama(), f_bpe(template="bos"))
    (folder / "modeling_slow.py").write_text(SLOW)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["SlowLlama"], "auto_map": {"AutoModelForCausalLM": "modeling_slow.SlowLlama"}}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def told(slow: str, folder: Path, **keys: Any) -> list[dict[str, Any]]:
    """Metrics of three laps of 32 rows, of which an engine decodes four side by side."""
    actor = {"model_name_or_path": slow, "trust_remote_code": True, "dtype": "fp32", "optimizer": {"lr": 1e-3}}
    base: dict[str, Any] = {
        "actor_model_config": actor, "dataset": PROMPTS, "reward_fn": "tests.trainer.reward:low_ids",
        "algorithm": {"name": "grpo"}, "rollout_batch_size": 32, "group_size": 4, "max_prompt_length": 16,
        "max_response_length": 6, "total_steps": 3, "run_dir": str(folder), "metrics": {"tensorboard": False},
        "rollout": {"max_rows": 4}, "gradient_checkpointing": False, "checkpoint": {"every_steps": 0},
    }  # fmt: skip
    return lines(train(load_config(None, **base | keys)))


def test_four_engines_sample_nearly_four_times_the_rows(slow: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Through ``Run``: one engine, then four on workers of their own. The rows are the same."""
    one = told(slow, tmp_path / "one")
    four = told(slow, tmp_path / "four", num_rollout_workers=4, device_map={"actor": "cpu:0", "rollout": "cpu:0-3"})
    for mine, other in zip(four, one, strict=True):
        assert mine["reward/mean"] == pytest.approx(other["reward/mean"])
        assert mine["response/length_mean"] == other["response/length_mean"]
    rates = [32 / min(lap["time/generate"] for lap in laps[1:]) for laps in (one, four)]  # the first warms up
    with capsys.disabled():
        print(f"\nrows/s, one engine {rates[0]:.1f}, four {rates[1]:.1f}: {rates[1] / rates[0]:.2f} x")
    assert rates[1] > 2.5 * rates[0]  # 3.6 on a quiet machine; this one's two cores may have other work
