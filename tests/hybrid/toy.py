"""A toy model's weights over ranks, as training and generation lay them out, and processes that publish it."""

from __future__ import annotations

import random
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.forks import FORKS
from verl.hybrid import publish
from verl.hybrid.publish import Corridor, Report
from verl.hybrid.reshard import Holdings, Plan, Weight, generation, training
from verl.hybrid.table import Table
from verl.hybrid.transport import Distributed
from verl.layout import Box, Layout, Part

HEADS, KV_HEADS, DIM, HIDDEN, INNER, EXPERTS, VOCAB, LAYERS = 8, 4, 2, 16, 32, 3, 24, 4
FUSED = ("q_proj", "k_proj", "v_proj")  # generation keeps these of a layer in one tensor


def toy(itemsize: int = 2) -> list[Weight]:
    """Grouped-query attention, a mixture of experts (all experts in one weight), norms, a tied embedding."""
    weights = [Weight("embed", (VOCAB, HIDDEN), itemsize)]
    for i in range(LAYERS):
        at = {"itemsize": itemsize, "layer": i / LAYERS}
        weights += [
            Weight(f"{i}.q_proj", (HEADS * DIM, HIDDEN), cut=0, **at),
            Weight(f"{i}.k_proj", (KV_HEADS * DIM, HIDDEN), cut=0, **at),
            Weight(f"{i}.v_proj", (KV_HEADS * DIM, HIDDEN), cut=0, **at),
            Weight(f"{i}.o_proj", (HIDDEN, HEADS * DIM), cut=1, **at),
            Weight(f"{i}.experts", (EXPERTS, INNER, HIDDEN), cut=1, **at),
            Weight(f"{i}.norm", (HIDDEN,), **at),
        ]
    return weights


@dataclass(frozen=True)
class Case:
    """``apart``: the generating ranks are others than the training ones."""

    layout: Layout
    sharded: bool
    tp: int
    pp: int = 1
    apart: bool = False
    bucket: int = 1 << 20
    alone: int = 300  # bytes of a part that is a message of its own

    @property
    def size(self) -> int:
        return self.layout.size * (2 if self.apart else 1)

    def holdings(self, weights: Sequence[Weight]) -> tuple[Holdings, Holdings]:
        held = training(weights, self.layout, sharded=self.sharded)
        wanted = generation(weights, self.layout, self.tp, self.pp)
        if self.apart:
            wanted = {rank + self.layout.size: parts for rank, parts in wanted.items()}
        return held, wanted


def cases(seed: int, size: int, number: int) -> list[Case]:
    """Random layouts of ``size`` ranks that the toy model's sizes allow."""
    draw, found = random.Random(seed), list[Case]()
    while len(found) < number:
        apart = size > 1 and draw.random() < 0.3
        ranks = size // 2 if apart else size
        pp, tp = draw.choice([1, 1, 2, 4]), draw.choice([1, 2, 4, 8])
        if ranks % (pp * tp):
            continue
        layout = Layout.of(ranks, tp=tp, pp=pp)
        blocks = layout.tp if layout.tp > 1 else layout.dp
        divides = [n for n in (1, 2, 4, 8) if blocks % n == 0]
        found.append(
            Case(
                layout,
                sharded=draw.random() < 0.6,
                tp=draw.choice(divides),
                pp=draw.choice([n for n in (1, 2, 4) if pp % n == 0]),
                apart=apart,
                bucket=draw.choice([64, 700, 1 << 20]),
                alone=draw.choice([1, 300, 1 << 20]),
            )
        )
    return found


