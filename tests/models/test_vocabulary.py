"""Tokenizers that give ids which a model has no embedding for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from tests.tiny import f_bpe, f_llama, save
from verl.config.errors import RequestError
from verl.config.load import load_config
from verl.config.model import RewardModelConfig
from verl.models.vocabulary import check_embeddings, embedding_rows
from verl.rewards.model import RewardModelScorer
from verl.trainer.base import Run

NUMBERS = r"ids up to 12 \(13 tokens\), but the model has 8 rows of embeddings"


def small(kind: Any = LlamaForCausalLM) -> Any:
    """Eight tokens of F-bpe's thirteen."""
    config = f_llama().config
    config.vocab_size, config.num_labels = 8, 1
    return kind(config)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    return {
        "small": save(tmp_path / "small", small(), f_bpe(template="plain")),
        "large": save(tmp_path / "large", f_llama(), f_bpe(template="plain")),
    }


def prepared(place: Path, actor: Any, algorithm: str = "grpo", **keys: Any) -> None:
    sampled: dict[str, Any] = {"dataset": [{"prompt": "xa"}] * 8, "reward_fn": "tests.trainer.reward:low_ids"}
    if algorithm == "dpo":
        sampled = {"dataset": [{"prompt": "xa", "chosen": "ab", "rejected": "c"}] * 8, "train_batch_size": 4}
    cfg = load_config(
        None,
        **sampled
        | {
            "actor_model_config": {"model_name_or_path": actor, "dtype": "fp32"}, "total_steps": 1,
            "max_prompt_length": 16, "max_response_length": 8,
            "algorithm": {"name": algorithm}, "run_dir": str(place / "run"), "metrics": {"tensorboard": False},
        }
        | keys
    )  # fmt: skip
    with Run(cfg, console=False) as run:
        run.prepare()


@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_a_policy_is_refused_before_anything_is_sampled(
    algorithm: str, folders: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=f"actor_model_config: {folders['small']}: .*{NUMBERS}"):
        prepared(tmp_path, folders["small"], algorithm)


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ("distill", "teacher_model_config"),
        ("prime", "process_reward_model_config"),
        ("ppo", "critic_model_config"),
    ],
)
@pytest.mark.parametrize("own", [True, False], ids=["the same tokenizer", "none"])
def test_so_is_whoever_reads_the_policy_s_tokens(
    algorithm: str, key: str, own: bool, folders: dict[str, str], tmp_path: Path
) -> None:
    if not own:
        for file in Path(folders["small"]).glob("tokenizer*"):
            file.unlink()
    with pytest.raises(RequestError, match=f"{key}: {folders['small']}: .*{NUMBERS}"):
        prepared(tmp_path, folders["large"], algorithm, **{key: {"model_name_or_path": folders["small"]}})


def test_so_is_a_reward_model(tmp_path: Path) -> None:
    name = save(tmp_path, small(LlamaForSequenceClassification), f_bpe())
    with pytest.raises(RequestError, match=f"reward model '{name}': .*{NUMBERS}"):
        RewardModelScorer(RewardModelConfig(model_name_or_path=name), torch.device("cpu"))


def test_rows_of_embeddings(folders: dict[str, str], tmp_path: Path) -> None:
    adapted = get_peft_model(small(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    assert [embedding_rows(source) for source in (folders["small"], small(), adapted)] == [8, 8, 8]
    resized = f_llama()
    resized.resize_token_embeddings(40)
    assert embedding_rows(resized) == 40
    assert embedding_rows(str(tmp_path / "nothing")) is None and embedding_rows(torch.nn.Linear(2, 2)) is None


def test_more_rows_than_tokens_are_usual(caplog: pytest.LogCaptureFixture) -> None:
    check_embeddings("it", 13, f_bpe())
    check_embeddings("it", 32, f_bpe())
    check_embeddings("it", None, f_bpe())
    assert not caplog.records


def test_an_id_behind_a_gap_counts_and_not_the_number_of_tokens() -> None:
    class Gap(type(f_bpe())):  # type: ignore[misc]
        def get_vocab(self) -> dict[str, int]:
            return super().get_vocab() | {"\n": 40}

    tokenizer = f_bpe()
    tokenizer.__class__ = Gap
    with pytest.raises(RequestError, match=r"ids up to 40 \(13 tokens\), but the model has 32 rows"):
        check_embeddings("it", 32, tokenizer)


def test_a_special_token_that_no_text_gets_is_only_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = f_bpe(template="plain")
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    with caplog.at_level(logging.WARNING):
        check_embeddings("it", 13, tokenizer)
    assert "no text may have <image> in it" in caplog.text
    tokenizer.chat_template = "<image>" + tokenizer.chat_template
    with pytest.raises(RequestError, match="ids up to 13"):
        check_embeddings("it", 13, tokenizer)
    tokenizer = f_bpe()
    tokenizer.add_tokens(["<end>"], special_tokens=True)
    tokenizer.eos_token = "<end>"
    with pytest.raises(RequestError, match="ids up to 13"):
        check_embeddings("it", 13, tokenizer)
    tokenizer = f_bpe()
    tokenizer.add_tokens(["zz"])
    with pytest.raises(RequestError, match="ids up to 13"):
        check_embeddings("it", 13, tokenizer)
