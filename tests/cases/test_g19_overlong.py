"""G19: prompts longer than max_prompt_length, found before the first step."""

from __future__ import annotations

import pytest

from tests.tiny import f_bpe
from verl.config.errors import DataError
from verl.data.loader import PromptDataset

ROWS = ["x" * 5, "x" * 34 + "c"]  # 10 and 40 tokens with the template's u : newline a :


def prompts(overlong, rows=ROWS, limit=16):
    return PromptDataset(rows).prompts(f_bpe(template="plain"), max_prompt_length=limit, overlong=overlong)


def test_error_names_row_length_and_limit():
    with pytest.raises(ValueError, match=r"row 1: prompt has 40 tokens, max_prompt_length is 16"):
        prompts("error")


def test_filter_leaves_the_short_row_and_counts():
    left = prompts("filter")
    assert [(p.id, len(p.ids)) for p in left] == [("0", 10)]
    assert left.counts == {"kept": 1, "filtered": 1, "truncated": 0}


def test_truncate_keeps_the_last_ids_with_the_generation_header():
    both = prompts("truncate")
    assert [len(p.ids) for p in both] == [10, 16]
    assert both[1].ids == (*[3] * 12, 6, 12, 4, 11)
    assert both[1].text == "x" * 12 + "c\na:"
    assert both.counts == {"kept": 2, "filtered": 0, "truncated": 1}


def test_the_length_is_that_of_the_rendered_template():
    assert prompts("truncate", ["x" * 11]).counts["truncated"] == 0  # 16 rendered
    assert prompts("truncate", ["x" * 12]).counts["truncated"] == 1  # 17 rendered


def test_nothing_left_is_an_error():
    with pytest.raises(DataError, match="0 rows after filtering"):
        prompts("filter", [ROWS[1], ROWS[1]])


def test_a_limit_without_room_beside_the_header_is_an_error():
    with pytest.raises(DataError, match="no room beside the 2-token header"):
        prompts("truncate", limit=2)
