"""What goes from worker to worker in a lap: rows' columns and weights, beside the plain way that sends all to all.

    python benchmarks/transfers.py [--rows 256] [--tokens 64] [--laps 4] [--width 256] [--layers 4]

PPO with a KL penalty, actor and reference on two workers, the critic on two others, all sharded; a random model. The
same ``Run`` as ``verl train``, once as it is and once with ``hybrid_engine: false``: every weight gathered whole, every
column of every row on every worker. Both runs have the same metrics, which is asserted.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from random_model import save_words

from verl.config.load import load_config
from verl.trainer.base import Run

WORDS = [f"w{i}" for i in range(250)]


def unlike(response: str) -> float:
    """A reward that differs from row to row."""
    return len(set(response.split())) / 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64, help="of each response")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--laps", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kind", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    devices = [f"cpu:{i}" if args.kind == "cpu" else i for i in range(4)]
    told: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = save_words(
            Path(scratch) / "model", WORDS, args.prompt + args.tokens + 8,
            width=args.width, inner=3 * args.width, layers=args.layers, heads=4,
        )  # fmt: skip
        data = [{"prompt": " ".join(WORDS[(i + k) % 250] for k in range(args.prompt))} for i in range(args.rows)]
        for name, hybrid in (("ours", True), ("plain", False)):
            cfg = load_config(
                None,
                actor_model_config={"model_name_or_path": model, "dtype": "bf16", "optimizer": {"lr": 1e-6}},
                critic_model_config={"optimizer": {"lr": 1e-5}},
                algorithm={"name": "ppo"}, dataset=data, reward_fn=unlike, rollout_batch_size=args.rows,
                mini_batch_size=args.rows // 2, micro_batch_size=16, max_prompt_length=args.prompt + 4,
                max_response_length=args.tokens, total_steps=args.laps + 1, run_dir=f"{scratch}/{name}",
                metrics={"tensorboard": False}, checkpoint={"every_steps": 0}, hybrid_engine=hybrid,
                device_map={"actor": devices[:2], "critic": devices[2:]},
            )  # fmt: skip
            with Run(cfg, console=False) as run:
                run.prepare()
                run.train()
            told[name] = [json.loads(line) for line in Path(f"{scratch}/{name}/metrics.jsonl").read_text().splitlines()]
    for line, other in zip(told["ours"], told["plain"], strict=True):
        for key in ("reward/mean", "kl/mean", "policy/grad_norm", "critic/loss"):
            assert math.isclose(line[key], other[key], rel_tol=1e-5, abs_tol=1e-6), (line["step"], key)
    print(
        f"PPO, {args.rows} rows of {args.prompt} + {args.tokens} tokens, actor on 2 and critic on 2 {args.kind} workers"
    )
    print(f"{'':>8} {'columns':>12} {'weights':>14} {'together':>14} {'share of step':>14} {'s per step':>11}")
    together = {}
    for name, lines in told.items():
        columns, weights, share, seconds = (
            statistics.median(map(of, lines[1:]))
            for of in (
                lambda m: m["columns/bytes"],
                lambda m: m["publish/bytes"],
                lambda m: (m["time/columns"] + m["time/publish"]) / m["time/step"],
                lambda m: m["time/step"],
            )
        )
        together[name] = columns + weights
        print(f"{name:>8} {columns:>12,.0f} {weights:>14,.0f} {together[name]:>14,.0f} {share:>14.1%} {seconds:>11.2f}")
    print(f"ours / plain: {together['ours'] / together['plain']:.1%} of the bytes")


if __name__ == "__main__":
    main()
