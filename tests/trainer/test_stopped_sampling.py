"""A signal while rows are sampled: the lap is dropped at once, and the resumed run is the one that nobody stopped."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.cluster_runs import CLOCKS, ppo, small
from verl.config.errors import RunError
from verl.config.load import load_config
from verl.trainer.base import Run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small(tmp_path_factory.mktemp("model"))


def lines(folder: Path) -> list[dict[str, float]]:
    read = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{n: v for n, v in line.items() if not n.startswith(CLOCKS)} for line in read]


def stopped(run: Run, gate: Path, during: int) -> tuple[Any, float]:
    """Trains; from lap ``during`` on rewards hang, and as soon as one does the signal comes. How long it took then."""
    lap, sent = run.controller.source.collect, []

    async def gated(step: int, **how: Any) -> Any:
        if step == during:
            gate.touch()
            threading.Thread(target=send, daemon=True).start()
        return await lap(step, **how)

    def send() -> None:
        while not Path(f"{gate}.waits").exists():
            time.sleep(0.01)
        sent.append(time.monotonic())
        run._on_signal(signal.SIGTERM)

    run.controller.source.collect = gated  # type: ignore[method-assign]
    summary = run.train()
    return summary, time.monotonic() - sent[0]


def broken(response: str) -> float:
    raise ValueError("a typo")


def test_a_reward_that_fails_ends_the_sampling(model: str, tmp_path: Path) -> None:
    """The first group's, while the others are still to come."""
    cfg = load_config(None, **ppo(model, tmp_path, eval={}, reward_fn="tests.trainer.test_stopped_sampling:broken"))
    with Run(cfg, console=False) as run:
        run.prepare()
        rollout: Any = run.controller.workers.rollout
        generate, came = rollout.generate, []

        async def slow(*args: Any) -> AsyncIterator[Any]:
            async for row in generate(*args):
                came.append(row.id)
                yield row
                await asyncio.sleep(2.0 if len(came) > 1 else 0)

        rollout.generate = slow
        with pytest.raises(RunError, match="a typo"):
            run.step()
        assert len(came) < 16  # of 16; a slow machine takes seconds to start what scores


@pytest.mark.parametrize(
    "devices", [{"actor": "cpu:0"}, {"actor": "cpu:0-1", "critic": "cpu:1-2"}], ids=["one", "three"]
)
def test_the_resumed_run_is_the_one_that_nobody_stopped(model: str, tmp_path: Path, devices: dict[str, str]) -> None:
    keys = {"device_map": devices, "total_steps": 3, "reward_timeout": None}
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    with Run(load_config(None, **ppo(model, tmp_path / "whole", **keys)), console=False) as run:
        run.prepare()
        run.train()
    cfg = load_config(None, **ppo(model, tmp_path / "cut", **keys))
    gate = tmp_path / "cut" / "gate"
    with Run(cfg, console=False) as run:
        run.prepare()
        summary, seconds = stopped(run, gate, during=2)
        assert summary.stopped_by is signal.SIGTERM and summary.step == 1 and seconds < 20
        assert run.store.steps() == [1]
        gate.unlink()
    with Run(cfg, console=False) as run:
        run.prepare(run.store.load())
        assert run.train().step == 3
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")


def test_before_the_first_step_nothing_is_saved(model: str, tmp_path: Path) -> None:
    cfg = load_config(None, **ppo(model, tmp_path, eval={}, reward_timeout=None))
    with Run(cfg, console=False) as run:
        run.prepare()
        summary, _ = stopped(run, tmp_path / "gate", during=1)
        assert summary.stopped_by is signal.SIGTERM and summary.step == 0 and run.store.empty
        (tmp_path / "gate").unlink()


def test_rows_sampled_ahead_are_dropped_and_the_step_that_trains_ends(model: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "device_map": {"actor": "cpu:0", "rollout": "cpu:1"}, "algorithm": {"name": "grpo"}, "group_size": 4,
        "critic_model_config": None, "init_kl_coef": 0.0, "max_staleness": 1, "eval": {}, "reward_timeout": None,
    }  # fmt: skip
    cfg = load_config(None, **ppo(model, tmp_path, **keys))
    with Run(cfg, console=False) as run:
        run.prepare()
        summary, seconds = stopped(run, tmp_path / "gate", during=3)
        assert summary.stopped_by is signal.SIGTERM and summary.step == 2 and seconds < 20
        drawn = run.store.load().json("state")["controller"]["draws"]
        assert drawn == 2 * 4
        (tmp_path / "gate").unlink()
    with Run(cfg, console=False) as run:
        run.prepare(run.store.load())
        assert run.train().step == 5
