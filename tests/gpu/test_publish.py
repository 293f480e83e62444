"""Publishes from two GPUs to engines on both: what they sample is what a fresh engine samples from the export."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.engines.ranks import run
from tests.hybrid.engines import corrupted, judge, model, samples

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
BOTH = "cpu:gloo,cuda:nccl"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return model(tmp_path / "model")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_native_engines_sample_from_what_was_published(folder: str, lora: bool, dtype: torch.dtype):
    judge(run(2, samples, folder, "native", lora, dtype, backend=BOTH))


@pytest.mark.timeout(400)
def test_vllm_samples_from_what_was_published(folder: str):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM, which isn't installed")
    judge(run(2, samples, folder, "vllm", False, torch.bfloat16, backend=BOTH, timeout=380))


@pytest.mark.parametrize("which", [1, 2], ids=["weights", "checksums"])
def test_a_damaged_message_stops_the_run(folder: str, which: int):
    """Rank 0's message loses a bit; rank 1 says where, and doesn't generate with what it has."""
    (fine, _), (damaged, generation) = run(2, corrupted, folder, which, backend=BOTH)
    assert fine == "" and "is not on rank 1 as it left rank 0: 1 of" in damaged
    assert "the engine has no whole weights: loading version 1 failed" in generation
