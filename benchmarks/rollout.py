"""Tokens per second of the native engine beside Hugging Face's ``generate``, and beside vLLM where it is installed.

    python benchmarks/rollout.py [--model models/smollm2] [--prompts 32 128] [--device cpu] [--dtype auto]
        [--short 12] [--long 64] [--repeats 3] [--clock wall]

All have the same model in the same dtype and the same prompts (random ids, 16 to 64 of them, no two alike), draw at
temperature 1 from the whole vocabulary and end rows by length alone: one row in ten is ``--long`` tokens long, the
others ``--short``. ``generate`` gets all prompts as one left-padded batch and computes every row to the longest; what
is beyond a row's length isn't counted. A second case has only long rows. The systems take turns, and medians are
compared.

A second table has the native engine's time by that of the same run if each step cost what a step of just its unfinished
rows costs when they are alone: 1 is perfect continuous batching. The last column says what rows that all run to the
longest take by the same measure.

``--clock processor`` counts the processor time of this process instead, which neighbours on a shared machine disturb
less; set OMP_NUM_THREADS=1 for it, as threads that wait for each other count, too.

Run so far: native and ``generate`` on a CPU. vLLM is taken on CUDA only, in a process of its own; that part has not
been run, nor has anything here on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import multiprocessing
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from verl.config.model import ModelConfig
from verl.models.factory import load_model, resolve_dtype
from verl.models.naming import own_tensors
from verl.models.policy import Policy
from verl.rollout.base import Request, RolloutEngine, Sampling
from verl.rollout.native import NativeEngine

Lengths = dict[Request, int]  # response tokens of each row
System = Callable[[Lengths], None]

SHORTEST, LONGEST = 16, 64  # prompts


def rows(prompts: int, model: str) -> list[Request]:
    vocabulary, draw = AutoConfig.from_pretrained(model).get_text_config().vocab_size, random.Random(0)
    sizes = [draw.randint(SHORTEST, LONGEST) for _ in range(prompts)]
    return [Request(f"{i}", f"{i}", tuple(draw.randrange(vocabulary) for _ in range(n))) for i, n in enumerate(sizes)]


def sample(engine: RolloutEngine, lengths: Lengths) -> None:
    """Rows of equal length are one call; the engine computes all calls together."""

    async def call(n: int) -> None:
        asked = [row for row in lengths if lengths[row] == n]
        async for response in engine.generate(asked, Sampling(max_new_tokens=n)):
            assert len(response.ids) == n

    async def calls() -> None:
        await asyncio.gather(*(call(n) for n in set(lengths.values())))

    asyncio.run(calls())


def native(model: str, device: str, dtype: torch.dtype, most: int) -> System:
    policy = Policy(load_model(ModelConfig(model_name_or_path=model), device, dtype))
    engine = NativeEngine(policy, frozenset(), max_rows=most)
    return lambda lengths: sample(engine, lengths)


def generate(model: str, device: str, dtype: torch.dtype) -> System:
    lm: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
    lm.generation_config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0, use_cache=True)

    def run(lengths: Lengths) -> None:
        width, longest = max(len(row.prompt_ids) for row in lengths), max(lengths.values())
        ids = torch.tensor([(0,) * (width - len(row.prompt_ids)) + row.prompt_ids for row in lengths], device=device)
        mask = torch.tensor([[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in lengths])
        out = lm.generate(ids, attention_mask=mask.to(device), max_new_tokens=longest).tolist()
        assert len(out[0]) == width + longest

    return run


def _vllm(pipe: Connection, model: str, device: str, dtype: torch.dtype, most: int, longest: int) -> None:
    """In the child: samples each ``Lengths`` that comes, until ``None`` does; says when it is done."""
    from verl.rollout.vllm import VllmEngine

    engine = VllmEngine(
        model, frozenset(), None, device=device, dtype=dtype, max_rows=most, max_tokens=LONGEST + longest
    )
    engine.load(own_tensors(AutoModelForCausalLM.from_pretrained(model, dtype=dtype)), 1)
    pipe.send(True)
    while (lengths := pipe.recv()) is not None:
        sample(engine, lengths)
        pipe.send(True)
    engine.close()


def vllm(model: str, device: str, dtype: torch.dtype, most: int, longest: int) -> System:
    context = multiprocessing.get_context("spawn")
    pipe, childs = context.Pipe()
    context.Process(target=_vllm, args=(childs, model, device, dtype, most, longest), daemon=True).start()
    childs.close()  # so that a child that fails ends what is read here
    pipe.recv()

    def run(lengths: Lengths) -> None:
        pipe.send(lengths)
        pipe.recv()

    return run


def by_active_rows(seconds: Callable[[Lengths], float], lengths: Lengths) -> float:
    """Seconds of the run if each step cost what it does for its unfinished rows alone."""
    total, before = seconds(dict.fromkeys(lengths, 1)), 1
    for n in sorted(set(lengths.values())):
        active = [row for row in lengths if lengths[row] >= n]
        step = (seconds(dict.fromkeys(active, n)) - seconds(dict.fromkeys(active, 1))) / (n - 1)
        total, before = total + (n - before) * step, n
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parent.parent / "models" / "smollm2"))
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16"])
    parser.add_argument("--short", type=int, default=12)
    parser.add_argument("--long", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", default="wall", choices=["wall", "processor"])
    args = parser.parse_args()
    clock = time.perf_counter if args.clock == "wall" else time.process_time

    def measured(name: str, lengths: Lengths) -> float:
        start = clock()
        systems[name](lengths)
        return clock() - start

    dtype, most = resolve_dtype(args.dtype, args.device), max(args.prompts)
    systems: dict[str, System] = {"generate": generate(args.model, args.device, dtype)}
    systems["native"] = native(args.model, args.device, dtype, most)
    if torch.device(args.device).type == "cuda" and importlib.util.find_spec("vllm"):
        systems["vLLM"] = vllm(args.model, args.device, dtype, most, args.long)
    ragged_name, equal_name = f"90 % {args.short}, 10 % {args.long}", f"all {args.long}"
    speeds, ratios = [], []
    for prompts in args.prompts:
        asked = rows(prompts, args.model)
        ragged = {row: args.long if i % 10 == 3 else args.short for i, row in enumerate(asked)}
        equal = dict.fromkeys(asked, args.long)
        seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        ideal = []
        for system in systems.values():
            system(dict.fromkeys(asked, 2))  # warm-up
        for _ in range(args.repeats):
            for name in systems:
                took = measured(name, equal)
                seconds[equal_name, name].append(took)
                # generate computes the same for both
                seconds[ragged_name, name].append(took if name == "generate" else measured(name, ragged))
            ideal.append(by_active_rows(partial(measured, "native"), ragged))
        for case, lengths in ((ragged_name, ragged), (equal_name, equal)):
            base = statistics.median(seconds[case, "generate"])
            for name in systems:
                all_took, tokens = seconds[case, name], sum(lengths.values())
                median = statistics.median(all_took)
                spread = f"{tokens / median:.0f} | {tokens / max(all_took):.0f} | {tokens / min(all_took):.0f}"
                speeds.append(f"| {prompts} | {case} | {name} | {spread} | {base / median:.2f}x |")
        mine, static, least = (
            statistics.median(took) for took in (seconds[ragged_name, "native"], seconds[equal_name, "native"], ideal)
        )
        ratios.append(f"| {prompts} | {least:.2f} | {mine / least:.2f} | {static / least:.2f} |")
    print(f"{torch.get_num_threads()} threads, {dtype}, {args.repeats} repeats, {args.clock} time")
    print("\n| prompts | response tokens | system | tokens/s (median) | min | max | times generate |")
    print("|---|---|---|---|---|---|---|", *speeds, sep="\n")
    print("\n| prompts | by active rows, s | native takes | all rows to the longest |")
    print("|---|---|---|---|", *ratios, sep="\n")


if __name__ == "__main__":
    main()
