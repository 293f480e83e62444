from __future__ import annotations

import asyncio
import itertools
import logging
import math
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import pytest

from tests.rewards.rows import make_rows
from verl.config.errors import RequestError, RewardError
from verl.rewards.base import Rewards, Scores, total


def score(functions: Any, rows: Any, **settings: Any) -> Scores:
    with Rewards(functions if isinstance(functions, list) else [functions], **settings) as rewards:
        return rewards.score(rows)


def test_rewards_add_by_weight_under_names_that_differ() -> None:
    rows = make_rows(["ab", "abc"], answer=["ab", "x"])
    scores = score(["exact", "exact", len, lambda x: True], rows, weights=[1, 0.5, 10, 0.25])
    assert list(scores.per_reward) == ["exact", "exact_2", "len", "lambda"]
    assert scores.totals == [1 + 0.5 + 20 + 0.25, 30 + 0.25]
    assert scores.counts == {"abstained": 0, "dropped": 0, "failed": 0, "timed_out": 0}


def test_a_reward_is_called_what_as_says() -> None:
    rows = make_rows(["ab"], answer=["ab"])
    scores = score([{"name": "exact", "as": "right"}, {"name": "numeric", "as": "right", "tolerance": 1.0}], rows[:0])
    assert scores.totals == []
    scores = score([{"name": "exact", "as": "right", "ignore_case": True}, {"name": len, "as": "size"}], rows)
    assert scores.per_reward == {"right": [1.0], "size": [2.0]}


def test_weights_and_columns_are_checked_at_once() -> None:
    with pytest.raises(RequestError, match="reward_weights: 2 numbers for 1 rewards"):
        Rewards(["exact"], weights=[1, 2])
    with pytest.raises(RequestError, match="no reward"):
        Rewards([])
    rewards = Rewards(["exact"])
    with pytest.raises(RequestError, match="'answer'"):
        rewards.check(["prompt"])
    rewards.check(["prompt", "answer"])


def test_no_rows_no_scores() -> None:
    assert score(len, []).totals == []


def test_callables_keep_their_state_and_order() -> None:
    seen: list[str] = []
    score(lambda response: seen.append(response) or 1.0, make_rows(["a", "b", "c"]))
    assert seen == ["a", "b", "c"]


def test_batch_functions_are_called_once() -> None:
    calls: list[int] = []

    def spread(responses: list[str]) -> list[float]:
        calls.append(len(responses))
        return [float(len(r) - len(responses[0])) for r in responses]

    assert score(spread, make_rows(["a", "bbb"])).totals == [0.0, 2.0]
    assert calls == [2]


def test_async_callables_run_side_by_side_on_one_loop() -> None:
    loops: set[int] = set()

    async def judge(response: str) -> float:
        loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(0.2)
        return float(len(response))

    rows = make_rows(["a" * i for i in range(1, 11)])
    with Rewards([judge]) as rewards:
        start = time.perf_counter()
        assert rewards.score(rows).totals == [float(i) for i in range(1, 11)]
        rewards.score(rows)
        assert time.perf_counter() - start < 3  # 20 x 0.2 s one after the other
    assert len(loops) == 1


def test_an_async_callable_that_overruns_is_cancelled_by_policy() -> None:
    async def judge(response: str) -> float:
        await asyncio.sleep(100 if response == "slow" else 0)
        return 1.0

    scores = score(judge, make_rows(["a", "slow"]), timeout=0.3, failure="default", default=-1.0)
    assert scores.totals == [1.0, -1.0] and scores.counts["timed_out"] == 1


def test_a_callable_that_overruns_ends_the_run_and_says_what_to_do() -> None:
    stuck = threading.Event()
    with pytest.raises(RewardError, match=r"reward slow did not return within 0.2 s .*module:function"):
        score(_named("slow", lambda response: stuck.wait()), make_rows(["a"]), timeout=0.2, failure="drop")
    stuck.set()


def test_score_is_thread_safe() -> None:
    with Rewards([len, "tests.rewards.graders:length"], processes=2) as rewards, ThreadPoolExecutor(4) as threads:
        parts = list(threads.map(lambda n: rewards.score(make_rows(["x" * n] * 5)), range(1, 9)))
    assert [p.totals for p in parts] == [[2.0 * n] * 5 for n in range(1, 9)]


@pytest.mark.parametrize("function", ["tests.rewards.graders:raises", "local"])
def test_a_raised_reward_names_function_row_prompt_and_place(function: str) -> None:
    from tests.rewards import graders

    rows = make_rows(["ok", "bad", "ok"])
    with pytest.raises(RewardError) as error:
        score(graders.raises if function == "local" else function, rows)
    message = str(error.value)
    for part in (
        "raises",
        "row 1 (p0/1)",
        "Prompt p0",
        "Q?",
        "'bad'",
        "ZeroDivisionError: no such thing",
        "graders.py:",
    ):
        assert part in message
    assert "Traceback" in error.value.__notes__[0]


