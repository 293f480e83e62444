"""G16: a reward that gives another number of values than rows is refused by name; nothing is ever broadcast."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from tests.rewards.rows import make_rows
from tests.rewards.server import scores, serving
from verl.config.errors import RewardError
from verl.rewards.base import Rewards

ROWS = make_rows(["a", "b", "c", "d"])


def returning(value: Any) -> Any:
    def spread(responses: list[str]) -> Any:
        return value

    return spread


@pytest.mark.parametrize(
    ("value", "received"),
    [
        ([1.0], "received 1$"),
        (1.0, "received a bare float 1.0"),
        ([1.0, 2.0, 3.0], "received 3$"),
        ([1.0] * 5, "received 5$"),
        (torch.zeros(4, 2), "received a list of 2"),
        (torch.zeros(1, 4), "received 1$"),
        (torch.tensor(1.0), "received a bare float 1.0"),
        ("1234", "received a bare str '1234'"),
        (None, "received None"),
        ({"score": [1.0] * 4}, "received a bare dict"),
        ((x for x in [1.0] * 4), "received a generator"),
    ],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.parametrize("failure", ["error", "drop", "default"])
def test_the_function_the_expected_and_the_received_number_are_named(value: Any, received: str, failure: Any) -> None:
    with pytest.raises(RewardError, match=received) as error:
        Rewards([returning(value)], failure=failure).score(ROWS)
    assert isinstance(error.value, ValueError)
    assert "spread" in str(error.value)
    assert "expected 4 values" in str(error.value) or "expected one number" in str(error.value)


@pytest.mark.parametrize("value", ["good", ["1", "2"], [1.0], torch.zeros(1), object(), 1j])
def test_row_by_row_only_a_number_is_a_score(value: Any) -> None:
    with pytest.raises(RewardError, match=r"judge on row 0 \(p0/0\): expected one number, received a"):
        Rewards([judge_returning(value)]).score(ROWS)


def judge_returning(value: Any) -> Any:
    def judge(response: str) -> Any:
        return value

    return judge


def test_strings_in_a_list_are_refused() -> None:
    with pytest.raises(RewardError, match=r"spread on row 1 \(p0/1\): expected one number, received a bare str '1.0'"):
        Rewards([returning([1.0, "1.0", 1.0, 1.0])]).score(ROWS)


@pytest.mark.parametrize(
    "value",
    [
        [0, 1, 2, 3],
        (0.0, 1.0, 2.0, 3.0),
        torch.arange(4),
        torch.arange(4, dtype=torch.bfloat16),
        torch.arange(4.0).view(4, 1).requires_grad_(),
        numpy.arange(4.0),
        numpy.arange(4.0).reshape(4, 1),
        [torch.tensor(float(i)) for i in range(4)],
        [numpy.float32(i) for i in range(4)],
        [{"score": i, "more": 1} for i in range(4)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_per_row_in_any_container_is_read_in_order(value: Any) -> None:
    assert Rewards([returning(value)]).score(ROWS).totals == [0.0, 1.0, 2.0, 3.0]


def test_a_function_in_a_scoring_process_is_judged_the_same() -> None:
    message = "one_for_all: expected 4 values, one per row, received 1"
    reward = "tests.rewards.graders:one_for_all"
    with Rewards([reward], processes=1) as rewards, pytest.raises(RewardError, match=message):
        rewards.score(ROWS)


@pytest.mark.parametrize("count", [0, 1, 3, 5])
@pytest.mark.parametrize("failure", ["error", "drop", "default"])
def test_a_server_that_answers_another_number_is_named(count: int, failure: Any) -> None:
    with serving(scores(*[1.0] * count)) as server:
        message = rf"rule 'http': {server.url}: expected .* with 4 entries, one per row, received {count}$"
        spec = {"name": "http", "url": server.url}
        with (
            Rewards([spec], failure=failure, processes=1) as rewards,
            pytest.raises(RewardError, match=message) as error,
        ):
            rewards.score(ROWS)
        assert isinstance(error.value, ValueError) and len(server.asked) == 1


@pytest.mark.parametrize("value", [[1.0], "1.0", {"reward": 1.0}])
def test_a_server_that_answers_no_number_for_a_row_is_refused(value: Any) -> None:
    with serving(scores(1.0, 1.0, value, 1.0)) as server:
        spec = {"name": "http", "url": server.url}
        with Rewards([spec], failure="default", processes=1) as rewards, pytest.raises(RewardError, match="row 2"):
            rewards.score(ROWS)
