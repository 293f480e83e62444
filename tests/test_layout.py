"""Ranks and places: a bijection, with tensor parallel ranks side by side."""

from __future__ import annotations

import subprocess
import sys

import pytest

from verl.config.errors import RequestError
from verl.layout import Layout, Place

BOX = Layout(pp=2, dp=3, cp=2, tp=2)


def test_every_rank_has_its_own_place():
    places = [BOX.place(rank) for rank in range(BOX.size)]
    assert BOX.size == 24 == len(set(places))
    assert [BOX.rank(place) for place in places] == list(range(24))
    assert places[:5] == [Place(0, 0, 0, 0), Place(0, 0, 0, 1), Place(0, 0, 1, 0), Place(0, 0, 1, 1), Place(0, 1, 0, 0)]


@pytest.mark.parametrize(("axis", "peers"), [("tp", [4, 5]), ("cp", [5, 7]), ("dp", [1, 5, 9]), ("pp", [5, 17])])
def test_peers_differ_in_one_axis(axis, peers):
    assert BOX.peers(5, axis) == peers
    assert all(BOX.peers(rank, axis) == peers for rank in peers)


def test_what_the_other_axes_leave_is_data_parallel():
    assert Layout.of(8, tp=2) == Layout(dp=4, tp=2)
    assert Layout.of(1) == Layout()


@pytest.mark.parametrize(("ranks", "fits"), [(6, "4 or 8"), (2, "4 ranks"), (0, "4 ranks")])
def test_ranks_that_dont_divide(ranks, fits):
    with pytest.raises(RequestError, match=f"^{ranks} ranks don't divide by tensor 4 .*use {fits}"):
        Layout.of(ranks, tp=4)


def test_nonsense_is_refused():
    with pytest.raises(RequestError, match="tp is 0"):
        Layout.of(4, tp=0)
    with pytest.raises(ValueError, match="rank 24 is not one of 24"):
        BOX.place(24)


def test_it_needs_no_torch():
    code = "import sys, verl.layout; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
