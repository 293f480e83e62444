"""Whether a long run leaks: tiny PPO on two workers, which are killed at random and started anew.

    python benchmarks/soak.py [--minutes 40] [--ray] [--every 120] [--warm 200] [--device-map '{"actor": "cpu:0-1"}']

Through the same ``Run`` as ``verl train``. After every 10th step it reads, of the controller and of every worker,
resident memory, open files and threads, and counts processes and listening ports. It prints how memory grows per 100
steps after the warm-up (least squares, of each process's life) and what is left at the end, and exits with 1 where a
limit is passed. Linux only; it needs ``psutil``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from random_model import save_words

from verl.config.load import load_config
from verl.trainer.base import Run

WORDS = [f"w{i}" for i in range(60)]
LIMIT = 1.0  # MiB of resident memory per 100 steps
MARK = "VERL_SOAK"  # in the environment of all that the run starts


@dataclass
class Reading:
    """What one process holds."""

    step: int
    mib: float
    files: int
    threads: int


@dataclass
class Life:
    """One process, from its start to its end."""

    name: str
    readings: list[Reading] = field(default_factory=list)

    def late(self, warm: int) -> list[Reading]:
        """Those after the warm-up."""
        return [r for r in self.readings if r.step >= self.readings[0].step + warm]

    def slope(self, warm: int) -> float | None:
        """MiB per 100 steps after the warm-up; None for a life too short to tell."""
        kept = self.late(warm)
        if len(kept) < 10:
            return None
        x, y = [r.step for r in kept], [r.mib for r in kept]
        mx, my = sum(x) / len(x), sum(y) / len(y)
        return 100 * sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


class Soak(Run):
    """A run that looks at its processes and kills one of its workers now and then."""

    def __init__(self, cfg: Any, seconds: float, every: float) -> None:
        super().__init__(cfg, console=False)
        self.lives: dict[int, Life] = {}
        self.counts: list[tuple[int, int, int]] = []  # step, processes, listening ports
        self.kills = self.steps = 0
        self._end, self._every = time.monotonic() + seconds, every
        self._next = time.monotonic() + every
        self._random = random.Random(0)

    def step(self) -> Any:
        if time.monotonic() > self._end:
            self._stop = signal.SIGTERM
        result = super().step()
        self.steps += 1
        if self.steps % 10 == 0:
            self._look()
        if time.monotonic() > self._next and self.steps % 10 == 0:
            self._next = time.monotonic() + self._every * self._random.uniform(0.5, 1.5)
            place = self._random.choice(self.controller.crew.group.places)
            if place.pid != os.getpid():  # a run on one device has no other process
                with contextlib.suppress(ProcessLookupError):
                    os.kill(place.pid, signal.SIGKILL)
                    self.kills += 1
        return result

    def _look(self) -> None:
        pids = {p.pid: f"worker {r}" for r, p in enumerate(self.controller.crew.group.places)}
        pids[os.getpid()] = "controller"
        for pid, name in pids.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                reading = Reading(
                    self.steps, process.memory_info().rss / 2**20, process.num_fds(), process.num_threads()
                )
                self.lives.setdefault(pid, Life(name)).readings.append(reading)
        self.counts.append((self.steps, len(marked()), len(listening())))


def marked() -> list[psutil.Process]:
    """This process and all that carry its mark."""
    found = [psutil.Process()]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == str(os.getpid()):
                found.append(process)
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]


def listening() -> set[int]:
    """Ports that these processes listen on."""
    found = set()
    for process in marked():
        with contextlib.suppress(psutil.Error):
            found |= {link.laddr.port for link in process.net_connections("inet") if link.status == "LISTEN"}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--every", type=float, default=120, help="seconds between two kills, on average")
    parser.add_argument("--warm", type=int, default=200, help="steps of a process's life before its growth counts")
    parser.add_argument("--ray", action="store_true", help="workers are Ray actors")
    parser.add_argument("--device-map", type=json.loads, default={"actor": "cpu:0-1"})
    args = parser.parse_args()
    os.environ[MARK] = str(os.getpid())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        temporary = Path(scratch) / "tmp"
        temporary.mkdir()
        if not args.ray:  # Ray's sockets need a short path
            os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        data = [{"prompt": f"{WORDS[i % 60]} {WORDS[i * 7 % 60]}"} for i in range(200)]
        model = save_words(Path(scratch) / "model", WORDS, ends=True)
        cfg = load_config(
            None,
            actor_model_config={"model_name_or_path": model, "dtype": "fp32"},
            algorithm={"name": "ppo", "update_epochs": 1}, dataset=data, reward_fn=unlike,
            rollout_batch_size=8, micro_batch_size=4,
            max_prompt_length=8, max_response_length=8, total_steps=10**9, run_dir=f"{scratch}/run",
            checkpoint={"every_steps": 20}, device_map=args.device_map, log_level="WARNING",
            cluster={"backend": "ray" if args.ray else "local", "max_restarts": 10**6},
        )  # fmt: skip
        with Soak(cfg, 60 * args.minutes, args.every) as run:
            run.prepare()
            run.train()
        fine = report(run, args.warm)
        for _ in range(100):
            if not (left := [p for p in marked() if p.pid != os.getpid()]):
                break
            time.sleep(0.1)
        ports, new = listening(), sorted(path.name for path in temporary.iterdir())
        tempfile.tempdir = None
    print(f"left behind: {len(left)} processes, {len(ports)} listening ports, {len(new)} temporary files")
    if left or ports or new:
        print(left, ports, new)
        fine = False
    print("no leak found" if fine else "NOT PASSED", f"(limit {LIMIT:g} MiB per 100 steps)")
    sys.exit(0 if fine else 1)


def report(run: Soak, warm: int) -> bool:
    """Print what was read; whether it is within the limits."""
    lives = sorted(run.lives.values(), key=lambda life: (life.name, life.readings[0].step))
    print(f"{run.steps} steps, {run.kills} workers killed, {len(run.lives) - 1} lives of workers")
    print(f"{'process':<12}{'steps':>14}{'MiB':>18}{'MiB/100 steps':>15}{'open files':>12}{'threads':>10}")
    fine = True
    for life in lives:
        slope, late = life.slope(warm), life.late(warm) or life.readings[-1:]
        first, last = late[0], late[-1]
        grows = last.files > first.files + 2 or last.threads > first.threads + 2
        fine = fine and not grows and (slope is None or slope < LIMIT)
        if slope is not None or grows:
            memory, held = f"{first.mib:.1f} -> {last.mib:.1f}", f"{first.files} -> {last.files}"
            grown = "-" if slope is None else f"{slope:.3f}"
            print(
                f"{life.name:<12}{f'{first.step}-{last.step}':>14}{memory:>18}{grown:>15}{held:>12}"
                f"{f'{first.threads} -> {last.threads}':>10}"
            )
    step, processes, ports = run.counts[len(run.counts) // 4]
    end, processes_end, ports_end = run.counts[-1]
    print(f"processes {processes} at step {step}, {processes_end} at step {end}; listening ports {ports}, {ports_end}")
    controller = next(life for life in lives if life.name == "controller")
    if controller.slope(warm) is None:
        print(f"too short to tell: {warm} steps of warm-up and 100 more are needed")
        fine = False
    return fine and processes_end <= processes + 1 and ports_end <= ports


def unlike(response: str) -> float:
    """A reward that differs from row to row."""
    return len(set(response.split())) / 8


if __name__ == "__main__":
    main()
