"""G08 in whole runs: where training goes on from an adapter, the anchor of every algorithm is that policy."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.models.test_adapters import trained_adapter
from tests.tiny import f_bpe, f_llama, save
from tests.trainer.test_algorithms import PAIRS, write
from verl.config.load import load_config
from verl.config.recipes import RECIPES
from verl.trainer.base import Run


@pytest.fixture
def adapter(tmp_path):
    """An adapter whose B isn't 0, beside the tokenizer."""
    tokenizer = f_bpe(template="plain")
    base = save(tmp_path / "base", f_llama(), tokenizer)
    trained_adapter(LlamaForCausalLM.from_pretrained(base)).save_pretrained(tmp_path / "sft")
    tokenizer.save_pretrained(tmp_path / "sft")
    return str(tmp_path / "sft")


@pytest.mark.parametrize("name", ["grpo", "ppo", "dpo", "ipo", "kto", "online_dpo"])
def test_the_anchor_is_the_starting_policy_and_never_moves(adapter, tmp_path, name):
    keys = {
        "actor_model_config": {"model_name_or_path": adapter, "dtype": "fp32", "optimizer": {"lr": 1e-2}},
        "algorithm": {"name": name}, "max_prompt_length": 16, "max_response_length": 8, "micro_batch_size": 4,
        "total_steps": 3, "run_dir": str(tmp_path / "run"), "metrics": {"tensorboard": False}, "shuffle": False,
    }  # fmt: skip
    if RECIPES[name].samples:
        keys |= {"dataset": [{"prompt": p} for p, *_ in PAIRS], "reward_fn": "tests.trainer.reward:low_ids"}
        keys |= {"rollout_batch_size": 16, "group_size": 1 if name == "ppo" else 4}
        keys |= {} if name == "online_dpo" else {"init_kl_coef": 0.1}
    else:
        keys |= {"dataset": write(tmp_path, RECIPES[name].data), "train_batch_size": 4}
    with Run(load_config(None, **keys), console=False) as run:
        run.prepare()
        policy = run.controller.workers.trained
        ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
        probe = lambda: logits(policy, ids)  # noqa: E731
        before, start = anchor(policy, ids), probe()
        torch.testing.assert_close(before, start, rtol=0, atol=1e-6)
        lines = [run.step().metrics for _ in range(3)]
        assert torch.equal(anchor(policy, ids), before)
        assert not torch.equal(probe(), start)
    if "kl/mean" in lines[0] and lines[0]["kl/mean"] is not None:
        assert abs(lines[0]["kl/mean"]) < 1e-6 and abs(lines[-1]["kl/mean"]) > 1e-6
    expected = {"dpo": math.log(2), "online_dpo": math.log(2), "ipo": 25.0, "kto": 0.5}
    if name in expected:
        assert lines[0]["policy/loss"] == pytest.approx(expected[name], rel=1e-5)
        assert lines[0]["preference/margin"] == pytest.approx(0, abs=1e-5)


def anchor(policy, ids):
    with policy.as_reference():
        return logits(policy, ids)


@torch.no_grad()
def logits(policy, ids):
    from verl.batch import Ragged
    from verl.models.packing import pack

    packed = pack(Ragged.from_rows([ids[0, :2]]), Ragged.from_rows([ids[0, 2:]]))
    return policy.logits(policy.hidden(packed.ids, packed.positions, packed))
