"""What ranks save in pieces: together each tensor once, and whole what one rank would gather."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engines.pieces import gathered_state, joined
from tests.engines.ranks import run
from tests.engines.test_fsdp import loss_fn
from tests.engines.test_spread import DECAYING, MUON, Case, engine, mine, rows
from verl.checkpoint.parts import write_parts
from verl.checkpoint.tensorfile import Joined, Pieces, Scattered
from verl.config.model import OptimizerConfig
from verl.layout import Piece

Told = tuple[list[Piece], list[Piece], dict[str, Any]]


def told(case: Case) -> tuple[Told, Told]:
    """Pieces and facts; and what is gathered, as one piece each."""
    e = engine(case)
    e.update(rows(), mine(case), loss_fn, case.want, 0.8)
    weights, state, facts = e.saved(True)
    pieces = [p._replace(tensor=p.tensor.detach().clone()) for p in weights], list(state), facts
    assert not list(e.saved(False)[1]) and e.saved(False)[2] == {}
    shards = [whole(name, t.detach().clone()) for name, t in e.shards()]
    state = [whole(name, t) for name, t in gathered_state(e.optimizer).items()]
    return pieces, (shards, state, e.optimizer.facts)


def whole(name: str, tensor: Tensor) -> Piece:
    return Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.ndim)


CASES = {
    "mixture": (2, Case(model="mixture")),
    "two": (2, Case()),
    "four": (4, Case(model="gpt2")),
    "tensor": (4, Case(tp=2)),
    "tensor alone": (2, Case("NO_SHARD", tp=2)),
    "copies": (4, Case("HYBRID_SHARD", replicas=2, model="tied")),
    "whole": (2, Case("NO_SHARD")),
    "context": (2, Case(cp=2)),
    "bf16": (2, Case(dtype="bfloat16")),
    "lora": (2, Case(kind="lora")),
    "value": (2, Case(kind="value")),
    "shared": (2, Case(kind="shared")),
    "muon": (2, Case(optimizer=MUON)),
    "user's": (2, Case(optimizer=OptimizerConfig(name=torch.optim.NAdam, lr=1e-2))),
    "8 bits": (2, Case(optimizer=OptimizerConfig(name="adamw8bit", lr=1e-2))),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_pieces_make_what_is_gathered(kind: str) -> None:
    n, case = CASES[kind]
    ranks = run(n, told, case if case.optimizer not in (None, DECAYING) else replace(case, optimizer=DECAYING))
    for i in (0, 1):
        expected = joined(ranks[0][1][i])
        found = joined([piece for pieces, _ in ranks for piece in pieces[i]])
        assert found.keys() == expected.keys() and (expected or i)
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert all(pieces[2] == gathered[2] == {"step": 1} for pieces, gathered in ranks)
    if case.sharding == "FULL_SHARD" and case.kind in ("policy", "value"):
        sizes = [sum(p.tensor.nbytes for some in pieces[:2] for p in some) for pieces, _ in ranks]
        assert max(sizes) < 0.7 * sum(sizes) if n == 2 else max(sizes) < 0.5 * sum(sizes)


def taken(case: Case, folder: str) -> tuple[int, int, bool]:
    """How many numbers a rank reads that takes its part of what all wrote, of how many; and whether it has it then."""
    rank, world = dist.get_rank(), dist.get_world_size()
    e, again, read = engine(case), engine(case), []
    e.update(rows(), mine(case), loss_fn, case.want, 0.8)
    weights, state, facts = e.saved(True)
    for name, pieces in (("w", list(weights)), ("o", list(state))):
        boxes = {p.name: (p.shape, p.start) for p in pieces}
        write_parts(Path(folder), {f"{name}_{rank}": Pieces({p.name: p.tensor.detach() for p in pieces}, boxes)})
    dist.barrier()
    saved = [Joined(Path(folder, f"{name}_{r}.safetensors") for r in range(world)).parts for name in "wo"]
    index = Scattered.__getitem__
    Scattered.__getitem__ = lambda *how: read.append(index(*how)) or read[-1]  # type: ignore[method-assign]
    try:
        again.restore(*saved, facts)
    finally:
        Scattered.__getitem__ = index  # type: ignore[method-assign]
    same = all(torch.equal(a, b) for (_, a), (_, b) in zip(e.shards(), again.shards(), strict=True))
    states = gathered_state(e.optimizer), gathered_state(again.optimizer)
    same &= all(torch.equal(states[0][name], states[1][name]) for name in states[0] | states[1])
    whole = sum(part.shape.numel() for some in saved for part in some.values())
    return sum(t.numel() for t in read), whole, same


@pytest.mark.parametrize(
    ("kind", "share"), [("two", 0.6), ("four", 0.4), ("tensor", 0.4), ("value", 0.6), ("muon", 0.6)]
)
def test_a_rank_reads_its_own_part_alone(kind: str, share: float, tmp_path: Path) -> None:
    n, case = CASES[kind]
    for read, whole, same in run(n, taken, case, str(tmp_path)):
        assert same and 0 < read < share * whole


def test_one_rank_saves_all() -> None:
    pieces, gathered = told(Case(optimizer=DECAYING))
    for i in (0, 1):
        found, expected = joined(pieces[i]), joined(gathered[i])
        assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)
