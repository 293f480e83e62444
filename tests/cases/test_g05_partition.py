"""G05: a loss must not depend on how its rows are cut into micro-batches and ranks."""

from __future__ import annotations

import pytest

from tests.cases.binary_policy import Row, over_ranks
from verl.algorithms.policy import POLICY_LOSSES
from verl.seats import seat

ROWS: list[Row] = [([1], [1], 1.0), ([1, 1, 1], [1, 1, 1], -1.0)]


every_loss = pytest.mark.parametrize("loss", POLICY_LOSSES)


def over(
    rows: list[Row], mode: str, *, ranks: int = 1, micro: int = 1, mini: int | None = None, loss: str = "ppo"
) -> list:
    """Loss and gradient of each mini-batch, summed over its ranks."""
    lengths = [len(tokens) for tokens, _, _ in rows]
    groups = list(range(len(rows)))
    shape = {"ranks": ranks, "mini_batch_rows": mini or len(rows), "micro_rows": micro}
    steps = seat([1] * len(rows), lengths, groups, **shape).mini_batches
    return [over_ranks(rows, step, mode, loss) for step in steps]


@pytest.mark.parametrize(("ranks", "micro"), [(1, 2), (1, 1), (2, 1)])
def test_token_mean(ranks, micro):
    assert over(ROWS, "token-mean", ranks=ranks, micro=micro) == [pytest.approx((0.5, 0.25))]


@pytest.mark.parametrize(("ranks", "micro"), [(1, 2), (1, 1), (2, 1)])
def test_sequence_mean_of_the_same_rows_is_another_number(ranks, micro):
    assert over(ROWS, "seq-mean-token-mean", ranks=ranks, micro=micro) == [pytest.approx((0.0, 0.0))]


@every_loss
@pytest.mark.parametrize(("mode", "gradient"), [("token-mean", 0.25), ("seq-mean-token-mean", 0.0)])
def test_every_policy_loss(loss, mode, gradient):
    (whole,) = over(ROWS, mode, micro=2, loss=loss)
    assert whole[1] == pytest.approx(gradient)
    for ranks, micro in ((1, 1), (2, 1)):
        assert over(ROWS, mode, ranks=ranks, micro=micro, loss=loss) == [pytest.approx(whole)]


@every_loss
def test_four_equal_micro_batches_are_not_divided_again(loss):
    (whole,) = over(ROWS, "token-mean", micro=2, loss=loss)
    (accumulated,) = over(ROWS * 4, "token-mean", micro=2, loss=loss)
    assert accumulated == pytest.approx(whole)


@every_loss
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_denominators_are_those_of_the_optimizer_step(mode, loss):
    rows = [([1], [1], 2.0), ([1, 1], [1, 1], 1.0)]
    (intended,) = over(rows, mode, micro=2, loss=loss)
    # A lap of 4 micro-batches with 2 of them per optimizer step: twice the intended gradient, not twice a half of it.
    assert over(rows * 4, mode, micro=2, mini=4, loss=loss) == [pytest.approx(intended)] * 2
    # An optimizer step over 4 generation batches of 8 micro-batches each: once the intended gradient, not 4 times.
    assert over(rows * 32, mode, micro=2, loss=loss) == [pytest.approx(intended)]
