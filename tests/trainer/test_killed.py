"""A run that is killed and resumed is, bit for bit, the run that was never stopped."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.ray_starts import ray_cluster, why_not
from tests.trainer import cluster_runs as runs
from tests.trainer.killed import PLACES, child
from tests.trainer.killed import go as train
from verl.checkpoint.store import CheckpointStore


def keys(model: str, folder: Path, **more: Any) -> dict[str, Any]:
    """PPO over 8 prompts, 4 per lap, 2 epochs: 4 laps; rewards with and without an opinion; every lap is saved."""
    base = runs.ppo(model, folder) | {
        "dataset": runs.PROMPTS,
        "reward_fn": "tests.trainer.reward:sparse",
        "rollout_batch_size": 4,
        "mini_batch_size": 2,
        "micro_batch_size": 1,
        "kl_target": 0.1,
        "total_steps": None,
        "total_epochs": 2.0,
        "checkpoint": {"every_steps": 1, "keep": 1},
        "log_level": "INFO",
        "eval": {},
    }
    return base | more


def told(folder: Path) -> list[dict[str, Any]]:
    """Every metric but clocks and memory, and every sample."""
    found = []
    for name in ("metrics.jsonl", "samples.jsonl"):
        for line in runs.lines(folder, name):
            found.append({"file": name} | {k: v for k, v in line.items() if not k.startswith(runs.CLOCKS)})
    return found


def end(folder: Path) -> dict[str, Any]:
    """Size and checksum of weights and optimizers after the last step."""
    checkpoint = CheckpointStore(folder / "checkpoints", 1).load()
    assert checkpoint.step == 4
    return {name: entry for name, entry in checkpoint.files.items() if name.startswith(("actor", "critic"))}


def assert_same_run(folder: Path, whole: Path) -> None:
    for mine, theirs in zip(told(folder), told(whole), strict=True):
        assert mine == theirs, {key: (mine.get(key), theirs.get(key)) for key in mine if mine[key] != theirs.get(key)}
    assert end(folder) == end(whole)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(keys(model, folder), "nowhere")
    return folder / "run"


def test_the_run_is_one_that_could_go_wrong(whole):
    """Rewards without an opinion are counted and not averaged, a sparse number has its own count, KL is steered."""
    lines = runs.lines(whole)
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and lines[-1]["data/epoch"] == 2
    assert 0 < sum(line["reward/abstained"] for line in lines) < 16
    assert all(line["reward/sparse/count"] == 4 - line["reward/abstained"] for line in lines)
    assert any(0 < line.get("extra/sparse/first/count", 0) < line["reward/sparse/count"] for line in lines)
    assert len({line["kl/coef"] for line in lines}) > 2
    assert "NaN" not in (whole / "metrics.jsonl").read_text()


@pytest.fixture
def cluster() -> Iterator[None]:
    """A Ray cluster of this machine, which the runs that are started find."""
    if reason := why_not():
        pytest.skip(reason)
    with ray_cluster(cpus=1):  # as many processes are started before they are asked for
        yield


def killed_everywhere(given: dict[str, Any], folder: Path, places: Collection[str] = PLACES, **how: Any) -> None:
    """A run that is killed at one place after the other, each time going on from what stands, and then ends."""
    for place, (_, stands) in ((place, PLACES[place]) for place in places):
        status = child(given, place, **how)
        assert status == (0 if place == "nowhere" else -signal.SIGKILL), place
        store = CheckpointStore(folder / "checkpoints", 1)
        assert store.latest() == stands, place
        assert stands is None or store.load().step == stands  # every checksum
    assert sorted(p.name for p in store.root.iterdir()) == ["latest", "step_4"]


def test_killed_and_resumed(model, whole, tmp_path):
    killed_everywhere(keys(model, tmp_path), tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)


class Bomb:
    """Creates ``marker`` when unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self._marker,)


@pytest.mark.timeout(600)
def test_killed_and_resumed_on_ray(model, whole, tmp_path, cluster):
    """Its worker is an actor of a cluster. What comes in by an open port is never unpickled."""
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(Bomb(marker)))
    marker.unlink()
    given = keys(model, tmp_path, cluster={"backend": "ray"})
    places = ("in an epoch", "in a save", "nowhere")  # a start of Ray costs seconds
    killed_everywhere(given, tmp_path / "run", places, bomb=pickle.dumps(Bomb(marker)))
    assert_same_run(tmp_path / "run", whole)
    assert not marker.exists()


def test_a_checkpoint_of_four_workers_goes_on_with_one_two_and_eight(model, tmp_path):
    """Gradients are summed in another order then, so this is equal up to rounding."""
    sizes = {"rollout_batch_size": 8, "mini_batch_size": 8, "total_epochs": None, "total_steps": 2}
    sizes |= {"checkpoint": {"every_steps": 1, "keep": 2}, "algorithm": {"name": "ppo"}}
    graded = {"reward_model": "cpu:0"}
    (tmp_path / "four").mkdir()
    train(keys(model, tmp_path / "four", **sizes, device_map={"actor": "cpu:0-3", **graded}), "nowhere")
    four = tmp_path / "four" / "run"
    for count, devices in ((1, "cpu:0"), (2, "cpu:0-1"), (8, "cpu:0-7")):
        folder = tmp_path / str(count)
        _with_first_step_only(four, folder / "run")
        train(keys(model, folder, **sizes, device_map={"actor": devices, **graded}), "nowhere")
        assert f"{count} workers" in (folder / "run" / "logs" / "controller.log").read_text() or count == 1
        runs.same_numbers(folder / "run", four)
        runs.same_weights(folder / "run", four)


def _with_first_step_only(source: Path, target: Path) -> None:
    """What the run's folder was after its first step."""
    shutil.copytree(source, target)
    shutil.rmtree(target / "checkpoints" / "step_2")
    shutil.rmtree(target / "logs")
    assert json.loads((target / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1
