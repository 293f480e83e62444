"""The measurements of docs/performance.md and the tests that need GPUs, one after another or side by side.

    python benchmarks/series.py one [--only saves,generation-7b] [--seconds 1700] [--out runs/series] [--vllm "PYTHON"]
    python benchmarks/series.py two

``one`` and ``two``: of how many GPUs the jobs are; each gets its own, and waits until they are free. ``--vllm`` is the
command for a Python that has vLLM, where this one has not. A job that lasts too long ends, with all its processes;
none begins that can't end within ``--seconds``. Each has a log in ``--out``, and its last lines are printed.
``--list`` prints the commands, for running them by hand; ``--toy`` tries the whole on a CPU, with models for trying.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
STEP = """--model-config '{{"fsdp_config": {{"torch_compile": true}}}}'"""


@dataclass
class Job:
    """``limit``: seconds. ``{py}`` in a command is this Python, ``{vllm}`` one with vLLM, ``{tmp}`` a folder that is
    removed afterwards. ``toy``: what is added on a CPU, the last word of an option wins; ``None``: can't be tried."""

    name: str
    limit: int
    command: str
    toy: str | None = None
    gpus: int = 1


TEST = "{py} -m pytest -q -x --tb=short -p no:cacheprovider"
VTEST = "{vllm} -m pytest -q -x --tb=short -p no:cacheprovider"
GPU_TESTS = TEST.replace(" -x", "") + " tests/gpu tests/checkpoint/test_snapshot.py tests/rollout/test_kernels.py"
OF_7B = "{vllm} benchmarks/rollout.py --device cuda --random 7b --engines stock native --repeats 1 --ragged-rows 0"
TOY = "--shape toy --rows 8 --prompt 16 --response 8 --laps 1 --micro 2 --kind cpu --vocabulary 512"
SETS: dict[str, list[Job]] = {
    "one": [
        Job(
            "saves", 300, "{py} benchmarks/placement.py --parts checkpoints --rows 32 --response 64 --scratch {tmp}",
            toy=f"{TOY} --global-shape toy --actor-shape toy",
        ),
        Job(
            "generation-7b", 400, OF_7B,
            toy="--device cpu --random toy --engines native --groups 2 --samples 2 --prompt 16 --new 8",
        ),
        Job(
            "long-prompts", 400, OF_7B + " --prompt 1024",
            toy="--device cpu --random toy --engines native --groups 2 --samples 2 --prompt 64 --new 8",
        ),
        Job("vllm-contract", 300, VTEST + " tests/rollout/test_vllm.py"),
        Job("gpu-tests", 400, GPU_TESTS, toy=""),
        Job("update", 400, "{py} benchmarks/train_mfu.py --cases 1.5b 1.5b-recompute --compile on --steps 2"),
        Job("memory", 400, "{py} benchmarks/memory.py"),
        Job(
            "generation", 500,
            "{vllm} benchmarks/rollout.py --device cuda --random 1.5b --engines stock native --repeats 1",
        ),
        Job(
            "grpo-step", 500,
            "{vllm} benchmarks/vs_trl_gpu.py --steps 4 --micro 32 --keep-activations " + STEP + " --trl {vllm}",
        ),
    ],
    "two": [
        Job("megatron", 300, TEST + " tests/gpu/test_megatron.py", gpus=2),
        Job("publish", 300, VTEST + " tests/gpu/test_publish.py", gpus=2),
        Job("vllm-parallel", 300, VTEST + " tests/rollout/test_vllm_parallel.py", gpus=2),
        Job(
            "placement", 400, "{py} benchmarks/placement.py --parts ppo,ahead,workers --scratch {tmp}", gpus=2,
            toy=f"{TOY} --engine-rows 8",
        ),
        Job(
            "publish-7b", 200, "{py} -m torch.distributed.run --nproc-per-node=2 benchmarks/publish.py", gpus=2,
        ),
        Job("spread", 300, TEST + " tests/gpu/test_spread.py tests/gpu/test_offload.py", gpus=2),
    ],
}  # fmt: skip


