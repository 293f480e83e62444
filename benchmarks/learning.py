"""Does every algorithm learn? One ``verl train`` run each, before and after, as one table.

    python benchmarks/learning.py runs/learning                     # all; what is finished is not run again
    python benchmarks/learning.py runs/learning --only grpo,dpo     # some
    python benchmarks/learning.py runs/learning --jobs 8 --cores 2  # side by side on a larger machine
    python benchmarks/learning.py runs/learning --table docs/algorithms.md

Algorithms that sample learn the demo's task: SmolLM2-135M, sums of numbers up to 19, answer and stop; judged on 64
held-out questions. The others learn from the files of ``examples/addition_data.py``, judged on held-out rows.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import queue
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- learning table: benchmarks/learning.py -->", "<!-- end of the learning table -->"
SAMPLED = "configs/demo.yaml"
OFFLINE = "benchmarks/learning/offline.yaml"


@dataclass(frozen=True)
class Study:
    """``metrics``: of the evaluations before and after. ``after``: a study whose model it needs as its teacher.
    ``files``: which of the addition files it learns from."""

    keys: tuple[str, ...] = ()
    file: str = SAMPLED
    metrics: tuple[str, ...] = ("accuracy",)
    seeds: int = 1
    after: str | None = None
    files: str | None = None

    @property
    def overrides(self) -> list[str]:
        data = [f"dataset={{data}}/train/{self.files}.jsonl", f"eval.dataset={{data}}/test/{self.files}.jsonl"]
        return [*self.keys, *(data if self.files else [])]


def offline(files: str, *metrics: str, keys: tuple[str, ...] = (), seeds: int = 1) -> Study:
    return Study(keys, OFFLINE, metrics, seeds, files=files)


NUMBER_AND_DIGITS = "[{name: numeric, integer: true, cut_score: 0.25}, {name: regex, pattern: '[0-9]'}]"
LONG = ("total_steps=24",)
LONGER = ("total_steps=40", "actor_model_config.optimizer.lr=3.0e-5")  # a new head has more to learn
STUDIES: dict[str, Study] = {
    "ppo": Study(file="configs/demo_ppo.yaml", seeds=3),
    "grpo": Study(seeds=3),
    "rloo": Study(),
    "reinforce_plus_plus": Study(),
    "remax": Study(),
    "gspo": Study(),
    "cispo": Study(),
    "dapo": Study(),
    "online_dpo": Study(),
    "prime": Study(("process_reward_model_config={optimizer: {lr: 1.0e-5}}",)),
    "distill": Study(("teacher_model_config.model_name_or_path={out}/teacher",), after="grpo"),
    "dpo": offline("pairs", "loss", "accuracy", seeds=3),
    "kto": offline("labelled", "loss", "margin", seeds=3),
    "reward_model": offline("hh", "loss", "accuracy", keys=LONGER, seeds=3),
    "ipo": offline("pairs", "loss", keys=LONG),
    "orpo": offline("pairs", "accuracy", keys=LONG),
    "simpo": offline("pairs", "accuracy", keys=LONG),
    "sft": offline("chats", "loss", keys=LONG),
    "cpo": offline("pairs", "accuracy", keys=LONG),
    "verifier": offline("labelled", "loss", "accuracy", keys=LONGER),
    "reinforce_plus_plus_baseline": Study(),
    "opo": Study(),
    "gpg": Study(),
    "pass_k": Study(("algorithm.pass_k=2",)),
    "gdpo": Study((f"reward_fn={NUMBER_AND_DIGITS}", "reward_weights=[1.0, 0.5]")),
    "sapo": Study(),
    "gmpo": Study(),
    "dppo": Study(),
    "clip_cov": Study(),
    "kl_cov": Study(),
}


@dataclass
class Result:
    """What one run showed. ``seconds``: of the whole command on ``machine``."""

    name: str
    seed: int
    before: dict[str, float]
    after: dict[str, float]
    rewards: tuple[float, float] | None  # of the first lap, and the mean of the last five
    steps: int
    seconds: float
    machine: str  # "2 CPU cores", or the GPU's share


def run(name: str, seed: int, out: Path, data: Path, cpus: list[int], more: list[str]) -> Result:
    """The finished run's result, from its folder where it is there."""
    study, folder = STUDIES[name], out / f"{name}-{seed}"
    record = folder / "result.json"
    if record.exists():
        return Result(**json.loads(record.read_text()))
    keys = [k.format(out=out, data=data) if "{out}" in k or "{data}" in k else k for k in study.overrides]
    keys = [f"algorithm.name={name}", *keys, f"seed={seed}", f"run_dir={folder}", "checkpoint.every_steps=0",
            "metrics.tensorboard=false", "actor_model_config.dtype=fp32", *more]  # fmt: skip
    command = [sys.executable, "-m", "verl.cli.main", "train", study.file, "--overwrite", *keys]
    out.mkdir(parents=True, exist_ok=True)
    start = time.time()
    with open(out / f"{name}-{seed}.log", "w") as log:
        done = subprocess.run(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": str(len(cpus) or 1)},
            preexec_fn=(lambda: os.sched_setaffinity(0, cpus)) if cpus and hasattr(os, "sched_setaffinity") else None,
        )  # fmt: skip
    if done.returncode:
        folder.mkdir(exist_ok=True)
        (folder / "failed").touch()
        raise RuntimeError(f"{name}, seed {seed}: exit status {done.returncode}, see {out / f'{name}-{seed}.log'}")
    seconds = time.time() - start
    if any(s.after == name for s in STUDIES.values()) and seed == 0:
        subprocess.run(
            [sys.executable, "-m", "verl.cli.main", "export", str(folder), str(out / "teacher")], cwd=ROOT, check=True
        )
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    result = read(name, seed, folder, seconds, cpus)
    record.write_text(json.dumps(result.__dict__))
    return result


