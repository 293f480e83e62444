"""Whole runs whose answers come from vLLM in the process, or from servers; weights reach them after every update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.rollout import vllm_starts
from tests.rollout.stand_in import SglangStandIn, VllmStandIn
from tests.tiny import f_bpe, save
from tests.trainer import cluster_runs as runs
from tests.trainer.cluster_runs import finished, lines, same_lines, same_weights
from verl.config.load import load_config
from verl.trainer.base import Run

GRPO = {
    "critic_model_config": None, "algorithm": {"name": "grpo"}, "group_size": 4, "init_kl_coef": 0.0, "eval": {},
    "mini_batch_size": 16, "log_level": "INFO", "total_steps": 3,
    "reward_fn": "tests.trainer.reward:even",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Heads of 32, the smallest that vLLM computes on a CPU."""
    tokenizer = f_bpe(template="bos")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    return save(tmp_path_factory.mktemp("model"), LlamaForCausalLM(config), tokenizer)


def actor(model: str, lora: bool) -> dict[str, Any]:
    section: dict[str, Any] = {"model_name_or_path": model, "dtype": "fp32", "optimizer": {"lr": 1e-3}}
    return section | ({"use_lora": True, "lora_r": 8, "optimizer": {"lr": 1e-2}} if lora else {})


def from_the_newest_weights(folder: Path) -> None:
    """The trainer gives every sampled token the log-probability that the engine told; the policy has moved."""
    told = lines(folder)
    assert len(told) == 3 and all(line["rollout/logprob_diff_max"] < 1e-4 for line in told)
    assert all(line["policy/grad_norm"] > 0.01 for line in told)
    samples = lines(folder, "samples.jsonl")
    assert {(s["step"], s["version"]) for s in samples} == {(1, 0), (2, 1), (3, 2)}


# -- vLLM ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_vllm_gives_the_numbers_of_the_native_engine(model: str, tmp_path: Path, lora: bool):
    """Same noise, same densities: the runs are the same to rounding."""
    pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
    keys = GRPO | {"actor_model_config": actor(model, lora)}
    native = finished(model, tmp_path / "native", **keys)
    with vllm_starts.quick():
        vllm = finished(model, tmp_path / "vllm", **keys, rollout={"engine": "vllm"})
    from_the_newest_weights(vllm)
    same_lines(lines(vllm), lines(native))
    same_weights(vllm, native)


# -- servers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.rollout.http.BACK_OFF", 0.05)


@pytest.fixture(params=["openai", "openai-lora", "sglang"])
def server(request: pytest.FixtureRequest, model: str, quick: None) -> Iterator[Any]:
    kind, _, lora = request.param.partition("-")
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made: Any = SglangStandIn(lm) if kind == "sglang" else VllmStandIn(lm, lora=bool(lora))
    made.kind, made.lora = kind, bool(lora)
    yield made
    made.stop()


def test_a_server_samples_from_what_was_trained(model: str, tmp_path: Path, server: Any):
    """It loses its weights in the middle, as a server that restarts does."""
    keys = GRPO | {"actor_model_config": actor(model, server.lora)}
    cfg = load_config(None, **runs.ppo(model, tmp_path, **keys, rollout={"engine": server.kind, "url": server.url}))
    with Run(cfg, console=False) as run:
        run.prepare()
        run.step()
        server.restart()
        run.step()
        run.step()
    from_the_newest_weights(tmp_path / "run")
    assert server.loads >= 5  # the start's, each step's, and once more


def test_rollouts_apart_need_no_policy(model: str, tmp_path: Path, quick: None):
    """A worker that only asks a server holds no model; the actor's weights reach it by the corridor."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    server: Any = VllmStandIn(lm)
    size = sum(p.nbytes for p in lm.parameters())
    try:
        keys = GRPO | {"device_map": {"actor": "cpu:0", "rollout": "cpu:1"}, "actor_model_config": actor(model, False)}
        folder = finished(model, tmp_path, **keys, rollout={"engine": "openai", "url": server.url})
    finally:
        server.stop()
    from_the_newest_weights(folder)
    assert all(size <= line["publish/bytes"] <= 1.1 * size for line in lines(folder))
