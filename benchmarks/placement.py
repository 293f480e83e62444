"""What a placement costs: PPO on two devices with the critic apart or beside the actor; saves beside training.

    python benchmarks/placement.py [--shape 0.5b] [--parts ppo,ahead,workers,checkpoints] [--rows 128] [--laps 4]

The ``Run`` of ``verl train`` on random models; a run's first two laps are warm-up, then medians.

- ``ppo``: actor on the first device and critic on the second; both on both, sharded. Communication is the share of the
  step in which columns and weights travel. Peak memory is each device's.
- ``ahead``: GRPO that generates on the second device, strict, and with ``max_staleness: 1`` beside the update of the
  lap before; the step beside the longer of generation and training.
- ``workers``: GRPO's generation by one engine and by two, each of ``--engine-rows`` rows at a time, on the first
  device and on both; laps have four times as many rows.
- ``checkpoints``: ``global`` of ``--global-shape`` on one device, ``actor`` of ``--actor-shape`` on both (on one, if
  there is no other, with 8-bit moments): how long training is held, and the whole save.

``--kind cpu`` takes processes on the CPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import random_model
import torch

from verl.config.load import load_config
from verl.trainer.base import Run

WARM = 2


class Told:
    """What a run told: metrics of its laps, peaks of each device, saves."""

    def __init__(self, keys: dict[str, Any]) -> None:
        self.lines: list[dict[str, float]] = []
        self.peaks: dict[int, float] = {}
        self.saves: list[tuple[float, float]] = []  # seconds that training was held, and of the whole
        start = time.perf_counter()
        with Run(load_config(None, **keys), console=False) as run:
            run.prepare()
            crew, write = run.controller.crew, run._write
            everywhere: Callable[..., Any] = crew.everywhere

            async def noted(method: str, *args: Any) -> Any:
                told = await everywhere(method, *args)
                if method == "readings":
                    for rank, readings in told.items():
                        self.peaks[rank] = max(self.peaks.get(rank, 0.0), readings["memory/peak_gib"])
                return told

            async def timed(step: int, folder: Path, parts: Any, began: float, held: float) -> None:
                await write(step, folder, parts, began, held)
                self.saves.append((held - began, time.perf_counter() - began))
                print(f"   save of step {step}: {held - began:.2f} of {self.saves[-1][1]:.2f} s", flush=True)

            crew.everywhere, run._write = noted, timed  # type: ignore[method-assign]
            self.prepared = time.perf_counter() - start
            run.train()
            saved = run.store.folder(run.controller.step)
            self.saved_bytes = sum(f.stat().st_size for f in saved.rglob("*") if f.is_file())
        lines = (Path(keys["run_dir"]) / "metrics.jsonl").read_text().splitlines()
        self.lines = [json.loads(line) for line in lines]

    def median(self, of: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(map(of, self.lines[WARM:]))


class Bench:
    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.args, self.scratch = args, scratch
        there = 2 if args.kind == "cpu" else min(2, torch.cuda.device_count())
        self.devices = [f"cpu:{i}" if args.kind == "cpu" else i for i in range(there)]
        self.table: list[str] = []
        self.failed = False

    def line(self, text: str) -> None:
        self.table.append(text)
        print(text, flush=True)

    def model(self, shape: str) -> str:
        folder, vocabulary = self.scratch / shape, self.args.vocabulary
        if not folder.exists():
            device, dtype = ("cuda", torch.bfloat16) if self.args.kind == "cuda" else ("cpu", torch.float32)
            random_model.save(folder, shape, device, dtype, vocabulary)
            if device == "cuda":
                torch.cuda.empty_cache()
        return str(folder)

    def run(self, name: str, shape: str, laps: int, **keys: Any) -> Told:
        args = self.args
        prompts = random_model.prompts(max(args.rows, args.engine_rows) * 4, args.prompt)
        base = {
            "actor_model_config": {"model_name_or_path": self.model(shape), "optimizer": {"lr": 1e-6}},
            "dataset": [{"prompt": text} for text in prompts], "reward_fn": random_model.letters,
            "rollout_batch_size": args.rows,
            "mini_batch_size": args.rows // 2, "micro_batch_size": args.micro, "max_prompt_length": args.prompt + 4,
            "max_response_length": args.response, "total_steps": laps, "rollout": {"max_rows": args.rows},
            "run_dir": str(self.scratch / name), "metrics": {"tensorboard": False}, "kl_sample_rows": 0,
            "checkpoint": {"every_steps": 0, "save": "actor", "keep": 1},
        }  # fmt: skip
        try:
            return Told(base | keys)
        finally:
            shutil.rmtree(self.scratch / name, ignore_errors=True)

    # -- parts -----------------------------------------------------------------------------------------------------

    def ppo(self) -> None:
        a, b = self.devices
        self.line(
            f"{'PPO, ' + self.args.shape:<28} {'s/step':>8} {'communication':>14} {'GB/step':>8}  peak GiB by device"
        )
        for name, places in (
            ("critic apart", {"actor": a, "critic": b}),
            ("both on both", {"actor": [a, b], "critic": [a, b]}),
        ):
            told = self.run(
                name.replace(" ", "-"), self.args.shape, WARM + self.args.laps, algorithm={"name": "ppo"},
                device_map=places, critic_model_config={"optimizer": {"lr": 1e-5}}, init_kl_coef=0.0,
            )  # fmt: skip
            share = told.median(lambda m: (m["time/columns"] + m["time/publish"]) / m["time/step"])
            moved = told.median(lambda m: m["columns/bytes"] + m["publish/bytes"]) / 1e9
            peaks = ", ".join(f"{told.peaks[rank]:.1f}" for rank in sorted(told.peaks))
            step = told.median(lambda m: m["time/step"])
            self.line(f"{name:<28} {step:>8.2f} {share:>14.1%} {moved:>8.3f}  {peaks}")
            self.where(told)

    def where(self, told: Told) -> None:
        """Seconds of each op."""
        names = sorted({n for m in told.lines for n in m if n.startswith("time/") and n != "time/step"})
        parts = {n.removeprefix("time/"): told.median(lambda m, n=n: m.get(n) or 0.0) for n in names}
        print("   " + ", ".join(f"{n} {t:.2f}" for n, t in parts.items() if t >= 0.005), flush=True)

    def ahead(self) -> None:
        a, b = self.devices
        head = f"{'GRPO, generation apart':<28} {'s/step':>8} {'generate':>9} {'train':>7} {'step/longer':>12}"
        self.line(f"{head} {'staleness':>10}")

        def train(m: dict[str, float]) -> float:
            return sum(t for n, t in m.items() if n.startswith("time/actor.") and t) + (m["time/publish"] or 0.0)

        for stale in (0, 1):
            told = self.run(
                f"stale-{stale}", self.args.shape, WARM + self.args.laps + 1, algorithm={"name": "grpo"}, group_size=8,
                device_map={"actor": a, "rollout": b}, max_staleness=stale,
            )  # fmt: skip
            step, generate = told.median(lambda m: m["time/step"]), told.median(lambda m: m["time/generate"])
            trained, old = told.median(train), told.median(lambda m: m.get("rollout/staleness") or 0.0)
            name = "strict" if not stale else "max_staleness: 1"
            ratio = step / max(generate, trained)
            self.line(f"{name:<28} {step:>8.2f} {generate:>9.2f} {trained:>7.2f} {ratio:>12.2f} {old:>10.2f}")
            self.where(told)

    def workers(self) -> None:
        rows, at_once = self.args.engine_rows * 4, self.args.engine_rows
        a, b = self.devices
        self.line(f"{f'generation, {rows} rows':<28} {'seconds':>8} {'tokens/s':>10} {'times one':>10}")
        first = 0.0
        for name, places in (("one engine", [a]), ("two", [a, b])):
            told = self.run(
                name.replace(" ", "-"), self.args.shape, WARM + self.args.laps, algorithm={"name": "grpo"},
                group_size=8, rollout_batch_size=rows, mini_batch_size=rows, rollout={"max_rows": at_once},
                device_map={"actor": a, "rollout": places},
            )  # fmt: skip
            seconds = told.median(lambda m: m["time/generate"])
            first = first or seconds
            speed = rows * self.args.response / seconds
            self.line(f"{name:<28} {seconds:>8.2f} {speed:>10,.0f} {first / seconds:>10.2f}")
            self.where(told)

    def checkpoints(self) -> None:
        self.line(f"{'save, beside training':<28} {'GB':>8} {'held s':>8} {'whole s':>8}  (first; then again)")
        for kind, shape, devices in (
            ("global", self.args.global_shape, self.devices[:1]),
            ("actor", self.args.actor_shape, self.devices),
        ):
            if not shape:
                continue
            begun = time.perf_counter()
            try:
                crowded = kind == "actor" and len(devices) == 1 and self.args.kind == "cuda"
                adam = {"name": "adamw8bit" if crowded else "adamw", "lr": 1e-6}
                told = self.run(
                    f"save-{kind}", shape, 16, algorithm={"name": "grpo"}, group_size=8, device_map={"actor": devices},
                    actor_model_config={"model_name_or_path": self.model(shape), "optimizer": adam},
                    checkpoint={"every_steps": 8, "save": kind, "keep": 1},
                )  # fmt: skip
            except Exception:
                self.line(f"{kind + ' of ' + shape:<28} failed: {traceback.format_exc()}")
                self.failed = True
                continue
            size = told.saved_bytes / 1e9
            for number, (held, whole) in enumerate(told.saves):
                last = number == len(told.saves) - 1
                what = "  at the end" if last else "  again" if number else f"{kind} of {shape}"
                self.line(f"{what:<28} {size:>8.2f} {held:>8.2f} {whole:>8.2f}")
            steps = ", ".join(f"{m['time/step']:.2f}" for m in told.lines)
            print(f"   steps: {steps} s; {time.perf_counter() - begun:.0f} s in all", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5b", choices=tuple(random_model.SHAPES))
    parser.add_argument("--global-shape", default="1.5b", choices=("", *random_model.SHAPES))
    parser.add_argument("--actor-shape", default="7b", choices=("", *random_model.SHAPES))
    parser.add_argument("--vocabulary", type=int, default=random_model.VOCABULARY)
    parser.add_argument("--parts", default="ppo,ahead,workers,checkpoints")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--engine-rows", type=int, default=512, help="at once in each engine, of workers")
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--response", type=int, default=256, help="tokens of each response")
    parser.add_argument("--laps", type=int, default=4, help="after the warm-up")
    parser.add_argument("--kind", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--scratch", help="folder for models and runs; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        bench = Bench(args, Path(scratch))
        bench.line(
            f"{args.rows} rows of {args.prompt} + {args.response} tokens, {len(bench.devices)} {args.kind} devices"
        )
        for name in args.parts.split(","):
            start = time.perf_counter()
            try:
                getattr(bench, name)()
            except Exception:
                bench.failed = True
                bench.line(f"{name} failed: {traceback.format_exc()}")
            print(f"[{name}: {time.perf_counter() - start:.0f} s]", flush=True)
        print("\n" + "\n".join(bench.table))
    return int(bench.failed)


if __name__ == "__main__":
    sys.exit(main())
