"""Seats: every row once, limits kept, ranks level, the same every time."""

from __future__ import annotations

import random
import time

import pytest

from verl.seats import MiniBatch, Totals, seat


def lap(n: int, group_size: int, seed: int = 0) -> tuple[list[int], list[int], list[int]]:
    """Prompt lengths (equal within a group), skewed response lengths and group numbers of ``n`` rows."""
    rng = random.Random(seed)
    groups = [i // group_size for i in range(n)]
    by_group = [rng.randint(5, 200) for _ in range(n // group_size + 1)]
    responses = [min(1000, 1 + int(rng.lognormvariate(4, 1))) for _ in range(n)]
    return [by_group[g] for g in groups], responses, groups


def seated(mini: MiniBatch) -> list[int]:
    return sorted(i for micros in mini.ranks for micro in micros for i in micro)


def cost(micro: list[int], prompts: list[int], responses: list[int], groups: list[int], share: bool) -> int:
    shared = {groups[i]: prompts[i] for i in micro}
    return sum(responses[i] for i in micro) + (sum(shared.values()) if share else sum(prompts[i] for i in micro))


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("max_tokens", [None, 1200])
@pytest.mark.parametrize("micro_rows", [1, 3, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_invariants(ranks, micro_rows, max_tokens, share):
    for n, group_size, size in ((61, 8, 24), (64, 8, 64), (9, 1, 9), (40, 5, 12), (3, 3, 3)):
        prompts, responses, groups = lap(n, group_size, seed=n)
        skip = {1, 2, n - 1} if n > 3 else set()
        limits = {"ranks": ranks, "mini_batch_rows": size, "micro_rows": micro_rows, "max_tokens": max_tokens}
        result = seat(prompts, responses, groups, **limits, skip=skip, share_prompts=share, epochs=2)
        assert result == seat(prompts, responses, groups, **limits, skip=skip, share_prompts=share, epochs=2)
        steps = -(-n // size)
        assert len(result.mini_batches) == 2 * steps
        for epoch in (result.mini_batches[:steps], result.mini_batches[steps:]):
            assert sorted(i for mini in epoch for i in seated(mini)) == [i for i in range(n) if i not in skip]
            assert sum(mini.totals.tokens for mini in epoch) == sum(responses)
            assert sum(mini.totals.rows for mini in epoch) == n
        for mini in result.mini_batches:
            assert mini.totals.rows <= size
            assert len({len(micros) for micros in mini.ranks}) == 1
            held = [sum(map(len, micros)) for micros in mini.ranks]
            assert max(held) - min(held) <= 1
            for micro in (micro for micros in mini.ranks for micro in micros):
                assert len(micro) <= micro_rows
                if max_tokens is not None:
                    assert cost(micro, prompts, responses, groups, share) <= max_tokens


def test_tokens_are_level_over_ranks():
    prompts, responses, groups = lap(1024, 8)
    (mini,) = seat(prompts, responses, groups, ranks=8, mini_batch_rows=1024, micro_rows=16).mini_batches
    loads = [sum(cost(micro, prompts, responses, groups, False) for micro in micros) for micros in mini.ranks]
    assert max(loads) <= 1.001 * min(loads)


def test_micro_batches_of_a_rank_are_level_and_heaviest_first():
    prompts, responses, groups = lap(256, 8)
    (mini,) = seat(prompts, responses, groups, ranks=2, mini_batch_rows=256, micro_rows=32).mini_batches
    for micros in mini.ranks:
        costs = [cost(micro, prompts, responses, groups, False) for micro in micros]
        assert costs == sorted(costs, reverse=True)
        assert max(costs) <= 1.1 * min(costs)


def test_groups_stay_together_where_they_fit():
    prompts, responses, groups = lap(128, 8)
    shape = {"ranks": 4, "mini_batch_rows": 64, "micro_rows": 16, "share_prompts": True}
    for mini in seat(prompts, responses, groups, **shape, epochs=2).mini_batches:
        for micro in (micro for micros in mini.ranks for micro in micros):
            for g in {groups[i] for i in micro}:
                assert sum(groups[i] == g for i in micro) == 8


def test_a_group_over_the_limits_is_cut_into_few_parts():
    # 8 rows of 10 after a shared prompt of 20: a budget of 60 holds the prompt and 4 rows
    shape = {"ranks": 1, "mini_batch_rows": 8, "share_prompts": True}
    (mini,) = seat([20] * 8, [10] * 8, [0] * 8, **shape, micro_rows=8, max_tokens=60).mini_batches
    assert sorted(map(len, mini.ranks[0])) == [4, 4]
    (mini,) = seat([20] * 8, [10] * 8, [0] * 8, **shape, micro_rows=3).mini_batches
    assert sorted(map(len, mini.ranks[0])) == [2, 3, 3]


def test_a_group_over_ranks_leaves_whole_parts():
    # 3 groups of 4 over 2 ranks: one group each, the third in two halves
    arguments = ([20] * 12, [10] * 12, [0] * 4 + [1] * 4 + [2] * 4)
    (mini,) = seat(*arguments, ranks=2, mini_batch_rows=12, micro_rows=6, share_prompts=True).mini_batches
    parts = [sorted(sum(arguments[2][i] == g for i in micro) for g in range(3)) for (micro,) in mini.ranks]
    assert parts == [[0, 2, 4], [0, 2, 4]]


def test_mini_batches_keep_order_and_groups():
    ones, groups = [1] * 12, [i // 4 for i in range(12)]
    shape = {"ranks": 1, "micro_rows": 12}
    assert [seated(m) for m in seat(ones, ones, groups, mini_batch_rows=4, **shape).mini_batches] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    # Mini-batches of 6 can't hold whole groups of 4 alone: as many groups as possible are whole, sizes stay 6.
    cut = [seated(m) for m in seat(ones, ones, groups, mini_batch_rows=6, **shape).mini_batches]
    assert [len(rows) for rows in cut] == [6, 6]
    assert {0, 1, 2, 3} <= set(cut[0]) and {4, 5, 6, 7} <= set(cut[1])


def test_rows_of_a_rank():
    seats = seat([1] * 8, [1] * 8, list(range(8)), ranks=2, mini_batch_rows=4, micro_rows=1)
    first, second = seats.rows(0), seats.rows(1)
    assert len(first) == len(second) == 4 and sorted(i for micro in first + second for i in micro) == list(range(8))
    assert first[:2] == seats.mini_batches[0].ranks[0] and first[2:] == seats.mini_batches[1].ranks[0]


def test_epochs_take_groups_in_an_order_of_the_seed():
    prompts, responses, groups = lap(64, 8)
    shape = {"ranks": 1, "mini_batch_rows": 16, "micro_rows": 16, "epochs": 3}
    rows = [seated(m) for m in seat(prompts, responses, groups, **shape, seed=1).mini_batches]
    assert rows[:4] == [list(range(k, k + 16)) for k in range(0, 64, 16)]
    assert rows[:4] != rows[4:8] != rows[8:]
    other = [seated(m) for m in seat(prompts, responses, groups, **shape, seed=2).mini_batches]
    assert other[:4] == rows[:4] and other[4:] != rows[4:]


def test_totals_count_masked_tokens_and_skipped_rows():
    # row 1 has no token in the mask, row 2 is skipped: zero weight, but part of the average
    shape = {"ranks": 1, "mini_batch_rows": 3, "micro_rows": 3}
    (mini,) = seat([5] * 3, [4] * 3, [0] * 3, **shape, loss_tokens=[4, 0, 3], skip={2}).mini_batches
    assert mini == MiniBatch([[[0, 1]]], Totals(tokens=7, rows=2))


def test_nothing_to_compute_is_no_pass_on_any_rank():
    (mini,) = seat([5] * 2, [4] * 2, [0] * 2, ranks=2, mini_batch_rows=2, micro_rows=1, skip={0, 1}).mini_batches
    assert mini == MiniBatch([[], []], Totals(tokens=8, rows=2))


def test_a_rank_without_rows_is_padded():
    (mini,) = seat([5] * 3, [4] * 3, [0, 1, 2], ranks=4, mini_batch_rows=3, micro_rows=2).mini_batches
    assert [micros == [[]] for micros in mini.ranks].count(True) == 1


def test_wrong_requests_are_refused():
    good = {"ranks": 1, "mini_batch_rows": 2, "micro_rows": 2, "epochs": 1}
    with pytest.raises(ValueError, match="1 prompt lengths, 2 response lengths"):
        seat([1], [1, 1], [0, 0], **good)
    for name in good:
        with pytest.raises(ValueError, match=f"{name} is 0"):
            seat([1, 1], [1, 1], [0, 0], **{**good, name: 0})
    with pytest.raises(ValueError, match="row 1 has 9 tokens, over the micro-batch budget of 8"):
        seat([1, 4], [1, 5], [0, 0], **good, max_tokens=8)
    seat([1, 4], [1, 5], [0, 0], **good, max_tokens=8, skip={1})  # never computed, so never over


@pytest.mark.parametrize("share", [False, True])
def test_a_lap_of_1024_rows_is_seated_in_20_ms(share):
    arguments = lap(1024, 8)
    shape = {"ranks": 8, "mini_batch_rows": 256, "micro_rows": 16, "max_tokens": 4096, "share_prompts": share}

    def seconds() -> float:
        start = time.process_time()
        seat(*arguments, **shape)
        return time.process_time() - start

    assert min(seconds() for _ in range(5)) < 0.020
