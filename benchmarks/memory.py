"""Peak memory and seconds of training steps on one device: what fits, and what it costs.

    python benchmarks/memory.py [--cases logprobs qlora lora full8bit full micro accumulation] [--shape 7b]

Random Qwen2-shaped models (vocabulary 151,936, bf16) through ``FsdpEngine.update``, the class that ``verl train`` uses,
with gradient checkpointing, on rows of 2,048 tokens. Each case is a process's worth of memory: all of it is given back
before the next. *peak* is the most that was allocated at once, model and optimizer included.

- ``logprobs``: log-probabilities of 32k tokens, forward and backward: peak beyond the hidden states, the head and
  float32 gradients of the head; and the same function beside the plain formula, in float32 at a small size.
- ``qlora``, ``lora``, ``full8bit`` (adamw8bit), ``full`` (AdamW, its state, masters and gradients in CPU memory).
- ``micro``: LoRA on 32 rows in micro-batches of 32 and of 16. ``accumulation``: 16, 32 and 64 rows in micro-batches of
  16: the peak must not grow.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import random_model
import torch
from train_mfu import GIB, WANT, loss_of, rows, sync

from verl.config.model import ModelConfig, OptimizerConfig
from verl.engines.fsdp import FsdpEngine
from verl.models.factory import load_model
from verl.models.logprobs import token_logprobs
from verl.models.policy import Policy

Line = tuple[str, str, float, float]  # case, what, peak GiB, seconds


def forget(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak(device: str) -> float:
    """GiB since ``forget``."""
    return torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 0.0


def logprobs(args: argparse.Namespace) -> Iterator[Line]:
    tokens, vocabulary, width = (32768, random_model.VOCABULARY, 1536) if args.device == "cuda" else (256, 2000, 64)
    for what in ("hidden and head", "hidden alone"):  # with LoRA the head takes no gradient
        forget(args.device)
        hidden = torch.randn(tokens, width, device=args.device).to(torch.bfloat16).requires_grad_()
        weight = (torch.randn(vocabulary, width, device=args.device) / width**0.5).to(torch.bfloat16)
        weight.requires_grad_(what == "hidden and head")
        targets = torch.randint(vocabulary, (tokens,), device=args.device)
        seconds = 0.0
        for _ in range(2):  # the second is timed and measured
            hidden.grad = weight.grad = None
            forget(args.device)
            before = torch.cuda.memory_allocated() / GIB if args.device == "cuda" else 0.0
            sync(args.device)
            start = time.perf_counter()
            lp, entropy = token_logprobs(hidden, weight, None, targets, with_entropy=True)
            (lp.mean() - 0.1 * entropy.mean()).backward()  # type: ignore[union-attr]
            sync(args.device)
            seconds = time.perf_counter() - start
        above = peak(args.device) - before - (4 * weight.numel() / GIB if weight.requires_grad else 0.0)
        yield (
            "logprobs",
            f"{tokens} tokens x {vocabulary}, width {width}, gradients of {what}; beyond these",
            above,
            seconds,
        )
        del hidden, weight, targets, lp, entropy
    worst = differs(args.device)
    yield "logprobs", f"float32 beside the plain formula: largest relative difference {worst:.1e}", 0.0, 0.0


def differs(device: str) -> float:
    """Of values and gradients, against all logits at once; by norms."""
    results = []
    for plain in (True, False):
        g = torch.Generator().manual_seed(0)
        draw = [torch.randn(*s, generator=g).to(device) for s in ((301, 64), (5003, 64), (2, 301))]
        hidden, weight = draw[0].requires_grad_(), draw[1].requires_grad_()
        targets = torch.randint(5003, (301,), generator=g).to(device)
        if plain:
            log_p = torch.log_softmax(hidden @ weight.t() / 0.8, -1)
            lp, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        else:
            lp, entropy = token_logprobs(  # type: ignore[assignment]
                hidden, weight, None, targets, temperature=0.8, with_entropy=True, chunk=100, keep_bytes=0
            )
        ((lp * draw[2][0]).sum() + (entropy * draw[2][1]).sum()).backward()
        results.append([lp.detach(), entropy.detach(), hidden.grad, weight.grad])
    return max(((a - b).norm() / a.norm()).item() for a, b in zip(*results, strict=True))  # type: ignore[operator,union-attr]


class Models:
    """The random model, and a folder with it for what is quantised as it is read."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder = args, Path(tempfile.mkdtemp(prefix="verl-memory-"))

    def engine(self, kind: str) -> FsdpEngine:
        args = self.args
        options: dict[str, Any] = {"use_lora": kind in ("lora", "qlora"), "load_in_4bit": kind == "qlora"}
        if kind == "qlora":
            source: Any = str(self.folder)
            if not (self.folder / "config.json").exists():
                random_model.model(args.shape, args.device).save_pretrained(self.folder)
                forget(args.device)
        else:
            source = random_model.model(args.shape, args.device)
        lm = load_model(ModelConfig(model_name_or_path=source, **options), args.device, torch.bfloat16)
        del source
        adam = OptimizerConfig(name="adamw8bit" if kind == "full8bit" else "adamw", lr=1e-6)
        offload = kind == "full" and args.device == "cuda"
        compiled = "inductor" if args.compile and kind != "qlora" else None
        return FsdpEngine(Policy(lm), adam, gradient_checkpointing=True, cpu_offload=offload, compile_backend=compiled)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def step(args: argparse.Namespace, engine: FsdpEngine, micro: int, micro_batches: int, seed: int) -> float:
    """Seconds of one optimizer step."""
    count = micro * micro_batches
    batch = rows(count, args.length // 4, args.length - args.length // 4, random_model.VOCABULARY, seed)
    cut = [list(range(i * micro, (i + 1) * micro)) for i in range(micro_batches)]
    sync(args.device)
    start = time.perf_counter()
    report = engine.update(batch, cut, loss_of(count * (args.length - args.length // 4)), WANT, 1.0)
    sync(args.device)
    if report.skipped or not report.grad_norm > 0:
        raise RuntimeError(f"no step was made: {report}")
    return time.perf_counter() - start


def one(args: argparse.Namespace, models: Models, kind: str) -> Iterator[Line]:
    forget(args.device)
    engine = models.engine(kind)
    size = sum(p.numel() for p in engine.module.parameters()) / 1e9
    trained = sum(p.numel() for _, p in engine.module.trainable()) / 1e6
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step(args, engine, args.micro // 2, 1, 0)
    seconds = step(args, engine, args.micro // 2, 1, 1)
    what = f"{args.micro // 2} rows of {args.length}, {trained:,.0f} million of {size:.1f} billion stored trained"
    yield kind, what, peak(args.device), seconds


def cuts(args: argparse.Namespace, models: Models, ways: list[tuple[int, int]], case: str) -> Iterator[Line]:
    """LoRA; ``ways``: rows of a micro-batch, and how many of them."""
    forget(args.device)
    engine = models.engine("lora")
    step(args, engine, ways[-1][0], 1, 0)
    for micro, micro_batches in ways:
        forget(args.device)
        seconds = min(step(args, engine, micro, micro_batches, seed) for seed in (1, 2))
        yield case, f"lora, {micro_batches} x {micro} rows of {args.length}", peak(args.device), seconds


def lines(args: argparse.Namespace, models: Models, case: str) -> Iterator[Line]:
    if case == "logprobs":
        return logprobs(args)
    if case == "micro":
        return cuts(args, models, [(args.micro, 1), (args.micro // 2, 2)], case)
    if case == "accumulation":
        return cuts(args, models, [(args.micro // 2, 1), (args.micro // 2, 2), (args.micro // 2, 4)], case)
    return one(args, models, case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    cases = ["logprobs", "lora", "micro", "accumulation", "qlora", "full8bit", "full"]
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases)
    parser.add_argument("--shape", default="7b", choices=list(random_model.SHAPES))
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row, a quarter of them the prompt's")
    parser.add_argument("--micro", type=int, default=32, help="rows of the larger micro-batch")
    parser.add_argument("--compile", action="store_true", help="compile layers, but those with 4-bit weights")
    args = parser.parse_args()

    models, table = Models(args), []
    try:
        for case in args.cases:
            try:
                for line in lines(args, models, case):
                    table.append(line)
                    print("{}: {}: {:.2f} GiB, {:.2f} s".format(*line), flush=True)
            except Exception as error:
                traceback.print_exc()
                reason = str(error).splitlines()[0][:200] if str(error) else ""
                table.append((case, f"failed: {type(error).__name__}: {reason}", 0.0, 0.0))
            forget(args.device)
            with contextlib.suppress(AttributeError):
                torch._dynamo.reset()
    finally:
        models.close()
    print(f"\n{args.shape}\n\n| case | what | peak GiB | s |\n|---|---|---|---|")
    for case, what, most, seconds in table:
        print(f"| {case} | {what} | {most:.2f} | {seconds:.2f} |")


if __name__ == "__main__":
    main()
