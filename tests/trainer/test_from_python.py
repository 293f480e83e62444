"""Runs from Python: in a notebook's event loop, resumed, failed, with an algorithm of the script's own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.conftest import PROMPTS
from verl.algorithms.advantages import ESTIMATORS
from verl.config.errors import DataError, RequestError, RunError
from verl.config.recipes import RECIPES, Recipe
from verl.data.loader import PreferenceDataset
from verl.runtime.host import Host
from verl.trainer import PPOTrainer, RLTrainer
from verl.trainer.base import Run

SHORT: dict[str, Any] = {
    "rollout_batch_size": 8, "group_size": 4, "micro_batch_size": 4, "max_prompt_length": 16,
    "max_response_length": 4, "metrics": {"tensorboard": False}, "dataset": PROMPTS,
}  # fmt: skip


def low(response_ids: list[int]) -> float:
    return sum(i < 16 for i in response_ids) / len(response_ids)


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_within_an_event_loop(tiny: str, tmp_path: Path) -> None:
    """As a notebook's cells are."""

    async def cell() -> int:
        with RLTrainer(tiny, reward_fn=low, num_rollout_steps=3, run_dir=str(tmp_path / "a"), **SHORT) as trainer:
            assert trainer.step()["reward/mean"] is not None
            return trainer.train().step

    assert asyncio.run(cell()) == 3


def test_a_run_with_a_lambda_is_resumed(tiny: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "reward_fn": lambda response_ids: low(response_ids),
        "run_dir": str(tmp_path / "a"),
        **SHORT,
    }
    assert RLTrainer(tiny, num_rollout_steps=2, **keys).train().step == 2
    with pytest.raises(RequestError, match="resume=True"):
        RLTrainer(tiny, num_rollout_steps=4, **keys).train()
    assert RLTrainer(tiny, num_rollout_steps=4, resume=True, **keys).train().step == 4
    assert steps(tmp_path / "a") == [1, 2, 3, 4]
    with pytest.raises(RequestError, match="run_dir="):
        RLTrainer(tiny, reward_fn=low, resume=True, **SHORT).train()


def test_a_failed_step_closes_the_run(tiny: str, tmp_path: Path) -> None:
    """Its folder and the log are free for the next one."""

    def fails(response: str) -> float:
        raise ValueError("a typo")

    handlers = list(logging.getLogger("verl").handlers)
    trainer = RLTrainer(tiny, reward_fn=fails, run_dir=str(tmp_path / "a"), **SHORT)
    with pytest.raises(RunError, match="a typo"):
        trainer.step()
    assert logging.getLogger("verl").handlers == handlers
    other = RLTrainer(tiny, reward_fn=low, run_dir=str(tmp_path / "a"), overwrite=True, total_steps=2, **SHORT)
    other.step()
    third = RLTrainer(tiny, reward_fn=low, run_dir=str(tmp_path / "a"), overwrite=True, **SHORT)
    with pytest.raises(RequestError, match=r"an earlier trainer of this process: close\(\) that one first"):
        third.step()
    other.close()


