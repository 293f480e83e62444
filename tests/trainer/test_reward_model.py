"""PPO against a Hugging Face reward model, on a policy in the manner of Llama-2 base: no pad token, no template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.rewards.test_model import deberta, word_tokenizer
from verl.rewards.base import RewardRow
from verl.rewards.model import RewardModelScorer
from verl.trainer.base import Run

LIMIT = 9  # tokens of [CLS] question [SEP] answer [SEP]
QUESTIONS = ["a b c a b", "a", "b", "c b", "a c", "b c", "c", "a b c b a c a b"]


@pytest.fixture
def folders(tmp_path):
    policy = tiny.save(tmp_path / "policy", tiny.f_llama(), tiny.f_bpe(template=None, pad=None))
    return policy, tiny.save(tmp_path / "reward", deberta(), word_tokenizer())


@pytest.fixture
def cfg(config, folders):
    policy, reward = folders
    return config(
        algorithm={"name": "ppo"}, group_size=1, init_kl_coef=0.1, max_response_length=6,
        actor_model_config={"model_name_or_path": policy, "dtype": "fp32", "optimizer": {"lr": 1e-3}},
        reward_fn=[], reward_model_config={"model_name_or_path": reward, "max_length": LIMIT, "micro_batch_size": 3},
        dataset=[{"prompt": q} for q in QUESTIONS],
    )  # fmt: skip


def test_ppo_trains_on_scores_of_question_answer_pairs(cfg, caplog, monkeypatch):
    monkeypatch.setattr("verl.runtime.collect.SHOWN", 99)
    caplog.set_level("INFO", "verl")
    with Run(cfg, console=False) as run:
        run.prepare()
        assert run.tokenizer.pad_token is None and run.tokenizer.chat_template is None
        before = [p.detach().clone() for p in run.controller.workers.trained.parameters()]
        frozen = [p.detach().clone() for p in run.controller.workers.rewards._models["reward_model"].model.parameters()]
        result = run.step()
        run.step()
        after = list(run.controller.workers.trained.parameters())
        still = list(run.controller.workers.rewards._models["reward_model"].model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(frozen, still, strict=True))
    assert "no pad token" in caplog.text and "no chat template" in caplog.text

    rows = result.collected.rows
    ids = [result.collected.shown[i].ids.tolist() for i in range(len(rows))]
    texts = [run.tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    own = RewardModelScorer(cfg.reward_model_config, torch.device("cpu"))
    again = [
        RewardRow(r.id, "", "", text, (), (), "stop", {"prompt": r.draw.prompt.fields["prompt"]})
        for r, text in zip(rows, texts, strict=True)
    ]
    assert result.collected.scores.totals == pytest.approx(own.score(again), abs=1e-5)

    words = [len(own.tokenizer(row.fields["prompt"], row.response)["input_ids"]) for row in again]
    cut = sum(length > LIMIT for length in words)
    assert 0 < cut < len(rows)
    first, second = (json.loads(line) for line in (Path(cfg.run_dir) / "metrics.jsonl").read_text().splitlines())
    assert first["reward/truncated"] == cut
    assert first["kl/mean"] == pytest.approx(0, abs=1e-6) and second["kl/mean"] > 0
    assert first["critic/loss"] > 0
