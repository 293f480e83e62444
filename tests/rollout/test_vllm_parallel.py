"""A vLLM engine over two devices, each a process of vLLM's with its part of the weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.rollout.test_vllm import CLOSE, GPU, Engines, llama, without, worst
from tests.rollout_contract import ask, requests
from verl.config.errors import RunError
from verl.models.naming import own_tensors
from verl.rollout.base import Sampling

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
if GPU and torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs, or none", allow_module_level=True)

BOTH = {"tensor_parallel_size": 2, "gpus": ("0", "1") if GPU else ()}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("model"))
    yield made
    made.close()


def test_new_weights_are_on_both(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every log-probability is that of a plain forward, after each load; some tensors are larger than a bucket. After
    the end no process of the engine is left, nor the memory of the weights' way."""
    before = children()
    monkeypatch.setattr("verl.rollout.vllm.BUCKET", 1000)
    lm, name = llama(0, tied=True), "model.layers.1.mlp.down_proj.weight"
    engine = engines.of(lm, **BOTH)
    for version in (0, 1):
        lm = llama(version, tied=True)
        with pytest.raises(RunError, match=f"{name} is missing"):
            engine.load(without(dict(own_tensors(lm)), name).items(), version)
        with pytest.raises(RunError, match="no whole weights"):
            ask(engine, requests(), Sampling(max_new_tokens=1))
        engine.load(own_tensors(lm), version)
        for sampling in (Sampling(max_new_tokens=8, seed=3), Sampling(max_new_tokens=8, greedy=True)):
            answers = ask(engine, requests(), sampling)
            assert {r.version for r in answers.values()} == {version}
            assert worst(lm, answers, requests()) < CLOSE
    engines.close()
    assert children() == before
    assert not any("verl-weights" in os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.exists())


def children() -> list[psutil.Process]:
    """Of this process, but Python's own, which stays to its end."""
    found = psutil.Process().children(recursive=True)
    return [p for p in found if "resource_tracker" not in " ".join(p.cmdline())]