def test_failure_policies(caplog: pytest.LogCaptureFixture) -> None:
    rows = make_rows(["ok", "bad", "ok"])
    graders = ["tests.rewards.graders:raises", len]
    dropped = score(graders, rows, failure="drop")
    assert dropped.totals == [3.0, None, 3.0]
    assert dropped.per_reward == {"raises": [1.0, None, 1.0], "len": [2.0, 3.0, 2.0]}
    assert dropped.counts == {"abstained": 0, "dropped": 1, "failed": 1, "timed_out": 0}
    with caplog.at_level(logging.WARNING, "verl"):
        filled = score(graders, rows, failure="default", default=-2.0)
    assert filled.totals == [3.0, 1.0, 3.0] and filled.counts["failed"] == 1
    assert "raises" in caplog.text and "p0/1" in caplog.text and "gets -2" in caplog.text


def test_a_failing_batch_function_fails_all_its_rows(caplog: pytest.LogCaptureFixture) -> None:
    def broken(responses: list[str]) -> list[float]:
        raise KeyError("k")

    rows = make_rows(["a"] * 5)
    with pytest.raises(RewardError, match=r"broken.*row 0.*KeyError"):
        score(broken, rows)
    scores = score([broken, len], rows, failure="drop")
    assert scores.totals == [None] * 5 and scores.counts["failed"] == 5
    assert caplog.text.count("KeyError") == 3 and "failed on 5 of 5 rows" in caplog.text


def test_an_error_is_told_before_the_other_rows_are_scored() -> None:
    start = time.perf_counter()
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        score("tests.rewards.graders:raises", make_rows(["bad"] + ["ok"] * 200), processes=1)
    calls: list[str] = []
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        score(_named("f", lambda response: calls.append(response) or 1 / 0), make_rows(["a", "b"]))
    assert calls == ["a"] and time.perf_counter() - start < 20


def test_user_functions_in_processes_are_matched_like_others() -> None:
    rows = make_rows(["1", "2"], answer=["1", "3"])
    scores = score(["tests.rewards.graders:gold", "tests.rewards.graders:batch"], rows, processes=1)
    assert scores.per_reward == {"gold": [1.0, 0.0], "batch": [1.0, 0.0]}


def test_options_reach_user_functions() -> None:
    scores = score({"name": "tests.rewards.graders:gold", "answer": "2"}, make_rows(["1", "2"]), processes=1)
    assert scores.totals == [0.0, 1.0]


def test_a_function_of_the_current_directory(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_rewards.py").write_text(
        "def score(response, answer):\n    return {'score': 2, 'n': len(answer)}\n"
    )
    monkeypatch.chdir(tmp_path)
    scores = score("my_own_rewards:score", make_rows(["1"], answer=["abc"]), processes=1)
    assert scores.totals == [2.0] and scores.extra == {"score/n": [3.0]}


def test_a_reward_that_is_the_total_travels_once() -> None:
    values = [i / 7 for i in range(1000)]
    alone, weighed = (Scores(totals, {"a": list(values)}) for totals in (list(values), [2 * v for v in values]))
    for scores in (alone, weighed):
        again = pickle.loads(pickle.dumps(scores))
        assert again == scores and scores.per_reward["a"] is not scores.totals
    assert len(pickle.dumps(alone)) < 9_500 < 18_000 < len(pickle.dumps(weighed))


def test_merge_keeps_rows_aligned_and_select_orders_them() -> None:
    first = Scores([1.0], {"a": [1.0]}, {"a/x": [5.0]}, {"failed": 1})
    second = Scores([2.0, None], {"a": [2.0, None]}, {"a/y": [6.0, None]}, {"failed": 2, "truncated": 1})
    both = Scores.merge([first, second])
    assert both.totals == [1.0, 2.0, None]
    assert both.extra == {"a/x": [5.0, None, None], "a/y": [None, 6.0, None]}
    assert both.counts == {"failed": 3, "truncated": 1}
    picked = both.select([2, 0])
    assert picked.totals == [None, 1.0] and picked.extra["a/x"] == [None, 5.0] and len(picked) == 2
    assert Scores.merge([]).totals == []


def _named(name: str, function: Any) -> Any:
    function.__name__ = name
    return function


@pytest.mark.parametrize("rows", list(itertools.product([0.0, 1.0], repeat=3)), ids=str)
def test_totals_that_are_equal_are_equal_to_the_last_bit(rows: tuple[float, float, float]) -> None:
    """Pairs and flat groups are told by comparing them."""
    weights = (0.1, 0.2, 0.3)
    exact = sum(Fraction(str(w)) * int(r) for w, r in zip(weights, rows, strict=True))
    assert total([w * r for w, r in zip(weights, rows, strict=True)]) == float(exact)
    assert total([-0.3, 0.1, 0.2]) == 0 and total([0.1]) == 0.1 and total([math.inf, 1.0]) == math.inf
