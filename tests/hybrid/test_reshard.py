"""Plans over random layouts: every wanted byte once, from an owner, nothing that is there already, and the formulas."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.hybrid.toy import Case, cases, sent, toy
from verl.config.errors import RequestError
from verl.hybrid.reshard import (
    Weight,
    cost,
    cost_of_gathering,
    generation,
    plan,
    training,
    without,
)
from verl.layout import Box, Layout, elements, meet, whole

CASES = [case for size in (1, 2, 4, 8, 16) for case in cases(size, size, 60)]


def points(box: Box) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(start, stop) for start, stop in box))


def test_boxes():
    a, b = ((0, 4), (2, 6)), ((1, 3), (0, 4))
    assert meet(a, b) == ((1, 3), (2, 4)) and meet(a, ((4, 5), (2, 6))) is None
    rest = list(without(a, b))
    everything = sorted(p for box in rest for p in points(box)) + sorted(points(((1, 3), (2, 4))))
    assert sorted(everything) == sorted(points(a)) and list(without(a, ((9, 9), (0, 1)))) == [a]
    assert elements(()) == 1 and whole((2, 3)) == ((0, 2), (0, 3))


@pytest.mark.parametrize("chunk", range(10))
def test_each_wanted_value_comes_once_from_an_owner(chunk: int):
    weights = [Weight("v", (7,), 4), Weight("r", (5, 3), 2), *toy()[:7]]
    for case in CASES[chunk::10]:
        held, wanted = case.holdings(weights)
        made = plan(weights, held, wanted)
        come: dict[tuple[int, str], list[tuple[int, ...]]] = {}
        for move in made.moves:
            assert any(meet(box, move.box) == move.box for box in held[move.source][move.weight]), (case, move)
            come.setdefault((move.target, move.weight), []).extend(points(move.box))
        for rank, parts in wanted.items():
            for name, (box,) in parts.items():
                assert sorted(come.get((rank, name), [])) == sorted(points(box)), (case, rank, name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_receives_what_it_wants_less_what_it_has(case: Case):
    weights = toy()
    held, wanted = case.holdings(weights)
    made = plan(weights, held, wanted)
    for rank, parts in wanted.items():
        has = held.get(rank, {})
        lacks = 0
        for name, (box,) in parts.items():
            mine = [common for own in has.get(name, ()) if (common := meet(own, box)) is not None]
            lacks += 2 * (elements(box) - sum(map(elements, mine)))
        assert made.received(rank) == lacks
    assert sum(map(made.received, wanted)) == sum(sent(made, rank) for rank in held)


def even(tp: int) -> list[Weight]:
    """Weights that all are cut evenly by any rank count here, so that the formulas hold to the byte."""
    return [Weight(f"{i}.{cut}", (16, 16), 2, cut, i / 4) for i in range(4) for cut in (0, 1)]


@pytest.mark.parametrize("p, t, d", [(1, 8, 2), (2, 4, 2), (4, 2, 2), (4, 4, 1), (1, 4, 4), (2, 8, 1)])
def test_model_parallel_training_costs_the_formula_and_no_redundancy(p: int, t: int, d: int):
    """arXiv 2409.19256, section 5.4: ``(d_g - 1) / (t p) M`` per rank; a full gather ``(tpd - 1) / (tpd) M``."""
    weights, layout = even(t), Layout(pp=p, dp=d, tp=t)
    model = sum(weight.bytes for weight in weights)
    held = training(weights, layout, sharded=False)
    for tp, pp in itertools.product([n for n in (1, 2, 4, 8) if t % n == 0], [n for n in (1, 2, 4) if p % n == 0]):
        wanted = generation(weights, layout, tp, pp)
        groups = p * t // (pp * tp)
        ours = cost(weights, held, wanted, bucket=1 << 20)
        assert ours.received == (groups - 1) * model // (t * p) and ours.redundant == 0
        made = plan(weights, held, wanted)
        assert {made.received(rank) for rank in wanted} == {ours.received}
    everything, ours_only = (cost_of_gathering(weights, layout, held, everything=e) for e in (True, False))
    assert everything.received == (t * p * d - 1) * model // (t * p * d)
    assert ours_only.received == (t * p - 1) * model // (t * p)
    assert everything.peak == model + model // (t * p) and everything.redundant == model // (t * p)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_fsdp_costs_the_formula(ranks: int):
    """``(1 - 1/s) M`` per rank to whole copies; with tensor parallel generation no more than ``(1 - 1/s) M / t``."""
    weights, layout = even(1), Layout(dp=ranks)
    model = sum(weight.bytes for weight in weights)
    held = training(weights, layout, sharded=True)
    for tp in (n for n in (1, 2, 4, 8) if ranks % n == 0):
        made = plan(weights, held, generation(weights, layout, tp))
        by_columns = sum(w.bytes for w in weights if w.cut == 1)
        by_rows = model - by_columns
        for rank in range(ranks):
            # of a matrix cut by columns the rank has 1/s of its part's rows; of one cut by rows its part of the part
            expected = by_columns // tp - by_columns // (tp * ranks) + by_rows // tp - by_rows // ranks
            assert made.received(rank) == expected <= (ranks - 1) * model // ranks // tp


def test_the_near_and_the_idle_send():
    weights = [Weight(f"w{i}", (4, 4)) for i in range(8)]
    held = {rank: {w.name: [whole(w.shape)] for w in weights} for rank in (0, 1, 2, 3)}
    wanted = {rank: held[0] for rank in (4, 5)}
    made = plan(weights, held, wanted, node=lambda rank: {0: 0, 1: 0, 2: 1, 3: 1, 4: 1, 5: 0}[rank])
    assert {(m.source // 2, m.target) for m in made.moves} == {(1, 4), (0, 5)}
    assert len({sent(made, rank) for rank in held}) == 1


def test_what_nobody_holds_is_an_error():
    weights = [Weight("w", (4, 4))]
    held = {0: {"w": [((0, 2), (0, 4))]}}
    with pytest.raises(RequestError, match=r"w\[\(2, 4\), \(0, 4\)\] is wanted on rank 1, and no rank holds it"):
        plan(weights, held, {1: {"w": [whole((4, 4))]}})
    with pytest.raises(RequestError, match=r"tensor parallel size 3 doesn't divide 4; it can be \[1, 2, 4\]"):
        generation(weights, Layout(tp=4), 3)
