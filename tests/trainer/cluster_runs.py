"""Runs on several workers: their configurations, what their folders tell, and processes that die on the way."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests import forks
from tests.tiny import f_bpe, f_llama, save
from tests.trainer.conftest import PROMPTS
from verl.checkpoint.store import CheckpointStore
from verl.config.load import load_config
from verl.config.run import RunConfig
from verl.trainer.base import Run

CLOCKS = (
    "time/",
    "memory/",
    "device/",
    "throughput/",
    "generate/latency",
    "publish/",
    "columns/",
)  # differ between runs
TOLERANCE = 1e-5
MARK = forks.MARK  # in the environment of all processes of a run, or open in them


def small(folder: Path) -> str:
    return save(folder, f_llama(), f_bpe(template="bos"))


def deep(folder: Path) -> str:
    """The same words, in a model that takes several times as long."""
    config = f_llama().config.to_dict() | {"num_hidden_layers": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return save(folder, LlamaForCausalLM(LlamaConfig.from_dict(config)), f_bpe(template="bos"))


def ppo(model: str, folder: Path, **keys: Any) -> dict[str, Any]:
    """PPO with everything: critic, KL in the reward, several optimizer steps per lap, evaluation before and after."""
    base = {
        "actor_model_config": {"model_name_or_path": model, "dtype": "fp32", "optimizer": {"lr": 1e-3}},
        "critic_model_config": {"optimizer": {"lr": 1e-3}},
        "dataset": [row | {"gate": str(folder / "gate")} for row in PROMPTS],
        "eval": {"dataset": [row | {"gate": "nowhere"} for row in PROMPTS[:3]]},
        "reward_fn": "tests.trainer.cluster_reward:gated",
        "algorithm": {"name": "ppo", "update_epochs": 2},
        "rollout_batch_size": 16,
        "mini_batch_size": 8,
        "micro_batch_size": 4,
        "group_size": 1,
        "init_kl_coef": 0.1,
        "max_prompt_length": 16,
        "max_response_length": 6,
        "total_steps": 5,
        "run_dir": str(folder / "run"),
        "metrics": {"tensorboard": False},
        "log_level": "DEBUG",
    }
    return base | keys


def train(cfg: RunConfig, *, resume: bool = False) -> Path:
    with Run(cfg, console=False) as run:
        run.prepare(run.store.load() if resume else None)
        run.train()
    return run.folder


def finished(model: str, folder: Path, **keys: Any) -> Path:
    folder.mkdir(exist_ok=True)
    return train(load_config(None, **ppo(model, folder, **keys)))


# -- what a folder tells ---------------------------------------------------------------------------------------------


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def weights(folder: Path, step: int | None = None) -> dict[str, Tensor]:
    """Of all trained models, from the checkpoint of ``step`` (default: the latest)."""
    checkpoint = CheckpointStore(folder / "checkpoints", 2).load(step)
    roles = [role for role in ("actor", "critic", "process_reward") if role in checkpoint]
    assert "actor" in roles
    return {f"{role}/{name}": t for role in roles for name, t in checkpoint.tensors(role).items()}


def same_numbers(folder: Path, other: Path) -> None:
    """Every metric of every step but clocks and memory, and every evaluation."""
    for name in ("metrics.jsonl", "eval.jsonl"):
        if not (other / name).exists():
            continue
        same_lines(lines(folder, name), lines(other, name))


def same_lines(told: list[dict[str, Any]], expected: list[dict[str, Any]], but: tuple[str, ...] = ()) -> None:
    for line, other in zip(told, expected, strict=True):
        mine, theirs = ({k: v for k, v in part.items() if not k.startswith(CLOCKS + but)} for part in (line, other))
        assert mine.keys() == theirs.keys()
        wrong = {k: (v, theirs[k]) for k, v in mine.items() if not near(v, theirs[k])}
        assert not wrong, f"step {line['step']}: {wrong}"


def near(a: float | None, b: float | None) -> bool:
    return a == b if a is None or b is None else math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def same_weights(folder: Path, other: Path, step: int | None = None) -> None:
    mine, theirs = weights(folder, step), weights(other, step)
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(
            mine[name], theirs[name], rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: n + m
        )


@dataclass(frozen=True)
class Ran:
    """An op on a worker; microseconds."""

    name: str
    worker: int
    step: int
    start: int
    end: int

    def beside(self, other: Ran) -> bool:
        return self.start < other.end and other.start < self.end


def timeline(folder: Path) -> list[Ran]:
    told = json.loads((folder / "logs" / "timeline.json").read_text())
    assert {event["ph"] for event in told} == {"X"}
    return [Ran(e["name"], e["pid"], e["args"]["step"], e["ts"], e["ts"] + e["dur"]) for e in told]


# -- processes -------------------------------------------------------------------------------------------------------


def marked(mark: str) -> list[int]:
    """Processes other than this one that live and were started, or forked, with the mark in their environment."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            started = f"{MARK}={mark}".encode() in (place / "environ").read_bytes().split(b"\0")
            if started or any(os.readlink(file) == mark for file in (place / "fd").iterdir()):
                found.append(int(place.name))
    return [pid for pid in found if pid != os.getpid()]


def none_left(mark: str, seconds: float = 10.0) -> bool:
    return until(lambda: not marked(mark), seconds)


def until(true: Callable[[], bool], seconds: float) -> bool:
    """Whether it became true in time."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


class Struck(Run):
    """A run whose worker 1 is killed once, in the middle of a step: while it samples or while it updates."""

    def __init__(self, cfg: RunConfig, step: int, moment: str) -> None:
        super().__init__(cfg, console=False)
        self._at, self._moment = step, moment
        self.struck = 0.0  # when, by time.monotonic
        self.pid = 0

    def step(self) -> Any:
        if self.controller.step + 1 == self._at and not self.pid:
            self.pid = self.controller.crew.group.places[1].pid
            gate = Path(self.cfg.dataset[0]["gate"])
            if self._moment == "sampling":
                gate.touch()
            threading.Thread(target=self._strike, args=(gate,), daemon=True).start()
        return super().step()

    def _strike(self, gate: Path) -> None:
        if self._moment == "sampling":
            waits = Path(f"{gate}.waits")
            assert until(waits.exists, 60)
        else:  # what comes before the updates has just ended
            assert until(lambda: any(r.name == "actor.advantages" and r.step == self._at for r in self._ran()), 60)
        os.kill(self.pid, signal.SIGKILL)
        self.struck = time.monotonic()
        gate.unlink(missing_ok=True)

    def _ran(self) -> Iterator[Ran]:
        try:
            yield from timeline(self.folder)
        except json.JSONDecodeError:  # it is being written
            return
