"""Every row once per epoch, seeded, resumable at any point."""

from __future__ import annotations

import json

import pytest

from verl.config.errors import DataError
from verl.data.order import PromptOrder


def test_every_row_once_per_epoch_in_another_order_each():
    order = PromptOrder(50, seed=3)
    first, second = order.take(50), order.take(50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second and first != list(range(50))
    assert PromptOrder(50, seed=3).take(50) == first != PromptOrder(50, seed=4).take(50)


def test_take_may_cross_epochs_and_the_pieces_do_not_matter():
    whole = PromptOrder(7, seed=1).take(30)
    order = PromptOrder(7, seed=1)
    assert [i for k in (5, 1, 14, 0, 10) for i in order.take(k)] == whole
    assert order.epoch == 30 / 7


@pytest.mark.parametrize("taken", [0, 3, 4, 8, 11])  # 4 rows: 4 and 8 are epoch boundaries
def test_resume_at_any_point(taken):
    whole = PromptOrder(4, seed=0).take(20)
    before = PromptOrder(4, seed=0)
    before.take(taken)
    resumed = PromptOrder(4, seed=0)
    resumed.restore(json.loads(json.dumps(before.state())))
    assert resumed.take(20 - taken) == whole[taken:]


def test_without_shuffle_the_order_is_the_data_sets():
    assert PromptOrder(3, shuffle=False).take(7) == [0, 1, 2, 0, 1, 2, 0]


def test_the_order_is_the_same_on_every_machine():
    assert PromptOrder(8, seed=0).take(8) == [3, 2, 1, 6, 0, 7, 4, 5]


def test_a_position_of_other_data_or_seed_is_refused():
    for other in (PromptOrder(5, seed=0), PromptOrder(4, seed=1), PromptOrder(4, seed=0, shuffle=False)):
        with pytest.raises(DataError, match="saved data position"):
            PromptOrder(4, seed=0).restore(other.state())


def test_nothing_to_draw_from():
    with pytest.raises(DataError, match="0 rows"):
        PromptOrder(0)