def values(weights: Sequence[Weight], version: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights at a version; from one to the next about one value of ten changes."""
    made = {w.name: torch.randn(w.shape, generator=torch.Generator().manual_seed(i)) for i, w in enumerate(weights)}
    for step in range(1, version + 1):
        draw = torch.Generator().manual_seed(step)
        for tensor in made.values():
            tensor += (torch.rand(tensor.shape, generator=draw) < 0.1) * torch.rand(tensor.shape, generator=draw)
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def sent(plan: Plan, rank: int) -> int:
    """Bytes that go to other ranks."""
    return sum(move.bytes for move in plan.crossing if move.source == rank)


def cut(full: Tensor, box: Box) -> Tensor:
    return full[tuple(slice(start, stop) for start, stop in box)]


def places(weights: Sequence[Weight], wanted: dict[str, Sequence[Box]], dtype: torch.dtype) -> dict[str, list[Part]]:
    """Room for a generating rank's parts; those of ``FUSED`` of a layer are rows of one tensor."""
    table, made = {w.name: w for w in weights}, dict[str, list[Part]]()

    def shape(box: Box) -> list[int]:
        return [stop - start for start, stop in box]

    for name, (box,) in wanted.items():
        layer, _, kind = name.partition(".")
        if kind not in FUSED:
            made[name] = [Part(torch.zeros(shape(box), dtype=dtype), box)]
        elif kind == FUSED[0]:
            boxes = [wanted[f"{layer}.{each}"][0] for each in FUSED]
            rows = [shape(b)[0] for b in boxes]
            fused = torch.zeros(sum(rows), *table[name].shape[1:], dtype=dtype)
            for each, b, part in zip(FUSED, boxes, fused.split(rows), strict=True):
                made[f"{layer}.{each}"] = [Part(part, b)]
    return made


class Flips(Distributed):
    """A link that flips a bit of the ``which``-th exchange it carries."""

    def __init__(self, group: Any, which: int) -> None:
        super().__init__(group, torch.device("cpu"))
        self.which, self.seen = which, 0

    def start(self, sends: Any, receives: Any) -> Callable[[], None]:
        if sends:
            if self.seen == self.which:
                sends = {peer: [t.clone() for t in tensors] for peer, tensors in sends.items()}
                next(iter(sends.values()))[-1].view(torch.uint8)[-1] ^= 1
            self.seen += 1
        return super().start(sends, receives)


def publish_on(
    rank: int, case: Case, dtype: torch.dtype, incremental: Any, versions: int, streams: bool, flips: int | None,
    missed: bool,
) -> list[Report]:  # fmt: skip
    """One rank's publishes of versions 1, 2, ...; each is compared with the truth, bit for bit."""
    weights = toy(dtype.itemsize)
    publish.ALONE = case.alone
    held, wanted = case.holdings(weights)
    target = None if streams else places(weights, dict(wanted.get(rank, {})), dtype)
    group = dist.group.WORLD
    reports, corridor, has = [], None, -1
    for version in range(1, versions + 1):
        truth = values(weights, version, dtype)
        source = {
            name: [Part(cut(truth[name], box).contiguous(), box) for box in boxes]
            for name, boxes in held.get(rank, {}).items()
        }
        if corridor is None:
            generates = rank in wanted
            table = Table.of(source, target or {}, streams and generates, rank=rank, group=group)
            link = (
                Distributed(group, torch.device("cpu")) if flips is None else Flips(group, flips if rank == 0 else -1)
            )
            corridor = Corridor(table, rank, link, bucket=case.bucket, incremental=incremental)
        if missed and version == 3 and rank == min(wanted):
            has = 1
        seen = {}
        for name, tensor in corridor.flow(version, source, target, has):
            seen[name] = tensor.clone()
        has = version
        expected = {w.name: [tuple((0, n) for n in w.shape)] for w in weights} if streams else wanted.get(rank, {})
        if rank in wanted:
            assert seen.keys() == expected.keys(), (rank, seen.keys() ^ expected.keys())
            for name, (box,) in expected.items():
                assert torch.equal(seen[name], cut(truth[name], box)), (rank, version, name)
                if target is not None:
                    assert torch.equal(target[name][0].tensor, cut(truth[name], box)), (rank, version, name)
        reports.append(replace(corridor.report))
    return reports


def run(n: int, **keys: Any) -> list[Any]:
    """``publish_on`` on ``n`` processes; an exception's text stands where a rank failed."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(n):
            here, there = FORKS.Pipe()
            process = FORKS.Process(target=_rank, args=(rank, n, folder, there, keys), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        results = []
        for pipe in pipes:
            results.append(pipe.recv() if pipe.poll(90) else "no answer")
        for process in processes:
            process.join(5)
            process.kill()
    return results


def _rank(rank: int, n: int, folder: str, pipe: Any, keys: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=n, timeout=timedelta(seconds=30)
    )
    try:
        result: Any = publish_each(rank, **keys)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
        if not isinstance(error, RuntimeError):
            traceback.print_exc()
    pipe.send(result)
    if not isinstance(result, str):
        dist.barrier()


def publish_each(rank: int, cases: Sequence[Case], **keys: Any) -> list[list[Report]]:
    defaults = {"dtype": torch.bfloat16, "incremental": "auto", "versions": 2, "streams": False, "flips": None}
    return [publish_on(rank, case, **(defaults | {"missed": False} | keys)) for case in cases]
