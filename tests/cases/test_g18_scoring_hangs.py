"""G18: one reward that never returns costs its row, not the run; a hung process is killed and replaced."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from tests.rewards.rows import make_rows
from tests.rewards.test_pool import alive, children
from verl.config.errors import RewardError
from verl.rewards.base import Rewards

LIMIT = 0.8  # seconds; the report's 2 s would make 20 batches take 40 s
NASTY = "a" * 40 + "!"
HANGS: dict[str, tuple[Any, str, list[float]]] = {
    "sleep": ("tests.rewards.graders:hang", "hang", [1.0, 2.0, 3.0]),
    "regex in a function": ("tests.rewards.graders:backtrack", NASTY, [1.0, 1.0, 1.0]),
    "regex rule": ({"name": "regex", "pattern": "(a+)+$", "full": True}, NASTY, [1.0, 1.0, 1.0]),
}


@pytest.mark.parametrize("kind", HANGS)
def test_twenty_batches_with_a_hung_row(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    function, nasty, others = HANGS[kind]
    rows = make_rows(["a", "aa", nasty, "aaa"])
    before, seen = children(), set()
    batches = 20 if kind == "regex in a function" else 3
    timeout = LIMIT if batches == 20 else 2.0
    with Rewards([function], timeout=timeout, failure="default", default=-1.0, processes=2) as rewards:
        rewards.score(rows[:2])
        for _ in range(batches):
            caplog.clear()
            start = time.perf_counter()
            with caplog.at_level(logging.WARNING, "verl"):
                scores = rewards.score(rows)
            assert time.perf_counter() - start < timeout + 2
            assert scores.totals == [*others[:2], -1.0, others[2]]
            assert scores.counts["timed_out"] == 1
            assert rewards.names[0] in caplog.text and "row 2 (p0/2) did not return within" in caplog.text
            seen |= children() - before
        assert len(children() - before) == 2 and len(seen) > batches // 2
    assert children() - before == set() and not any(alive(pid) for pid in seen)


@pytest.mark.parametrize("kind", HANGS)
def test_by_default_it_ends_the_run_and_names_the_row(kind: str) -> None:
    function, nasty, _ = HANGS[kind]
    message = rf"row 2 \(p0/2\) did not return within {LIMIT:g} s.*response: '"
    with Rewards([function], timeout=LIMIT, processes=2) as rewards, pytest.raises(RewardError, match=message):
        rewards.score(make_rows(["a", "aa", nasty, "aaa"]))


def test_the_limit_is_for_a_call_not_for_waiting_in_line() -> None:
    rows = make_rows(["x" * 200] * 6)
    with Rewards(["tests.rewards.graders:slow"], timeout=1.0, processes=1) as rewards:
        assert rewards.score(rows).totals == [200.0] * 6  # 6 x 0.3 s in one process
