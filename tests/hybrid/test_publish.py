"""Publishes among real processes: what generation holds afterwards is what training holds, bit for bit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.hybrid.toy import Case, cases, run, sent, toy
from verl.hybrid.buckets import bits, buckets, lanes, totals
from verl.hybrid.reshard import Move, plan
from verl.hybrid.table import Standing
from verl.layout import Layout

FSDP2 = Case(Layout(dp=2), sharded=True, tp=1)


def fine(results: list) -> list:
    assert not [r for r in results if isinstance(r, str)], results
    return results


@pytest.mark.parametrize("n", [2, 4, 8])
def test_generation_holds_what_training_holds(n: int):
    """Fused rows, grouped heads, experts; tensor, pipeline and data parallel, FSDP, buckets of any size."""
    drawn = cases(seed=n, size=n, number=6)
    results = fine(run(n, cases=drawn, versions=2))
    for at, case in enumerate(drawn):
        weights = toy()
        planned = plan(weights, *case.holdings(weights))
        for rank in range(n):
            first = results[rank][at][0]
            assert first.full_bytes == sent(planned, rank) + planned.received(rank)
            padding = 16 * (len(planned.crossing) * 4)
            assert first.sent_bytes <= sent(planned, rank) + padding
            assert first.received_bytes <= planned.received(rank) + padding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_what_changed_is_sent(dtype: torch.dtype):
    """Where a copy is at hand: one value of ten changes, and with its place it is 6 (or 8) bytes for 2 (or 4)."""
    (first, second), _ = (r[0] for r in fine(run(2, cases=[FSDP2], dtype=dtype)))
    assert first.changed == first.compared == 0 and first.sent_bytes >= first.full_bytes / 2
    assert 0.05 < second.changed / second.compared < 0.15
    assert second.sent_bytes < 0.6 * first.sent_bytes
    (_, plain), _ = (r[0] for r in fine(run(2, cases=[FSDP2], dtype=dtype, incremental=False)))
    assert plain.sent_bytes == first.sent_bytes


def test_a_copy_is_kept_where_none_is_at_hand():
    apart = Case(Layout(dp=1), sharded=False, tp=1, apart=True)
    (first, second, third), _ = (r[0] for r in fine(run(2, cases=[apart], incremental=True, versions=3)))
    assert second.sent_bytes < 0.6 * first.sent_bytes and 0 < third.sent_bytes < 0.6 * first.sent_bytes
    (_, again), _ = (r[0] for r in fine(run(2, cases=[apart])))
    assert again.sent_bytes == first.sent_bytes  # "auto": nothing to compare with


def test_whole_weights_for_engines_that_keep_their_own():
    drawn = [FSDP2, Case(Layout(dp=1), sharded=False, tp=1, apart=True), Case(Layout(tp=2), False, 1, bucket=700)]
    fine(run(2, cases=drawn, streams=True, incremental=True, versions=3))


def test_a_flipped_bit_is_found():
    results = run(2, cases=[FSDP2], flips=1)
    assert "is not on rank 1 as it left rank 0: 1 of" in results[1] and "another checksum" in results[1]


def test_a_missed_update_is_found():
    results = run(2, cases=[Case(Layout(dp=2), sharded=True, tp=1)], versions=3, missed=True)
    assert "generates with version 1, but rank 1 sends what changed since version 2: an update was missed" in results[0]


def test_buckets_bound_what_a_rank_sends_and_receives():
    moves = [
        Move(f"w{i}", ((0, n), (0, 8)), i % 2, 2, 16 * n) for i, n in enumerate([1, 2, 3, 40, 5, 1, 1, 100])
    ]  # fmt: skip
    cut = buckets(moves, 160)
    for bucket in cut:
        for rank in range(3):
            assert sum(m.bytes for m in bucket if m.source == rank) <= 160
            assert sum(m.bytes for m in bucket if m.target == rank) <= 160
    assert sum(m.bytes for bucket in cut for m in bucket) == sum(m.bytes for m in moves)
    rows = [m.box[0] for bucket in cut for m in bucket if m.weight == "w7"]
    assert rows[0][0] == 0 and rows[-1][1] == 100 and all(a[1] == b[0] for a, b in pairwise(rows))


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    return totals(lanes(tensor)[None])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str)
def test_a_checksum_sees_every_bit_and_most_exchanges(dtype: torch.dtype):
    tensor = (torch.rand(3000, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    total = checksum(tensor)
    assert checksum(tensor.clone().view(30, 100)) == total
    for at in (0, 17, 1023, 1024, 2999):
        for bit in range(1 if dtype == torch.bool else 8):
            other = tensor.clone()
            bits(other).view(torch.uint8)[at * tensor.element_size()] ^= 1 << bit
            assert checksum(other) != total
    if dtype == torch.bool:  # all alike
        return
    swapped = tensor.clone()
    a, b = 5, next(i for i in range(6, 900) if tensor[i] != tensor[5])
    swapped[a], swapped[b] = tensor[b], tensor[a]
    assert checksum(swapped) != total


def test_parts_are_found_again_when_a_parameter_has_moved():
    module = torch.nn.Linear(3, 2)
    standing = Standing(module, lambda: dict(module.named_parameters()))
    first = standing.parts()
    with torch.no_grad():
        module.weight += 1
    assert standing.parts() is first and torch.equal(first["weight"][0].tensor, module.weight)
    module.weight.data = module.weight.data.clone()
    again = standing.parts()
    assert again is not first and again["weight"][0].tensor.data_ptr() == module.weight.data_ptr()
