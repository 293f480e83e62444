"""G23: a token budget is a memory promise, and collectives need equal call counts on every rank.

Of every engine: ``test_every_engine.py``.
"""

from __future__ import annotations

import random

import pytest

from tests.cases.binary_policy import Row, accumulate, over_ranks
from verl.seats import seat

LENGTHS = [95] * 5 + [20] * 5


def test_both_ranks_run_the_same_number_of_passes():
    rng = random.Random(0)
    rows: list[Row] = [([rng.randint(0, 1) for _ in range(n)], [1] * n, rng.uniform(-1, 1)) for n in LENGTHS]
    shape = {"ranks": 2, "mini_batch_rows": 10, "micro_rows": 10, "max_tokens": 100}
    (mini,) = seat([0] * 10, LENGTHS, list(range(10)), **shape).mini_batches
    assert len(mini.ranks[0]) == len(mini.ranks[1]) <= 5
    single = accumulate(rows, [list(range(10))], mini.totals, "token-mean")
    assert over_ranks(rows, mini, "token-mean") == pytest.approx(single, abs=1e-6)


def test_a_rank_with_fewer_rows_cuts_finer_and_then_runs_empty_passes():
    # Rows are level over the ranks (2 and 1), so the one-row rank can't reach 2 passes by cutting.
    shape = {"ranks": 2, "mini_batch_rows": 3, "micro_rows": 8, "max_tokens": 100}
    (mini,) = seat([0] * 3, [95, 95, 20], [0, 1, 2], **shape).mini_batches
    assert [len(micros) for micros in mini.ranks] == [2, 2]
    assert sorted(len(micro) for micros in mini.ranks for micro in micros) == [0, 1, 1, 1]
    rows: list[Row] = [([1] * n, [1] * n, a) for n, a in zip([95, 95, 20], [1.0, -0.5, 2.0], strict=True)]
    single = accumulate(rows, [[0, 1, 2]], mini.totals, "token-mean")
    assert over_ranks(rows, mini, "token-mean") == pytest.approx(single, abs=1e-12)


def test_no_micro_batch_is_over_the_budget():
    (mini,) = seat(
        [3] * 8, [4] * 8, list(range(8)), ranks=1, mini_batch_rows=8, micro_rows=8, max_tokens=8
    ).mini_batches
    assert [len(micro) for micro in mini.ranks[0]] == [1] * 8


def test_a_row_over_the_budget_is_named():
    with pytest.raises(ValueError, match="row 2 has 9 tokens, over the micro-batch budget of 8"):
        seat([3] * 3, [4, 5, 6], [0, 1, 2], ranks=1, mini_batch_rows=3, micro_rows=3, max_tokens=8)


def test_nine_rows_over_four_ranks():
    (mini,) = seat([3] * 9, [4] * 9, [0] * 9, ranks=4, mini_batch_rows=9, micro_rows=9).mini_batches
    assert sorted(sum(map(len, micros)) for micros in mini.ranks) == [2, 2, 2, 3]
