"""G06: masked responses leave the numerator and the denominator; nothing left is exactly nothing.

Of every engine: ``test_every_engine.py``.
"""

from __future__ import annotations

import pytest
import torch

from tests.algorithms.facts import estimator_facts, loss_facts, loss_of, per_token
from tests.algorithms.ragged import Rows, totals_of
from tests.cases.binary_policy import Row, accumulate, over_ranks
from verl.algorithms.advantages import ESTIMATORS
from verl.algorithms.policy import POLICY_LOSSES
from verl.algorithms.reduce import masked_whiten, reduce_loss
from verl.seats import Totals, seat

LENGTHS = torch.tensor([10, 5, 15])
ROW = torch.repeat_interleave(torch.arange(3), LENGTHS)
LOSSES = torch.ones(30)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_a_truncated_response_leaves_both(mode):
    mask = ROW != 1
    totals = totals_of(mask, ROW, 3)
    assert totals == Totals(tokens=25, rows=2)
    assert reduce_loss(LOSSES, mask, ROW, 3, mode, totals).item() == pytest.approx(1.0, abs=1e-6)


def test_seats_know_the_same_denominators():
    shape = {"ranks": 2, "mini_batch_rows": 3, "micro_rows": 1}
    (mini,) = seat([4] * 3, LENGTHS.tolist(), [0] * 3, loss_tokens=[10, 0, 15], **shape).mini_batches
    assert mini.totals == Totals(tokens=25, rows=2)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_a_truncated_response_is_as_if_absent(loss, mode):
    lengths = (3, 2, 4)
    row = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    facts = loss_facts(Rows(row != 1, row, 3))
    kept = row != 1
    alone = {k: v[kept] if torch.is_tensor(v) else v for k, v in facts.items()}
    alone |= {"row": alone["row"] // 2, "n_rows": 2}
    results = []
    for given in (facts, alone):
        given["logprobs"].requires_grad_()
        losses = loss_of(loss, given).losses
        place = given["mask"], given["row"], given["n_rows"]
        share = reduce_loss(losses, *place, mode, totals_of(*place))
        share.backward()
        results.append([share.item(), *given["logprobs"].grad[given["mask"]].tolist()])
    assert results[0] == pytest.approx(results[1])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_of_truncated_responses(estimator):
    row = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 2, 4, 1]))
    for mask in (row != 1, torch.zeros_like(row, dtype=torch.bool)):
        got = per_token(estimator, estimator_facts(Rows(mask, row, 4)))
        assert got.isfinite().all() and (got[~mask] == 0).all()
        assert masked_whiten(got, mask).isfinite().all()


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_every_response_truncated(mode, loss):
    rows: list[Row] = [([1, 0, 1], [0, 0, 0], 1.0), ([1], [0], -1.0)]
    (mini,) = seat([4] * 2, [3, 1], [0] * 2, ranks=1, mini_batch_rows=2, micro_rows=1, loss_tokens=[0, 0]).mini_batches
    assert mini.totals.tokens == 0  # what the caller counts as an empty batch, and takes no optimizer step on
    assert accumulate(rows, mini.ranks[0], mini.totals, mode, policy_loss=loss) == (0.0, 0.0)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_one_rank_fully_masked_of_two(loss):
    rows: list[Row] = [([1, 0, 1, 1], [1, 1, 1, 1], 0.7), ([1, 1, 1, 1], [0, 0, 0, 0], -1.0)]
    (mini,) = seat([4] * 2, [4, 4], [0] * 2, ranks=2, mini_batch_rows=2, micro_rows=1, loss_tokens=[4, 0]).mini_batches
    assert mini.ranks == [[[0]], [[1]]]
    alone = accumulate(rows[:1], [[0]], Totals(tokens=4, rows=1), "token-mean", loss)
    assert over_ranks(rows, mini, "token-mean", loss) == pytest.approx(alone, abs=1e-12)
