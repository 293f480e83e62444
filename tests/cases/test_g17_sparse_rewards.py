"""G17: "no opinion" is neither zero nor NaN, and stays on its row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.rewards.rows import make_rows
from tests.rewards.server import scores as answering
from tests.rewards.server import serving
from verl.algorithms import advantages as estimators
from verl.algorithms.advantages import grpo
from verl.algorithms.named import call
from verl.algorithms.preference import preferences_from_scores
from verl.config.errors import RewardError
from verl.metrics.record import mean_present
from verl.rewards.base import Rewards, Scores

ROWS = make_rows(["0", "1", "2", "3"])


def table(name: str, values: list[Any]) -> Any:
    def look_up(response: str) -> Any:
        return values[int(response)]

    look_up.__name__ = name
    return look_up


def advantages(scores: Scores) -> list[float]:
    totals = torch.tensor([math.nan if t is None else t for t in scores.totals], dtype=torch.float64)
    return grpo(totals, torch.zeros(len(scores), dtype=torch.int64)).tolist()


def test_rewards_add_over_those_with_an_opinion() -> None:
    scores = Rewards([table("a", [1, None, 0, 1]), table("b", [0.5, 0.5, None, None])]).score(ROWS)
    assert scores.totals == [1.5, 0.5, 0.0, 1.0]
    assert mean_present(scores.totals) == (0.75, 4)
    assert torch.tensor(scores.totals).std().item() == pytest.approx(0.645497, abs=1e-6)
    assert advantages(scores) == pytest.approx([1.1619, -0.3873, -1.1619, 0.3873], abs=1e-4)
    assert mean_present(scores.per_reward["a"]) == (pytest.approx(2 / 3), 3)
    assert scores.counts["abstained"] == 0


def test_logged_means_leave_out_what_is_not_there() -> None:
    assert mean_present([0.5, math.nan, math.nan, 0.8, 0.6, 0.7]) == (pytest.approx(0.65), 4)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("split", [False, True], ids=["one call", "a call per row"])
@pytest.mark.parametrize("batch", [False, True])
def test_sparse_extra_numbers_stay_on_their_rows(reverse: bool, split: bool, batch: bool) -> None:
    values = [{"score": 1, "fmt": 0.25}, {"score": 0}, {"score": 1, "fmt": 0.75}, {"score": None}]
    order = [3, 2, 1, 0] if reverse else [0, 1, 2, 3]
    row = table("judge", values)

    def judge(responses: list[str]) -> list[Any]:
        return [row(r) for r in responses]

    rewards = Rewards([judge if batch else row])
    rows = [ROWS[i] for i in order]
    scores = Scores.merge([rewards.score([r]) for r in rows]) if split else rewards.score(rows)
    assert scores.extra == {"judge/fmt": [[0.25, None, 0.75, None][i] for i in order]}
    assert scores.totals == [[1.0, 0.0, 1.0, None][i] for i in order]
    assert mean_present(scores.extra["judge/fmt"]) == (0.5, 2)


def test_extra_values_that_are_no_finite_numbers_are_left_out() -> None:
    scores = Rewards([lambda x: {"score": 1, "note": "fine", "loss": math.nan, "ok": True}]).score(ROWS[:1])
    assert scores.extra == {"lambda/ok": [1.0]}


def test_a_row_without_any_opinion_leaves_its_groups_statistics() -> None:
    scores = Rewards([table("a", [1, None, 0, None]), table("b", [None, None, None, 1])]).score(ROWS)
    assert scores.totals == [1.0, None, 0.0, 1.0]
    assert scores.counts["abstained"] == 1
    found = advantages(scores)
    assert found[1] == 0.0 and found[0] == pytest.approx(0.57735, abs=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_failures_of_their_row(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    values = [1.0, 0.0, bad, 1.0]
    with pytest.raises(RewardError, match=rf"reward judge: row 2 \(p0/2\) returned {bad}"):
        Rewards([table("judge", values)]).score(ROWS)
    dropped = Rewards([table("judge", values)], failure="drop").score(ROWS)
    assert dropped.totals == [1.0, 0.0, None, 1.0] and dropped.counts["failed"] == 1 and dropped.counts["dropped"] == 1
    assert "judge" in caplog.text and "p0/2" in caplog.text


def test_a_dict_needs_its_score() -> None:
    with pytest.raises(
        RewardError, match=r"judge on row 0 \(p0/0\): the returned dict has no 'score', only \['reward'\]"
    ):
        Rewards([table("judge", [{"reward": 1}] * 4)]).score(ROWS)


def test_a_server_may_abstain_be_sparse_and_give_nan() -> None:
    with (
        serving(answering({"score": 1, "fmt": 0.25}, None, math.nan, {"score": 0})) as server,
        Rewards([{"name": "http", "url": server.url}], failure="drop", processes=1) as rewards,
    ):
        scores = rewards.score(ROWS)
    assert scores.totals == [1.0, None, None, 0.0] and scores.extra == {"http/fmt": [0.25, None, None, None]}
    assert scores.counts == {"abstained": 1, "dropped": 1, "failed": 1, "timed_out": 0}


def rows_of(kept: list[int]) -> tuple[dict[str, Any], torch.Tensor]:
    """What estimators read, for two groups of four rows of two tokens of which row 1 has no score, cut to ``kept``;
    and the tokens' rows.
    """
    scores = torch.tensor([1.0, math.nan, 0.0, 0.6, 0.2, 1.0, 0.0, 1.0], dtype=torch.float64)[kept]
    tokens = torch.tensor([2 * i + j for i in kept for j in (0, 1)])
    row = torch.arange(len(kept)).repeat_interleave(2)
    mask = estimators.without_abstained(torch.ones(2 * len(kept), dtype=torch.bool), row, scores)
    noise = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))[:, tokens]
    facts = {
        "scores": scores,
        "greedy_scores": torch.linspace(0, 1, 8, dtype=torch.float64)[kept],
        "per_reward": {"a": scores, "b": torch.linspace(1, 0, 8, dtype=torch.float64).square()[kept] + 0 * scores},
        "reward_weights": [1.0, 0.5],
        "group": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])[kept],
        "lengths": torch.bincount(row[mask], minlength=len(kept)),
        "rewards": estimators.place_scores(scores, mask, row, len(kept)),
        "values": noise[0],
        "token_rewards": noise[1],
        "old_logprobs": noise[2],
        "teacher_logprobs": noise[3],
        "gamma": 0.9,
        "lam": 0.8,
        "pass_k": 2,
    }
    return facts | {"mask": mask, "row": row, "n_rows": len(kept)}, row


@pytest.mark.parametrize("name", estimators.ESTIMATORS)
def test_a_row_without_any_opinion_gets_nothing_and_changes_nothing_in_every_estimator(name: str) -> None:
    def per_token(kept: list[int]) -> torch.Tensor:
        facts, row = rows_of(kept)
        found = call(estimators.ESTIMATORS[name], facts)
        return estimators.broadcast(found, facts["mask"], row) if isinstance(found, torch.Tensor) else found.advantages

    with_it, without_it = per_token(list(range(8))), per_token([0, *range(2, 8)])
    assert with_it[2:4].tolist() == [0.0, 0.0]
    torch.testing.assert_close(torch.cat([with_it[:2], with_it[4:]]), without_it)
    assert without_it.abs().sum() > 0


def test_a_row_without_any_opinion_is_in_no_pair() -> None:
    scores = torch.tensor([0.5, math.nan, 0.0, 1.0], dtype=torch.float64)
    assert preferences_from_scores(scores, torch.zeros(4, dtype=torch.int64)).tolist() == [0, 0, -1, 1]
