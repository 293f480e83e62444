"""A vLLM engine over two devices in whole runs, and with adapters: ``make test-vllm-parallel``; it takes minutes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model

from tests.rollout.test_vllm import ADAPTED, ADAPTED_CLOSE, ADAPTER, GPU, LONG, Engines, llama, worst
from tests.rollout.test_vllm_parallel import BOTH
from tests.rollout_contract import PROMPTS, ask, requests
from tests.trainer.cluster_runs import finished, lines, same_lines, same_weights
from tests.trainer.test_engines_outside import GRPO, actor, from_the_newest_weights
from tests.trainer.test_environment import llama as llama_folder
from verl.models.decoder import adapter_tensors
from verl.rollout.base import Sampling

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm-parallel")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("model"))
    yield made
    made.close()


def test_adapters_are_on_both(engines: Engines) -> None:
    lm = get_peft_model(llama(seed=9), copy.deepcopy(ADAPTER), autocast_adapter_dtype=False).eval()
    with torch.no_grad():
        for tensor in adapter_tensors(lm).values():
            tensor.normal_(std=0.1)
    engine = engines.of(llama(seed=9), adapter=ADAPTER.to_dict(), dtype=ADAPTED, **BOTH)
    engine.load(adapter_tensors(lm).items(), 1)
    asked = requests([*PROMPTS, LONG])
    answers = ask(engine, asked, Sampling(max_new_tokens=8))
    assert worst(lm, answers, asked) < ADAPTED_CLOSE
    with lm.disable_adapter():
        assert worst(lm, answers, asked) > 0.1 + 2 * ADAPTED_CLOSE


SHAPE = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # places, and of the actor
    "apart": ({"device_map": {"actor": "cpu:0", "reward_model": "cpu:0", "rollout": "cpu:1-2"}}, {}),
    "megatron": (
        {"device_map": {"actor": "cpu:0-1"}}, {"engine": "megatron", "fsdp_config": {"tensor_parallel_size": 2}},
    ),
}  # fmt: skip


@pytest.mark.skipif(GPU, reason="of workers on the CPU")
@pytest.mark.parametrize("kind", RUNS)
def test_runs_are_those_of_the_native_engine(tmp_path: Path, kind: str) -> None:
    model = llama_folder(tmp_path / "model", **SHAPE)
    places, section = RUNS[kind]
    keys = GRPO | {"actor_model_config": actor(model, False)}
    native = finished(model, tmp_path / "native", **keys)
    keys |= {"actor_model_config": actor(model, False) | section}
    vllm = finished(model, tmp_path / "vllm", **keys, **places, rollout={"tensor_parallel_size": 2})
    from_the_newest_weights(vllm)
    same_lines(lines(vllm), lines(native))
    same_weights(vllm, native)
