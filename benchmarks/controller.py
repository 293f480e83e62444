"""What the controller costs: its own processor time per lap, and the bytes that pass through it per row.

    python benchmarks/controller.py [--rows 1024] [--tokens 1000] [--workers 2] [--laps 1]

GRPO with a KL penalty on local CPU workers, through the same ``Run`` as ``verl train``. The model is a tiny random one
whose responses all reach the limit: rows and tokens are what a controller sees of a large model, too. The time is that
of the thread which walks the lap, everything it does included, by the system's clock of that thread's processor use.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from random_model import save_words

from verl.config.load import load_config
from verl.trainer.base import Run

WORDS = [f"w{i}" for i in range(60)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1000, help="of each response")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of each prompt")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--laps", type=int, default=1, help="after the first")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        data = [{"prompt": " ".join(WORDS[(i + k) % 60] for k in range(args.prompt))} for i in range(args.rows // 8)]
        cfg = load_config(
            None,
            actor_model_config={"model_name_or_path": save_words(Path(scratch), WORDS, args.prompt + args.tokens + 8)},
            algorithm={"name": "grpo"}, init_kl_coef=0.01, dataset=data, reward_fn=unlike,
            rollout_batch_size=args.rows, micro_batch_size=32, mini_batch_size=args.rows // 2, group_size=8,
            max_prompt_length=args.prompt + 4, max_response_length=args.tokens, total_steps=args.laps + 1,
            rollout={"max_rows": args.rows}, run_dir=f"{scratch}/run", metrics={"tensorboard": False},
            device_map={"actor": [f"cpu:{i}" for i in range(args.workers)]}, checkpoint={"every_steps": 0},
        )  # fmt: skip
        found = []
        with Run(cfg, console=False) as run:
            run.prepare()
            for _ in range(args.laps + 1):
                bytes_before, busy, start = run.controller.crew.group.traffic, time.thread_time(), time.perf_counter()
                result = run.step()
                through = run.controller.crew.group.traffic - bytes_before
                found.append((time.thread_time() - busy, through, time.perf_counter() - start, result.metrics))
    print(f"{args.rows} rows of {args.prompt} + {args.tokens} tokens, {args.workers} workers, GRPO, 2 steps per lap")
    print(f"{'lap':>4} {'seconds':>9} {'controller ms':>14} {'bytes':>10} {'bytes/row':>10}")
    for i, (busy, through, seconds, _) in enumerate(found):
        warm = "  (first)" if i == 0 else ""
        print(f"{i + 1:>4} {seconds:>9.1f} {busy * 1e3:>14.1f} {through:>10} {through / args.rows:>10.1f}{warm}")
    assert all(metrics["response/length_max"] == args.tokens for *_, metrics in found)


def unlike(response: str) -> float:
    """A reward that differs from row to row."""
    return len(set(response.split())) / len(WORDS)


if __name__ == "__main__":
    main()
