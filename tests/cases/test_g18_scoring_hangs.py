"""G18: one reward that never returns costs its row, not the run; a hung process is killed and replaced."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

from tests.rewards.rows import make_rows
from tests.rewards.server import serving
from tests.rewards.test_code import running
from tests.rewards.test_pool import alive, children
from verl.config.errors import RewardError
from verl.rewards.base import Rewards

LIMIT = 0.5  # seconds; the report's 2 s would make 20 batches take 40 s
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
            assert time.perf_counter() - start < timeout + 10
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


def test_a_program_that_never_ends_is_wrong_and_leaves_nothing() -> None:
    tests = ["assert f() == 1"]
    rows = make_rows(
        ["def f(): return 1", "def f(): return 2", "def f():\n while True: pass", "f = lambda: 1"], answer=[tests] * 4
    )
    before, programs = children(), running()
    with Rewards([{"name": "code", "timeout": 3.0}], timeout=15.0, processes=2) as rewards:
        rewards.score(rows[:2])
        for _ in range(3):
            start = time.perf_counter()
            scores = rewards.score(rows)
            assert time.perf_counter() - start < 60  # the loop has no end
            assert scores.totals == [1.0, 0.0, 0.0, 1.0] and scores.counts["timed_out"] == 0
            assert scores.extra["code/timed_out"] == [0.0, 0.0, 1.0, 0.0]
            assert running() <= programs
    assert children() <= before


def test_a_server_that_never_answers_is_given_up() -> None:
    hang = threading.Event()

    def answer(asked: Any) -> tuple[int, Any]:
        if asked["rows"][0]["response"] == "hang":
            hang.wait(30)
        return 200, {"scores": [1.0] * len(asked["rows"])}

    with serving(answer) as server:
        spec = {"name": "http", "url": server.url, "timeout": 0.7, "retries": 9}  # 7 s in all: the limit comes first
        with Rewards([spec], timeout=1.0, failure="default", default=-1.0, processes=1) as rewards:
            rewards.score(make_rows(["a"]))
            for _ in range(2):
                start = time.perf_counter()
                scores = rewards.score(make_rows(["hang", "a"]))
                assert time.perf_counter() - start < 6.5  # ten attempts of 0.7 s
                assert scores.totals == [-1.0, -1.0] and scores.counts["timed_out"] == 2
                assert rewards.score(make_rows(["a", "b"])).totals == [1.0, 1.0]
        hang.set()
