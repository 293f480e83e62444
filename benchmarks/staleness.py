"""What older weights for rollouts cost in learning: ``hybrid_config.reshard_interval`` 1, 8, 16 on a tiny task.

    python benchmarks/staleness.py [--intervals 1,8,16] [--laps 64] [--seeds 2] [--picture FILE.svg] [--config FILE]

``verl train`` with GRPO from a small random model; the reward is the share of even words among twelve. ``--config``:
another run in its place, such as configs/demo.yaml. A table of reward and of KL of what is trained from the start,
means over seeds and over the laps since the line before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from random_model import save_words

WORDS = [f"w{i}" for i in range(60)]
LENGTH = 12
COLOURS = ("#1b6ca8", "#c8553d", "#4c9f70", "#7a5195")


def evens(response: str) -> float:
    """The share of even words."""
    return sum(int(word[1:]) % 2 == 0 for word in response.split() if word[0] == "w") / LENGTH


def train(scratch: Path, model: str, interval: int, seed: int, args: argparse.Namespace) -> list[dict[str, float]]:
    name = f"{interval}-{seed}"
    if args.config is not None:
        keys = {
            "hybrid_config.reshard_interval": interval, "seed": seed, "total_steps": args.laps,
            "run_dir": scratch / name, "checkpoint.save": "actor", "metrics.tensorboard": "false",
            "eval.dataset": "null",
        }  # fmt: skip
        return told_by(scratch / name, args.config, Path.cwd(), *(f"{key}={value}" for key, value in keys.items()))
    rows = [{"prompt": " ".join(WORDS[(7 * i + k) % 60] for k in range(4))} for i in range(64)]
    data = scratch / "prompts.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "actor_model_config": {"model_name_or_path": model, "dtype": "fp32", "optimizer": {"lr": args.lr}},
        "dataset": str(data), "reward_fn": f"{Path(__file__).stem}:evens", "algorithm": {"name": "grpo"},
        "rollout_batch_size": 64, "mini_batch_size": 64, "micro_batch_size": 64, "group_size": 8,
        "max_prompt_length": 8, "max_response_length": LENGTH, "init_kl_coef": 1e-3, "total_steps": args.laps,
        "hybrid_config": {"reshard_interval": interval}, "checkpoint": {"every_steps": 0, "save": "actor"},
        "metrics": {"tensorboard": False}, "run_dir": str(scratch / name), "seed": seed,
    }  # fmt: skip
    path = scratch / f"{name}.yaml"
    path.write_text(json.dumps(settings))
    return told_by(scratch / name, path, Path(__file__).parent)


def told_by(run: Path, config: Path, place: Path, *overrides: str) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "verl.cli.main", "train", str(config), *overrides]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def picture(told: dict[int, list[list[dict[str, float]]]], laps: int) -> str:
    """Reward and KL by lap, as SVG."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="760" height="300" font-family="sans-serif" font-size="12">',
        '<rect width="760" height="300" fill="white"/>',
    ]
    for panel, (metric, title) in enumerate((("reward/mean", "reward"), ("kl/mean", "KL from the start, nats/token"))):
        left, top, width, height = 50 + 370 * panel, 30, 320, 220
        lines = {
            interval: [statistics.fmean(seed[i][metric] for seed in seeds) for i in range(laps)]
            for interval, seeds in told.items()
        }
        high = max(max(line) for line in lines.values()) * 1.05 or 1.0
        parts.append(f'<text x="{left}" y="{top - 10}">{title}</text>')
        parts.append(f'<path d="M{left},{top}v{height}h{width}" fill="none" stroke="#888"/>')
        for share in (0, 0.5, 1):
            y = top + height * (1 - share)
            parts.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{high * share:.2g}</text>')
            text = f'<text x="{left + width * share:.0f}" y="{top + height + 18}" text-anchor="middle">'
            parts.append(f"{text}{round(laps * share)}</text>")
        for number, (interval, line) in enumerate(lines.items()):
            points = " ".join(
                f"{left + width * (i + 1) / laps:.1f},{top + height * (1 - v / high):.1f}" for i, v in enumerate(line)
            )
            colour = COLOURS[number % len(COLOURS)]
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            if not panel:
                label = f'<text x="{left + 90 * number}" y="290" fill="{colour}">'
                parts.append(f"{label}interval {interval}</text>")
    return "\n".join([*parts, "</svg>"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--intervals", default="1,8,16")
    parser.add_argument("--laps", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3, help="of the tiny task")
    parser.add_argument("--config", type=Path, help="a configuration file, with its own rate")
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    intervals = [int(text) for text in args.intervals.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = save_words(scratch / "model", WORDS, width=48, inner=96, layers=2, heads=4)
        told = {n: [train(scratch, model, n, seed, args) for seed in range(args.seeds)] for n in intervals}
    print(f"{args.seeds} seeds, {args.laps} laps" + (f", lr {args.lr:g}" if args.config is None else ""))
    print(f"{'lap':>5}" + "".join(f"{f'reward, {n}':>12}{f'KL, {n}':>10}{f'stale, {n}':>11}" for n in intervals))
    every = max(1, args.laps // 8)
    for end in range(every, args.laps + 1, every):

        def mean(n: int, metric: str, end: int = end) -> float:
            return statistics.fmean(line.get(metric) or 0.0 for seed in told[n] for line in seed[end - every : end])

        cells = (
            f"{mean(n, 'reward/mean'):>12.3f}{mean(n, 'kl/mean'):>10.4f}{mean(n, 'rollout/staleness'):>11.1f}"
            for n in intervals
        )
        print(f"{end:>5}" + "".join(cells))
    if args.picture:
        args.picture.write_text(picture(told, args.laps))


if __name__ == "__main__":
    main()
