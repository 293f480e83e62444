"""Episodes on a GPU: trainer and sampler agree on what the policy sampled between the environment's words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.cluster_runs import lines, train
from tests.trainer.test_environment import config, llama

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_sampler_and_trainer_agree_in_bf16(tmp_path: Path, engine: str):
    if engine == "vllm":
        pytest.importorskip("vllm")
    model = llama(tmp_path / "model", hidden_size=128, head_dim=64)
    actor = {"model_name_or_path": model, "dtype": "bf16", "optimizer": {"lr": 1e-4}}
    rollout = {"engine": engine} | ({"options": {"gpu_memory_utilization": 0.2}} if engine == "vllm" else {})
    cfg = config(model, tmp_path, actor_model_config=actor, rollout=rollout, device_map={"actor": 0})
    told = lines(train(cfg))
    for line in told:
        print(
            {name: line[name] for name in ("response/turns_mean", "response/sampled_mean", "rollout/logprob_diff_mean")}
        )
        assert line["response/turns_mean"] > 1.2 and line["policy/bad_steps"] == 0
        assert line["rollout/logprob_diff_mean"] < 0.03 and line["policy/grad_norm"] > 0
