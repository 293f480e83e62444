"""A tiny model in a folder, and configurations that train it in a second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forks
from tests.tiny import f_bpe, f_llama, save
from verl.config.load import load_config

PROMPTS = [
    {"prompt": p, "answer": a}
    for p, a in zip(("xa", "xb", "xc", "ab", "ba", "bc", "ca", "us"), "abcabcab", strict=True)
]


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """Workers start at once, and runs in this process score in one process: each takes a fifth of a second to start."""
    with forks.warm(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl.rewards.base.default_size", lambda: 1)
        yield


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """By which ``cluster_runs.marked`` finds every process that the test starts."""
    file = tmp_path / "mark"
    file.touch()
    forks.serve()  # it stays, and so must not have the mark
    monkeypatch.setenv(forks.MARK, str(file.resolve()))
    return str(file.resolve())


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return save(tmp_path_factory.mktemp("tiny"), f_llama(), f_bpe(template="bos"))


@pytest.fixture
def config(tiny, tmp_path):
    def make(**keys):
        base = {
            "actor_model_config": {"model_name_or_path": tiny, "dtype": "fp32", "optimizer": {"lr": 1e-3}},
            "dataset": PROMPTS,
            "reward_fn": "tests.trainer.reward:low_ids",
            "algorithm": {"name": "grpo"},
            "rollout_batch_size": 16,
            "micro_batch_size": 4,
            "max_prompt_length": 16,
            "max_response_length": 6,
            "total_steps": 2,
            "run_dir": str(tmp_path / "run"),
            "metrics": {"tensorboard": False},
        }
        base["group_size"] = 4
        return load_config(None, **(base | keys))

    return make
