"""Seconds per GRPO step on one GPU: ``verl train`` beside TRL, on the same random model, prompts and sizes.

    python benchmarks/vs_trl_gpu.py --trl PYTHON [--shape 1.5b] [--steps 5] [--groups 32] [--response 512]

Prompts of 128 tokens x 8 responses of 512, bf16, one AdamW step on all parameters, no KL penalty, gradient
checkpointing. TRL generates with vLLM in its own process, which sleeps while it trains, as its documentation advises;
PYTHON is of an environment with both (its path may follow as ``--trl-path``). A turn's first two steps are warm-up.
Not equal: TRL's AdamW steps on the bf16 parameters alone, ours keeps fp32 masters.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import random_model

ROOT = Path(__file__).parent.parent
GROUP = 8
WARM = 2


def ours(args: argparse.Namespace, model: str, rows: Path, folder: Path) -> dict[str, list[float]]:
    n = args.groups * GROUP
    settings = {
        "actor_model_config": {"model_name_or_path": model, "optimizer": {"lr": 1e-6}} | json.loads(args.model_config),
        "dataset": str(rows),
        "reward_fn": "random_model:letters",
        "algorithm": {"name": "grpo"},
        "rollout_batch_size": n,
        "group_size": GROUP,
        "micro_batch_size": min(n, args.micro),
        "mini_batch_size": n,
        "max_prompt_length": args.prompt,
        "max_response_length": args.response,
        "rollout": {"engine": args.engine, "max_rows": n},
        "gradient_checkpointing": not args.keep_activations,
        "kl_sample_rows": 0,
        "checkpoint": {"every_steps": 0, "save": "actor"},
        "total_steps": args.steps,
        "run_dir": str(folder),
    }
    if args.micro_tokens:
        settings["max_tokens_per_micro_batch"] = args.micro_tokens
    path = folder.with_suffix(".yaml")
    path.write_text(json.dumps(settings))
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "verl.cli.main", "train", str(path)], check=True, cwd=Path(__file__).parent)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    whole = time.perf_counter() - start
    names = sorted({name for line in lines for name in line if name.startswith(("time/", "policy/", "memory/"))})
    for name in names:
        print(f"{name:32} " + " ".join(f"{line[name]:.4g}" for line in lines if name in line))
    seconds = [line["time/step"] for line in lines]
    return {
        "seconds": seconds,
        "peak": [max(line.get("memory/peak_gib", 0.0) for line in lines)],
        "first": [whole - sum(seconds[1:])],
    }


def theirs(args: argparse.Namespace, model: str, rows: Path, folder: Path) -> dict[str, list[float]]:
    config = {
        "per_device_train_batch_size": min(args.groups * GROUP, args.micro),
        "gradient_accumulation_steps": max(1, args.groups * GROUP // args.micro),
        "num_generations": GROUP,
        "max_completion_length": args.response,
        "learning_rate": 1e-6,
        "gradient_checkpointing": True,
        "bf16": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": 0.4,
        "vllm_max_model_length": args.prompt + args.response,
    }
    out = folder.with_suffix(".json")
    script = ROOT / "benchmarks" / "peers" / "trl_grpo.py"
    path = os.pathsep.join(p for p in (args.trl_path, os.environ.get("PYTHONPATH", "")) if p)
    settings = {"reward": "letters", "dtype": "bfloat16", "config": config}
    start = time.perf_counter()
    subprocess.run(
        [args.trl, str(script), model, str(rows), str(args.steps), str(out), json.dumps(settings)],
        check=True, cwd=out.parent, env=os.environ | {"PYTHONPATH": path, "VLLM_USE_FLASHINFER_SAMPLER": "0"},
    )  # fmt: skip
    result = json.loads(out.read_text())
    result["first"] = [time.perf_counter() - start - sum(result["seconds"][1:])]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", help="python of an environment with trl and vllm; left out: only verl is measured")
    parser.add_argument("--trl-path", default="", help="where that environment's packages lie")
    parser.add_argument("--shape", default="1.5b", choices=random_model.SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--engine", default="native")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--response", type=int, default=512, help="tokens")
    parser.add_argument("--micro", type=int, default=32, help="rows of a forward")
    parser.add_argument("--micro-tokens", type=int, default=0, help="tokens of a forward of ours")
    parser.add_argument("--keep-activations", action="store_true", help="ours without gradient checkpointing")
    parser.add_argument("--model-config", default="{}", help="JSON, more keys of actor_model_config")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    told = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = random_model.save(folder / "model", args.shape, args.device)
        rows = folder / "rows.jsonl"
        texts = random_model.prompts(args.groups * args.steps, args.prompt)
        rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        told["verl"] = ours(args, model, rows, folder / "verl")
        if args.trl:
            told["TRL"] = theirs(args, model, rows, folder / "trl")
    tokens = args.groups * GROUP * (args.prompt + args.response)
    base = statistics.median(told["TRL"]["seconds"][WARM:]) if args.trl else float("nan")
    print("\n| system | s per step (median) | min | max | tokens/s | peak GiB | start to first step, s | times TRL |")
    print("|---|---|---|---|---|---|---|---|")
    for system, result in told.items():
        steps = result["seconds"][WARM:]
        median = statistics.median(steps)
        print(
            f"| {system} | {median:.2f} | {min(steps):.2f} | {max(steps):.2f} | {tokens / median:,.0f} | "
            f"{result['peak'][0]:.1f} | {result['first'][0]:.0f} | {base / median:.2f}x |"
        )


if __name__ == "__main__":
    main()
