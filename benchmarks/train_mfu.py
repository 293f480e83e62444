"""How fast the training engine updates a model on one device, beside a plain transformers loop.

    python benchmarks/train_mfu.py [--cases 1.5b 1.5b-recompute 7b-recompute] [--rivals 1.5b 1.5b-recompute]

Random Qwen2-shaped models (vocabulary 151,936, bf16) through ``FsdpEngine.update``, the class that ``verl train``
uses: rows of prompt and response packed into micro-batches, log-probabilities and entropy, fp32 masters, AdamW,
clipping. Each case with compiled layers and without. The rival is ``model(input_ids, labels=...)`` with sdpa on equal
rows, which need no padding, and torch's fused AdamW on the bf16 parameters themselves (no masters: less memory, fewer
digits). Where TRL is installed its ``SFTTrainer`` takes such rows, too, with the same model and optimizer.

Columns: *tokens* are prompt and response tokens of the rows, each counted once, per second. *6NT* is 6 x parameters (a
tied head once) x tokens per second over the rate of a large matrix product measured in the same run. *work* counts
less: tokens that are really computed (a response's last isn't), the head on response tokens alone, no embedding
look-up. What is recomputed and attention's products count in neither. Times are medians of steps after the first two.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import statistics
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import random_model
import torch
from torch import Tensor, nn

from verl.batch import Batch, Ragged
from verl.config.model import ModelConfig, OptimizerConfig
from verl.engines.fsdp import FsdpEngine
from verl.models.factory import load_model
from verl.models.policy import Policy

WANT = frozenset({"logprobs", "entropy"})
GIB = 2**30


@dataclass
class Clock:
    """Seconds between marks, by what ends at them; on a GPU by events, read when asked for."""

    cuda: bool
    marks: list[tuple[str, Any]] = field(default_factory=list)

    def mark(self, ended: str) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.marks.append((ended, event if self.cuda else time.perf_counter()))

    def take(self) -> dict[str, float]:
        """Milliseconds by name since the first mark; starts anew."""
        if self.cuda:
            torch.cuda.synchronize()
        spent: dict[str, float] = defaultdict(float)
        for (_, start), (name, end) in zip(self.marks, self.marks[1:], strict=False):
            spent[name] += start.elapsed_time(end) if self.cuda else 1e3 * (end - start)
        self.marks.clear()
        return dict(spent)


def rows(count: int, prompt: int, response: int, vocabulary: int, seed: int) -> Batch:
    """Rows with a prompt of their own each."""
    g = torch.Generator().manual_seed(seed)
    batch = Batch([str(i) for i in range(count)])
    batch["prompt_ids"] = Ragged.from_rows(torch.randint(vocabulary, (count, prompt), generator=g))
    batch["response_ids"] = Ragged.from_rows(torch.randint(vocabulary, (count, response), generator=g))
    batch["response_mask"] = batch.ragged("response_ids").with_values(torch.ones(count * response, dtype=torch.bool))
    batch["weight"] = batch.ragged("response_ids").with_values(torch.randn(count * response, generator=g))
    return batch


def engine_of(shape: str, device: str, optimizer: OptimizerConfig, **options: Any) -> FsdpEngine:
    lm = load_model(ModelConfig(model_name_or_path=random_model.model(shape, device)), device, torch.bfloat16)
    return FsdpEngine(Policy(lm), optimizer, **options)


def loss_of(tokens: int, clock: Clock | None = None) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    def loss(outputs: dict[str, Tensor], micro: Batch) -> tuple[Tensor, dict[str, float]]:
        if clock:
            clock.mark("forward")
        x = outputs["logprobs"]
        total = -(x * micro.ragged("weight").values.to(x.device)).sum() / tokens
        return total, {"loss": total.item(), "entropy": outputs["entropy"].sum().item()}

    return loss


def watch(engine: FsdpEngine, clock: Clock) -> None:
    """Marks where a forward begins and where the last gradient is done."""
    engine.module.register_forward_pre_hook(lambda *_: clock.mark("backward"))
    done = engine.spread.reduce

    def reduce(masters: Any) -> None:
        clock.mark("backward")
        done(masters)

    engine.spread.reduce = reduce  # type: ignore[method-assign]


@dataclass
class Result:
    name: str
    system: str
    tokens: int
    flops: float  # of a step, 6NT
    work: float
    step: float  # ms
    parts: dict[str, float]
    first: float  # s
    peak: float  # GiB


def product(args: argparse.Namespace, name: str, compiled: bool) -> Result:
    shape, _, kind = name.partition("-")
    cuda, clock = args.device == "cuda", Clock(args.device == "cuda")
    kinds = {"name": args.optimizer or ("adamw8bit" if shape == "7b" else "adamw"), "lr": 1e-6}
    engine = engine_of(
        shape, args.device, OptimizerConfig(**kinds), gradient_checkpointing=kind == "recompute",
        compile_backend="inductor" if compiled else None,
    )  # fmt: skip
    watch(engine, clock)
    count = max(1, args.tokens // (args.prompt + args.response))
    cut = [list(range(i * count, (i + 1) * count)) for i in range(args.micro_batches)]
    vocabulary = random_model.VOCABULARY
    times, parts, first = [], [], 0.0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for step in range(args.steps + 2):
        batch = rows(count * args.micro_batches, args.prompt, args.response, vocabulary, step)
        sync(args.device)
        start = time.perf_counter()
        clock.mark("start")
        loss = loss_of(count * args.micro_batches * args.response, clock)
        report = engine.update(batch, cut, loss, WANT, 1.0)
        clock.mark("optimizer")
        spent = clock.take()
        if report.skipped or not report.grad_norm > 0:
            raise RuntimeError(f"no step was made: {report}")
        if step == 0:
            first = time.perf_counter() - start
        if step >= 2:
            times.append(1e3 * (time.perf_counter() - start))
            parts.append(spent)
    n = sum(p.numel() for p in engine.module.parameters())
    head = engine.module.head_weight.numel()  # type: ignore[union-attr,operator]
    inner = n - head * (2 if shape == "7b" else 1)
    all_rows = count * args.micro_batches
    tokens = all_rows * (args.prompt + args.response)
    work = 6.0 * (inner * all_rows * (args.prompt + args.response - 1) + head * all_rows * args.response)
    return Result(
        name, f"verl, {'compiled' if compiled else 'eager'}, {kinds['name']}", tokens, 6.0 * n * tokens, work,
        statistics.median(times), {k: statistics.median(p.get(k, 0.0) for p in parts) for k in parts[0]}, first,
        torch.cuda.max_memory_allocated() / GIB if cuda else 0.0,
    )  # fmt: skip


def rival(args: argparse.Namespace, name: str) -> Result:
    shape, _, kind = name.partition("-")
    cuda = args.device == "cuda"
    model: nn.Module = random_model.model(shape, args.device)
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    model.train()
    if kind == "recompute":
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    length = args.prompt + args.response
    count = max(1, args.tokens // length)
    times, first = [], 0.0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for step in range(args.steps + 2):
        ids = torch.randint(random_model.VOCABULARY, (args.micro_batches, count, length), device=args.device)
        labels = ids.clone()
        labels[..., : args.prompt] = -100
        sync(args.device)
        start = time.perf_counter()
        for x, y in zip(ids, labels, strict=True):
            (model(input_ids=x, labels=y, use_cache=False).loss / args.micro_batches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sync(args.device)
        if step == 0:
            first = time.perf_counter() - start
        if step >= 2:
            times.append(1e3 * (time.perf_counter() - start))
    n = sum(p.numel() for p in model.parameters())
    tokens = count * args.micro_batches * length
    peak = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
    return Result(name, "transformers, sdpa", tokens, 6.0 * n * tokens, 0.0, statistics.median(times), {}, first, peak)


def trl(args: argparse.Namespace, name: str) -> Result:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    shape, _, kind = name.partition("-")
    length, cuda = args.prompt + args.response, args.device == "cuda"
    count, steps, times = max(1, args.tokens // length), args.steps + 2, []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            sync(args.device)
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            sync(args.device)
            times.append(time.perf_counter() - self.start)

    lm = random_model.model(shape, args.device)
    ids = torch.randint(random_model.VOCABULARY, (steps * args.micro_batches * count, length)).tolist()
    data = Dataset.from_list([{"input_ids": row, "labels": [-100] * args.prompt + row[args.prompt :]} for row in ids])
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=count, learning_rate=1e-6,
            gradient_accumulation_steps=args.micro_batches, gradient_checkpointing=kind == "recompute", bf16=cuda,
            use_cpu=not cuda, optim="adamw_torch_fused", max_grad_norm=1.0, max_length=length, save_strategy="no",
            logging_steps=steps, report_to=[],
        )  # fmt: skip
        SFTTrainer(
            lm, config, train_dataset=data, processing_class=random_model.tokenizer(), callbacks=[Clock()],
        ).train()  # fmt: skip
    n, tokens = sum(p.numel() for p in lm.parameters()), count * args.micro_batches * length
    peak = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
    took = 1e3 * statistics.median(times[2:])
    return Result(name, "TRL's SFTTrainer", tokens, 6.0 * n * tokens, 0.0, took, {}, times[0], peak)


def ceiling(device: str, size: int = 8192) -> float:
    """Operations per second of a bf16 product of random matrices."""
    size = size if device == "cuda" else 64
    a, b = torch.randn(2, size, size, device=device).to(torch.bfloat16)
    times = []
    for _ in range(23):
        sync(device)
        start = time.perf_counter()
        for _ in range(4):
            a @ b
        sync(device)
        times.append((time.perf_counter() - start) / 4)
    return 2 * size**3 / statistics.median(times[3:])


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def attempts(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Result]]]:
    for name in args.cases:
        for compiled in args.compile:
            yield f"{name} compile {compiled}", lambda n=name, c=compiled: product(args, n, c == "on")  # type: ignore[misc]
        if name in args.rivals:
            yield f"{name} transformers", lambda n=name: rival(args, n)  # type: ignore[misc]
            if importlib.util.find_spec("trl"):
                yield f"{name} TRL", lambda n=name: trl(args, n)  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", default=["1.5b", "1.5b-recompute", "7b-recompute"])
    parser.add_argument("--rivals", nargs="*", default=["1.5b", "1.5b-recompute"], help="cases with the others")
    parser.add_argument("--compile", nargs="+", choices=["on", "off"], default=["on", "off"])
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--optimizer", help="default: adamw; at 7b adamw8bit, since AdamW's moments don't fit beside")
    args = parser.parse_args()

    rate, results, failed = ceiling(args.device), [], []
    print(f"bf16 product: {rate / 1e12:.0f} TFLOP/s", flush=True)
    for name, attempt in attempts(args):
        try:
            results.append(attempt())
            r = results[-1]
            print(f"{name}: {r.step:.0f} ms, {r.flops / r.step * 1e3 / rate:.1%}, {r.peak:.1f} GiB", flush=True)
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}")
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
        with contextlib.suppress(AttributeError):
            torch._dynamo.reset()
    rate = (rate + ceiling(args.device)) / 2
    print(f"\nbf16 product, mean of before and after: {rate / 1e12:.0f} TFLOP/s. Micro-batches of {args.tokens} tokens "
          f"({args.prompt} + {args.response} a row), {args.micro_batches} a step\n")  # fmt: skip
    print("| case | system | tokens/s | 6NT | work | step ms | forward | backward | optimizer | first step s | GiB |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for r in results:
        split = " | ".join(f"{r.parts[k]:.0f}" if k in r.parts else "" for k in ("forward", "backward", "optimizer"))
        work = f"{r.work / r.step * 1e3 / rate:.1%}" if r.work else ""
        speed, share = r.tokens / r.step * 1e3, r.flops / r.step * 1e3 / rate
        print(
            f"| {r.name} | {r.system} | {speed:,.0f} | {share:.1%} | {work} | "
            f"{r.step:.0f} | {split} | {r.first:.1f} | {r.peak:.1f} |"
        )
    for line in failed:
        print(f"failed: {line}")


if __name__ == "__main__":
    main()