def read(name: str, seed: int, folder: Path, seconds: float, cpus: list[int]) -> Result:
    evaluations, steps = (
        [json.loads(line) for line in (folder / file).read_text().splitlines()]
        for file in ("eval.jsonl", "metrics.jsonl")
    )
    rewards = [s["reward/mean"] for s in steps if s.get("reward/mean") is not None]
    ends = (rewards[0], statistics.fmean(rewards[-5:])) if rewards else None
    before, after = ({m: e[f"eval/{m}"] for m in STUDIES[name].metrics} for e in (evaluations[0], evaluations[-1]))
    machine = "GPU" if "memory/reserved_gib" in steps[-1] else f"{len(cpus) or os.cpu_count()} CPU cores"
    return Result(name, seed, before, after, ends, len(steps), seconds, machine)


def table(results: list[Result]) -> str:
    """One line per algorithm; several seeds side by side."""
    lines = ["| `algorithm.name` | held-out, before | after | reward, first lap to last five | laps | minutes |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for name in STUDIES:
        found = sorted((r for r in results if r.name == name), key=lambda r: r.seed)
        if not found:
            continue
        before, after = ("; ".join(f"{m} {_side([getattr(r, when)[m] for r in found])}" for m in found[0].before)
                         for when in ("before", "after"))  # fmt: skip
        rewards = ", ".join(f"{r.rewards[0]:.2f} to {r.rewards[1]:.2f}" for r in found if r.rewards)
        minutes = ", ".join(f"{r.seconds / 60:.1f}" if r.seconds else "?" for r in found)
        where = " and ".join(dict.fromkeys(r.machine for r in found))
        cells = (f"`{name}`", before, after, rewards or "-", str(found[0].steps), f"{minutes} on {where}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [*lines, "", f"{len(results)} runs in fp32, {sum(r.seconds for r in results) / 60:.0f} minutes in all."]
    )


def _side(values: list[float]) -> str:
    """Seeds side by side; one number where they agree."""
    told = [f"{v:.2f}" for v in values]
    return told[0] if len(set(told)) == 1 else ", ".join(told)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cores", type=int, default=2, help="of each job; 0: not pinned, for a GPU")
    parser.add_argument("--seeds", type=int, help="instead of each study's own number")
    parser.add_argument("--table", type=Path, help="page whose table is replaced")
    parser.add_argument("--set", nargs="*", default=[], help="more overrides for every run")
    args = parser.parse_args()
    out = args.out.resolve()
    data = out / "data"
    if not data.exists():
        subprocess.run([sys.executable, "examples/addition_data.py", str(data)], cwd=ROOT, check=True)
    names = args.only.split(",") if args.only else list(STUDIES)
    todo = [(n, s) for n in names for s in range(args.seeds or STUDIES[n].seeds)]
    todo.sort(key=lambda t: (STUDIES[t[0]].after is not None, all(s.after != t[0] for s in STUDIES.values())))
    places: queue.Queue[list[int]] = queue.Queue()
    for job in range(args.jobs):
        places.put(list(range(job * args.cores, (job + 1) * args.cores)))

    def one(task: tuple[str, int]) -> Result | str:
        needed = STUDIES[task[0]].after
        while needed and not (out / "teacher" / "config.json").exists():
            if needed not in names or (out / f"{needed}-0" / "failed").exists():
                return f"{task[0]}-{task[1]}: needs the model of {needed}, seed 0"
            time.sleep(1)
        cpus = places.get()
        try:
            result = run(*task, out, data, cpus, args.set)
        except Exception as error:
            return f"{task[0]}-{task[1]}: {error}"
        finally:
            places.put(cpus)
        print(f"{result.name}-{result.seed}: {result.before} -> {result.after} in {result.seconds:.0f} s", flush=True)
        return result

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(one, todo))
    failed = [r for r in results if isinstance(r, str)]
    text = table(
        [Result(**json.loads(file.read_text())) for file in out.glob("*/result.json")]
    )  # of earlier calls, too
    print(text, *failed, sep="\n")
    if args.table:
        page = args.table.read_text()
        head, rest = page.split(BEGIN)
        args.table.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
