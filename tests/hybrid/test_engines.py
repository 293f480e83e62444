"""What engines on two ranks sample after a publish is what a fresh engine samples from the exported weights."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.engines.ranks import run
from tests.forks import FORKS
from tests.hybrid.engines import bereft, corrupted, judge, model, samples


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return model(tmp_path / "model")


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_engines_sample_from_what_was_published(folder: str, lora: bool):
    judge(run(2, samples, folder, "native", lora, torch.float32))


@pytest.mark.parametrize("which", [1, 2], ids=["weights", "checksums"])
def test_a_damaged_message_stops_generation(folder: str, which: int):
    (fine, _), (damaged, generation) = run(2, corrupted, folder, which)
    assert fine == "" and "is not on rank 1 as it left rank 0: 1 of" in damaged
    assert "the engine has no whole weights: loading version 1 failed" in generation


def test_whose_sender_died_does_not_generate(folder: str, tmp_path: Path):
    here, there = FORKS.Pipe()
    meet = f"file://{tmp_path}/meet"
    ranks = [FORKS.Process(target=bereft, args=(rank, folder, meet, there), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    assert here.poll(90), "no answer"
    sampled, seconds, published, generation = here.recv()
    for rank in ranks:
        rank.join(20)
    assert sampled and seconds < 30 and published and ranks[1].exitcode == -signal.SIGKILL
    assert generation == "RunError: the engine has no whole weights: loading version 1 failed"
