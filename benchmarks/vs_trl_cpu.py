"""Seconds per GRPO step on the CPU: ``verl train`` beside TRL, on the same model, prompts, sizes and dtype.

    make bench-trl                            # makes TRL's environment and runs this
    python benchmarks/vs_trl_cpu.py --trl .venv-trl/bin/python [--steps 6] [--rounds 2]

Both do the demo's step: 12 prompts x 4 responses of at most 12 tokens from SmolLM2-135M-Instruct in fp32, one AdamW
step on all parameters, no KL penalty, no gradient checkpointing. The two take turns; a turn's first step is warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROMPTS, GROUP, LENGTH = 12, 4, 12  # the demo's step
PEER = {
    "per_device_train_batch_size": PROMPTS * GROUP,
    "gradient_accumulation_steps": 1,
    "num_generations": GROUP,
    "max_completion_length": LENGTH,
    "learning_rate": 4e-5,
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
}
DATA = {"name": "arithmetic", "low": 0, "high": 19, "operations": ["+"], "split": "train"}


def ours(model: str, steps: int, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds and rewards per step, from the run's own metrics."""
    keys = [
        f"actor_model_config.model_name_or_path={model}",
        "actor_model_config.dtype=fp32",
        "eval.dataset=null",
        "kl_sample_rows=0",
        f"total_steps={steps}",
        "checkpoint.every_steps=0",
        f"run_dir={folder}",
    ]
    command = [sys.executable, "-m", "verl.cli.main", "train", "configs/demo.yaml", *keys]
    subprocess.run(command, check=True, cwd=ROOT)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["time/step"] for line in lines], [line["reward/mean"] for line in lines]


def theirs(python: str, model: str, rows: Path, steps: int, out: Path) -> tuple[list[float], list[float]]:
    script = ROOT / "benchmarks" / "peers" / "trl_grpo.py"
    settings = json.dumps({"reward": "addition", "dtype": "float32", "config": PEER})
    subprocess.run([python, str(script), model, str(rows), str(steps), str(out), settings], check=True, cwd=out.parent)
    result = json.loads(out.read_text())
    return result["seconds"], result["reward"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", required=True, help="python of an environment with trl")
    parser.add_argument("--model", default=str(ROOT / "models" / "smollm2"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    from verl.data.loader import PromptDataset

    seconds: dict[str, list[float]] = {"verl": [], "TRL": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = folder / "rows.jsonl"
        data = PromptDataset(DATA)
        rows.write_text("".join(json.dumps(data[i]) + "\n" for i in range(len(data))))
        for turn in range(args.rounds):
            seconds["verl"] += ours(args.model, args.steps, folder / f"verl{turn}")[0][1:]
            seconds["TRL"] += theirs(
                os.path.abspath(args.trl), args.model, rows, args.steps, folder / f"trl{turn}.json"
            )[0][1:]
    base = statistics.median(seconds["TRL"])
    print("\n| system | s per step (median) | min | max | steps | times TRL |\n|---|---|---|---|---|---|")
    for system, values in seconds.items():
        median = statistics.median(values)
        spread = f"{min(values):.2f} | {max(values):.2f} | {len(values)}"
        print(f"| {system} | {median:.2f} | {spread} | {base / median:.2f}x |")


if __name__ == "__main__":
    main()
