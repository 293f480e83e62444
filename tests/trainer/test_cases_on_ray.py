"""PPO on one worker of a Ray cluster, and G16, G17, G18 and G23 there: rewards that say nothing, hang or miscount."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.ray_starts import ray_cluster, why_not
from tests.trainer import cluster_runs as runs
from tests.trainer.cluster_runs import finished, lines, same_numbers, same_weights
from verl.cli.main import main

GRPO = {
    "critic_model_config": None, "algorithm": {"name": "grpo"}, "group_size": 4, "eval": {}, "mini_batch_size": 8,
    "micro_batch_size": 4, "max_tokens_per_micro_batch": 30, "log_level": "INFO", "total_steps": 2,
    "reward_fn": ["tests.trainer.reward:sparse", "tests.trainer.hard_rewards:stuck"], "reward_failure": "drop",
    "reward_timeout": 1.0,
}  # fmt: skip
RAY = {"cluster": {"backend": "ray"}}
TWO = RAY | {"device_map": {"actor": "cpu:0-1"}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    if reason := why_not():
        pytest.skip(reason)
    with ray_cluster():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.small(tmp_path_factory.mktemp("small"))


@pytest.fixture
def train(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    """The command with these keys, into ``ray/run``: its exit status, and what it said."""

    def command(**keys: Any) -> tuple[int, str]:
        folder = tmp_path / "ray"
        folder.mkdir()
        (folder / "train.yaml").write_text(yaml.safe_dump(runs.ppo(model, folder, **keys)))
        monkeypatch.setattr(sys, "argv", ["verl", "train", str(folder / "train.yaml")])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, "".join(capsys.readouterr())

    return command


@pytest.mark.timeout(400)
def test_one_worker_gives_the_numbers_of_one_process(model: str, tmp_path: Path, cluster: None, train: Callable):
    code, said = train(**RAY)
    assert code == 0, said
    one = finished(model, tmp_path / "one")
    same_numbers(tmp_path / "ray" / "run", one)
    same_weights(tmp_path / "ray" / "run", one)
    assert [path.name for path in (tmp_path / "ray" / "run" / "logs").glob("worker_*.log")] == ["worker_0.log"]


@pytest.mark.timeout(400)
def test_g17_g18_g23_the_numbers_of_one_process(model: str, tmp_path: Path, cluster: None, train: Callable):
    """Some rows have no opinion, some hang until they are cut off, and passes differ in rows from rank to rank."""
    code, said = train(**GRPO | TWO)
    assert code == 0, said
    one = finished(model, tmp_path / "one", **GRPO)
    told = lines(one)
    assert sum(line["reward/timed_out"] for line in told) > 0 and sum(line["reward/dropped"] for line in told) > 0
    assert all(0 < line["reward/sparse/count"] < 16 for line in told)
    same_numbers(tmp_path / "ray" / "run", one)
    same_weights(tmp_path / "ray" / "run", one)


@pytest.mark.timeout(400)
def test_g16_a_miscounting_reward_ends_the_run(cluster: None, train: Callable):
    code, said = train(**GRPO | TWO | {"reward_fn": "tests.trainer.hard_rewards:one_for_all"})
    assert code == 1, said
    assert "step 1, reward.score on cpu (worker " in said and "one_for_all" in said
    assert "expected 4 values" in said and "received 1" in said and "Traceback" not in said
