"""G13: truncation never leaves a side of a pair, or a short row, without tokens."""

from __future__ import annotations

import pytest

from tests.tiny import f_bpe
from verl.config.errors import DataError
from verl.data.loader import PreferenceDataset, PromptDataset
from verl.data.pairs import fit_pair


def test_a_prompt_that_leaves_no_room_drops_the_pair_and_counts_it():
    rows = [
        {"prompt": "x" * 12, "chosen": "a", "rejected": "c"},
        {"prompt": "xx", "chosen": "a", "rejected": "c"},
    ]
    done = PreferenceDataset(rows).pairs(f_bpe(), max_length=8)
    assert done.counts == {"kept": 1, "filtered": 1, "truncated": 0}
    assert all(p.prompt_ids and p.chosen_ids and p.rejected_ids for p in done.pairs)


def test_a_prompt_that_leaves_no_room_is_an_error_with_row_and_lengths_when_asked():
    rows = [{"prompt": "xx", "chosen": "a", "rejected": "c"}, {"prompt": "x" * 12, "chosen": "a", "rejected": "c"}]
    with pytest.raises(ValueError, match=r"row 1: prompt 12 \+ chosen 2 / rejected 2 tokens, .* 8"):
        PreferenceDataset(rows).pairs(f_bpe(), max_length=8, overlong="error")


def test_b_keep_end_cuts_each_row_by_its_own_length():
    prompts = PromptDataset(["xxxx", "x" * 16 + "caca"]).prompts(f_bpe(), max_prompt_length=8)
    assert [p.ids for p in prompts] == [(3, 3, 3, 3), (3, 3, 3, 3, 6, 4, 6, 4)]


def test_c_each_side_is_cut_by_its_own_length():
    pair = fit_pair([3] * 4, [4] * 3, [6] * 12, max_length=8)
    assert pair is not None
    assert (len(pair.chosen_ids), len(pair.rejected_ids), pair.truncated) == (3, 4, True)
    assert fit_pair([3] * 4, [4] * 3, [6] * 12, max_length=8, policy="filter") is None


@pytest.mark.parametrize("sides", [([], [4], [4]), ([3], [], [4]), ([3], [4], [])])
def test_an_empty_side_always_raises(sides):
    with pytest.raises(DataError, match="none may be empty"):
        fit_pair(*sides, max_length=8)


def test_no_pair_left_is_an_error():
    with pytest.raises(DataError, match="0 rows after filtering"):
        PreferenceDataset([{"prompt": "x" * 12, "chosen": "a", "rejected": "c"}]).pairs(f_bpe(), max_length=8)
