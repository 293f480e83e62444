"""Rows that can't be used: one error that names them, or left out, counted and told in the log."""

from __future__ import annotations

import json
import logging

import pytest

from tests.tiny import f_bpe
from verl.config.errors import DataError
from verl.data.loader import (
    ChatDataset,
    PreferenceDataset,
    PromptDataset,
    open_example_set,
    open_examples,
    open_prompts,
)

LIMITS = {"max_prompt_length": 8, "max_response_length": 8}
LINES = [
    '{"prompt": "x", "completion": "a", "label": 1}',
    '{"prompt": ',
    '{"prompt": "", "completion": "a", "label": 1}',
    "[1]",
    '{"prompt": "xx", "completion": "c", "label": 0}',
    '{"prompt": "\\ud800", "completion": "c", "label": 0}',
    '{"prompt": "QQ", "completion": "c", "label": 0}',
]
BAD = ["1", "2", "3", "5", "6"]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(LINES))
    return path


def opened(path, kind, streaming=False, **how):
    if kind == "prompts" and streaming:
        return PromptDataset(path, **how).feed(f_bpe(), max_prompt_length=8, shuffle=False, streaming=True)
    if kind == "prompts":
        return open_prompts(path, f_bpe(), max_prompt_length=8, **how)
    if streaming:
        return open_examples(path, f_bpe(), kind, shuffle=False, streaming=True, **LIMITS, **how)
    return open_example_set(path, f_bpe(), kind, **LIMITS, **how)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["prompts", "labelled", "chats"])
def test_dropped_rows_are_counted_and_the_first_are_logged(jsonl, kind, streaming, caplog):
    with caplog.at_level(logging.WARNING, "verl"):
        items = opened(jsonl, kind, streaming, bad_rows="drop")
        rows = items.take(4) if streaming else list(items)
    assert [row.id for row in rows] == (["0", "4"] * 2 if streaming else ["0", "4"])
    # The stream has read the bad rows between the good ones twice, the ones at the end once.
    assert (
        items.counts == {"kept": 2, "filtered": 0, "truncated": 0, "bad": 5} if not streaming else items.counts["bad"]
    )
    assert [record.getMessage().split(" left out")[0] for record in caplog.records] == [
        f"{jsonl}: row {number}" for number in BAD[:3]
    ]
    assert "line 2: not JSON" in caplog.text and "prompt is empty" in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["prompts", "labelled"])
def test_by_default_the_rows_are_named_and_the_run_stops(jsonl, kind, streaming):
    said = r"a\.jsonl: row 1: .*line 2: not JSON" + (
        "" if streaming else r".*; row 3: .*line 4: a list, .*; row 5: .*no text"
    )
    with pytest.raises(DataError, match=said):
        items = opened(jsonl, kind, streaming)
        items.take(3)


def test_what_json_can_read_and_the_layout_cannot(jsonl):
    rows = [json.loads(LINES[i]) for i in (0, 2, 4)]
    with pytest.raises(DataError, match=r"the data list: row 1: prompt is empty$"):
        open_prompts(rows, f_bpe(), max_prompt_length=8)
    data = PromptDataset(jsonl, bad_rows="drop")
    assert [row["prompt"] for row in data] == ["x", "xx", "QQ"] and len(data) == 7
    with pytest.raises(DataError, match=r"row 3: .*line 4: a list"):
        data[3]


@pytest.mark.parametrize("streaming", [False, True])
def test_nothing_left_is_an_error(tmp_path, streaming):
    (tmp_path / "a.jsonl").write_text("\n".join(LINES[1:3] * 2))
    with pytest.raises(DataError, match=r"0 rows after filtering.*; 4 bad rows were left out"):
        items = opened(tmp_path / "a.jsonl", "prompts", streaming, bad_rows="drop")
        items.take(1)


def test_a_missing_column_is_no_bad_row(jsonl):
    for kind in ("pairs",):
        with pytest.raises(DataError, match="needs chosen and rejected"):
            opened(jsonl, kind, bad_rows="drop")
        with pytest.raises(DataError, match="needs chosen and rejected"):
            opened(jsonl, kind, True, bad_rows="drop").take(1)


def test_rows_of_a_table_with_more_values_than_columns(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\nx,1\nx,1,2\nxx,2\n")
    prompts = opened(tmp_path / "a.csv", "prompts", bad_rows="drop")
    assert [p.id for p in prompts] == ["0", "2"] and prompts.counts["bad"] == 1
    assert prompts[1].fields["answer"] == "2"
    with pytest.raises(DataError, match=r"row 1: .*line 3: more values than the 2 columns"):
        opened(tmp_path / "a.csv", "prompts")


def test_pairs_are_counted_too():
    rows = [{"prompt": "x", "chosen": "a", "rejected": side} for side in ("c", "", "b")]
    done = PreferenceDataset(rows, bad_rows="drop").examples(f_bpe(), **LIMITS)
    assert done.counts == {"kept": 2, "filtered": 0, "truncated": 0, "bad": 1}


def test_a_stream_resumes_with_its_counts(jsonl):
    feed = opened(jsonl, "labelled", True, bad_rows="drop")
    feed.take(3)
    again = opened(jsonl, "labelled", True, bad_rows="drop")
    again.restore(json.loads(json.dumps(feed.state())))
    assert again.counts == feed.counts and [e.id for e in again.take(2)] == [e.id for e in feed.take(2)] == ["4", "0"]


def test_a_conversation_that_the_template_refuses_is_a_bad_row():
    tokenizer = f_bpe(template="plain")
    tokenizer.chat_template = "{% if messages[0]['content'] == 'c' %}{{ raise_exception('no') }}{% endif %}" + (
        tokenizer.chat_template
    )
    rows = [[{"role": "user", "content": c}, {"role": "assistant", "content": "a"}] for c in "xc"]
    data = ChatDataset([{"messages": row} for row in rows], bad_rows="drop")
    assert data.examples(tokenizer, **LIMITS).counts["bad"] == 1