@pytest.mark.parametrize("notebook", [False, True])
def test_two_trainers_side_by_side_have_a_log_each(
    notebook: bool, tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of what their hosts' threads tell, too; what comes from neither is in both."""

    log = logging.getLogger("verl.test")

    def trainer(name: str, level: str) -> RLTrainer:
        class Optimizer(torch.optim.SGD):
            def __init__(self, parameters: Any, lr: float) -> None:
                super().__init__(parameters, lr)
                log.warning("made for %s", name)

            def step(self, closure: Any = None) -> Any:
                log.warning("a step of %s", name)
                return super().step(closure)

        def some(response_ids: list[int]) -> float:
            if response_ids[0] % 2:
                raise ValueError(f"typo {name}")
            return low(response_ids)

        return RLTrainer(
            tiny, reward_fn=some, reward_failure="default", num_rollout_steps=2, run_dir=str(tmp_path / name),
            log_level=level, actor_model_config={"optimizer": {"name": Optimizer}}, **SHORT,
        )  # fmt: skip

    def both() -> None:
        ada, bob = trainer("ada", "INFO"), trainer("bob", "WARNING")
        for each in (ada, bob, ada):
            each.step()
        log.warning("from neither")
        for each in (ada, bob):
            each.run.save_at_end()
            each.close()

    async def cell() -> None:
        both()

    asyncio.run(cell()) if notebook else both()
    logs = {name: (tmp_path / name / "logs" / "controller.log").read_text() for name in ("ada", "bob")}
    for name, text in logs.items():
        assert all(words in text for words in (f"a step of {name}", f"typo {name}", "from neither"))
    assert "bob" not in logs["ada"] and "ada" not in logs["bob"]
    assert f"saved {tmp_path / 'ada' / 'checkpoints' / 'step_2'}" in logs["ada"] and " INFO " not in logs["bob"]
    assert capsys.readouterr().out.count("made for bob") == 1  # while it loads, on the other's console


def test_laps_before_a_failed_step_are_saved(tiny: str, tmp_path: Path) -> None:
    broken: list[bool] = []

    def sometimes(response_ids: list[int]) -> float:
        if broken:
            raise ValueError("a typo")
        return low(response_ids)

    keys: dict[str, Any] = {"run_dir": str(tmp_path / "a"), "num_rollout_steps": 4, "reward_fn": sometimes, **SHORT}
    trainer = RLTrainer(tiny, **keys)
    trainer.step(), trainer.step()
    broken.append(True)
    with pytest.raises(RunError, match="a typo"):
        trainer.step()
    broken.clear()
    assert RLTrainer(tiny, resume=True, **keys).train().step == 4
    assert steps(tmp_path / "a") == [1, 2, 3, 4]
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    keys |= {"checkpoint": {"every_steps": 1}}
    with pytest.raises(RequestError, match="is a disk not mounted"):
        RLTrainer(tiny, resume=True, **keys).train()
    assert steps(tmp_path / "a") == [1, 2, 3, 4]


def best_of(scores: Tensor, group: Tensor) -> Tensor:
    """The script's own."""
    advantages = torch.zeros_like(scores)
    for g in group.unique():
        rows = group == g
        advantages[rows] = scores[rows] - scores[rows].max()
    return advantages


@pytest.mark.parametrize("during", ["sampling", "training"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("within", [False, True], ids=["", "within an event loop"])
def test_a_step_that_is_interrupted_closes_the_run(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: str, number: signal.Signals, within: bool
) -> None:
    """A lap that samples is dropped, one that trains ends; both are saved, and the next trainer goes on."""
    keys: dict[str, Any] = {"reward_fn": low, "run_dir": str(tmp_path / "a"), "num_rollout_steps": 3, **SHORT}
    trainer = RLTrainer(tiny, **keys)

    def step() -> Any:
        async def cell() -> Any:
            return trainer.step()

        return asyncio.run(cell()) if within else trainer.step()

    step()
    method = getattr(Host, "generate" if during == "sampling" else "run")

    def slow(host: Host, *given: Any) -> Any:
        if during == "sampling" or given[0].op == "update":
            threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
            time.sleep(0.5)
        return method(host, *given)

    monkeypatch.setattr(Host, method.__name__, slow)
    with pytest.raises(KeyboardInterrupt if number is signal.SIGINT else SystemExit):
        step()
    monkeypatch.undo()
    done = [1] if during == "sampling" else [1, 2]
    assert steps(tmp_path / "a") == done
    assert (tmp_path / "a" / "checkpoints" / "latest").read_text().strip() == f"step_{done[-1]}"
    trainer = RLTrainer(tiny, resume=True, **keys)
    assert trainer.train().step == 3 and steps(tmp_path / "a") == [1, 2, 3]


@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0-1"])
def test_an_algorithm_of_ones_own_is_on_every_worker(
    tiny: str, tmp_path: Path, devices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ESTIMATORS, "best_of", best_of)
    recipe = Recipe("minus the group's best", "best_of", needs=frozenset({"reward", "group"}))
    monkeypatch.setitem(RECIPES, "best_of", recipe)
    keys = SHORT | {"algorithm": "best_of", "device_map": {"actor": devices}, "run_dir": str(tmp_path / "a")}
    with RLTrainer(tiny, reward_fn="tests.trainer.reward:low_ids", **keys) as trainer:
        assert trainer.step()["policy/grad_norm"]


def test_an_overwritten_folder_keeps_its_users_files(tiny: str, tmp_path: Path) -> None:
    pairs = [{"prompt": "xa", "chosen": "ab", "rejected": "b"}, {"prompt": "xb", "chosen": "ca", "rejected": "us"}] * 2
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    keys: dict[str, Any] = {
        "batch_size": 8, "run_dir": str(tmp_path / "a"), "total_steps": 1,
        "dataset": PreferenceDataset(str(tmp_path / "pairs.jsonl")),
    }  # fmt: skip
    more = {k: v for k, v in SHORT.items() if k not in ("dataset", "rollout_batch_size", "group_size")}
    PPOTrainer(tiny, **keys, **more).train()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    PPOTrainer(tiny, overwrite=True, **keys, **more).train()
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"


# -- rows that turn out wrong late ----------------------------------------------------------------------------------


def streaming(config: Any, tmp_path: Path, rows: list[str], **keys: Any) -> Any:
    (tmp_path / "rows.jsonl").write_text("".join(row + "\n" for row in rows))
    return config(dataset=str(tmp_path / "rows.jsonl"), streaming=True, shuffle=False, **keys)


GOOD = [json.dumps(row) for row in PROMPTS]


def test_a_bad_row_of_a_stream_costs_no_finished_lap(config: Any, tmp_path: Path) -> None:
    cfg = streaming(config, tmp_path, [*GOOD, '{"prompt": 5}'], total_steps=5)
    with Run(cfg, console=False) as run:
        run.prepare()
        with pytest.raises(DataError, match=r"rows.jsonl.*The last complete one is .*step_2"):
            run.train()
        assert run.store.steps() == [2] and run.controller.state()["step"] == 2


def test_nor_the_run_that_was_to_be_overwritten(config: Any, tmp_path: Path) -> None:
    with Run(config(total_steps=1), console=False) as run:
        run.prepare()
        run.train()
    cfg = streaming(config, tmp_path, ['{"prompt": 5}', *GOOD], total_steps=2)
    with Run(cfg, console=False) as run:
        with pytest.raises(DataError, match=r"rows\.jsonl"):
            run.prepare(overwrite=True)
        assert run.store.steps() == [1]


def test_held_out_rows_have_what_rewards_ask_for(config: Any) -> None:
    held_out = [{"prompt": "xa", "solution": "a"}]
    run = Run(config(reward_fn="exact", eval={"dataset": held_out}), console=False)
    with run, pytest.raises(RequestError, match=r"eval\.dataset: .*answer"):
        run.prepare()


def test_some_held_out_rows_may_lack_a_column(config: Any) -> None:
    held_out = [{"prompt": "xa"}, {"prompt": "xb", "answer": "b"}]
    keys = {"dataset": PROMPTS, "reward_fn": "tests.trainer.test_from_python:judged", "eval": {"dataset": held_out}}
    with Run(config(total_steps=1, **keys), console=False) as run:
        run.prepare()
        assert run.train().step == 1


def judged(response: str, answer: str | None) -> float:
    return float(answer is None)