@dataclass
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    gpus: list[int]
    log: Path
    scratch: tempfile.TemporaryDirectory[str]
    began: float

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def end(self) -> str:
        """How it went; no process of it is left, nor its folder."""
        late = self.process.poll() is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        self.scratch.cleanup()
        return f"stopped after {self.job.limit} s" if late else "done" if not status else f"failed, status {status}"


class Series:
    def __init__(self, args: argparse.Namespace, jobs: list[Job]) -> None:
        self.args, self.waiting = args, jobs
        self.free = list(range(torch.cuda.device_count()))
        self.running: list[Running] = []
        self.said: dict[str, str] = {job.name: "not begun: no time was left" for job in jobs}
        self.until = time.monotonic() + args.seconds
        args.out.mkdir(parents=True, exist_ok=True)

    def command(self, job: Job, scratch: str) -> str:
        line = job.command.format(py=shlex.quote(sys.executable), vllm=self.args.vllm, tmp=scratch)
        return f"{line} {job.toy}" if self.args.toy else line

    def run(self) -> bool:
        while self.waiting or self.running:
            left = self.until - time.monotonic()
            for job in list(self.waiting):
                if job.limit > left:
                    self.waiting.remove(job)
                elif (self.args.toy and not self.running) or (not self.args.toy and job.gpus <= len(self.free)):
                    self.waiting.remove(job)
                    self.start(job)
                elif not self.args.toy:
                    break  # those behind it would take its GPUs
            for one in list(self.running):
                if one.process.poll() is not None or one.seconds() > one.job.limit:
                    self.finish(one)
            time.sleep(0.2)
        print("\n" + "\n".join(f"{name:<16} {said}" for name, said in self.said.items()))
        return all(said.startswith("done") for said in self.said.values())

    def start(self, job: Job) -> None:
        gpus = [] if self.args.toy else [self.free.pop(0) for _ in range(job.gpus)]
        scratch = tempfile.TemporaryDirectory(prefix="series-")
        log = self.args.out / f"{job.name}.log"
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # where it isn't installed
        environment = os.environ | {"TMPDIR": scratch.name, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        environment |= {} if self.args.toy else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        with log.open("wb") as told:
            process = subprocess.Popen(
                self.command(job, scratch.name), shell=True, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                stdout=told, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.running.append(Running(job, process, gpus, log, scratch, time.monotonic()))

    def finish(self, one: Running) -> None:
        seconds, how = one.seconds(), one.end()
        self.running.remove(one)
        self.free += one.gpus
        self.said[one.job.name] = f"{how}, {seconds:.0f} s: {one.log}"
        lines = one.log.read_text(errors="replace").splitlines()[-self.args.lines :]
        print("\n".join([f"== {one.job.name}: {how}, {seconds:.0f} s", *lines]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--only", help="names of jobs, in the order wanted")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all together")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "series")
    parser.add_argument("--vllm", default=shlex.quote(sys.executable))
    parser.add_argument("--lines", type=int, default=25, help="of each log to print")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args()
    jobs = {job.name: job for job in SETS[args.set]}
    names = args.only.split(",") if args.only else list(jobs)
    if strange := [name for name in names if name not in jobs]:
        parser.error(f"no job {', '.join(strange)} in {args.set}: {', '.join(jobs)}")
    wanted = [jobs[name] for name in names if not args.toy or jobs[name].toy is not None]
    series = Series(args, wanted)
    if args.list:
        print("\n".join(f"{job.name:<16} {series.command(job, '/tmp')}" for job in wanted))
        return 0
    if not args.toy and any(job.gpus > len(series.free) for job in wanted):
        parser.error(f"this machine has {len(series.free)} GPUs; on a CPU, --toy tries what can be tried there")
    return 0 if series.run() else 1


if __name__ == "__main__":
    sys.exit(main())
