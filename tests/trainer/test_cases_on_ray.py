"""G16, G17, G18 and G23 on a Ray cluster: rewards that say nothing, hang or miscount, and a token budget per pass."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.ray_starts import ray_cluster, why_not
from tests.trainer import cluster_runs as runs
from tests.trainer.cluster_runs import finished, lines, same_numbers, same_weights

GRPO = {
    "critic_model_config": None, "algorithm": {"name": "grpo"}, "group_size": 4, "eval": {}, "mini_batch_size": 8,
    "micro_batch_size": 4, "max_tokens_per_micro_batch": 30, "log_level": "INFO", "total_steps": 2,
    "reward_fn": ["tests.trainer.reward:sparse", "tests.trainer.hard_rewards:stuck"], "reward_failure": "drop",
    "reward_timeout": 1.0,
}  # fmt: skip
TWO = {"cluster": {"backend": "ray"}, "device_map": {"actor": "cpu:0-1"}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    if reason := why_not():
        pytest.skip(reason)
    with ray_cluster():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.small(tmp_path_factory.mktemp("small"))


def train(model: str, folder: Path, **keys: Any) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump(runs.ppo(model, folder, **GRPO | TWO | keys)))
    command = [sys.executable, "-m", "verl.cli.main", "train", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.timeout(400)
def test_g17_g18_g23_the_numbers_of_one_process(model: str, tmp_path: Path, cluster: None):
    """Some rows have no opinion, some hang until they are cut off, and passes differ in rows from rank to rank."""
    ended = train(model, tmp_path / "ray")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    one = finished(model, tmp_path / "one", **GRPO)
    told = lines(one)
    assert sum(line["reward/timed_out"] for line in told) > 0 and sum(line["reward/dropped"] for line in told) > 0
    assert all(0 < line["reward/sparse/count"] < 16 for line in told)
    same_numbers(tmp_path / "ray" / "run", one)
    same_weights(tmp_path / "ray" / "run", one)


@pytest.mark.timeout(400)
def test_g16_a_miscounting_reward_ends_the_run(model: str, tmp_path: Path, cluster: None):
    ended = train(model, tmp_path / "ray", reward_fn="tests.trainer.hard_rewards:one_for_all")
    said = ended.stdout + ended.stderr
    assert ended.returncode == 1, said
    assert "step 1, reward.score on cpu (worker " in said and "one_for_all" in said
    assert "expected 4 values" in said and "received 1" in said and "Traceback" not in said
