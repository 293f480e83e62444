"""Examples: the length policy, the table and its cache, and feeds in training order."""

from __future__ import annotations

import json

import pytest

from tests.data.chatml import chatml
from tests.tiny import EOS, f_bpe
from verl.config.errors import DataError
from verl.data.examples import Completion, Example
from verl.data.loader import (
    ChatDataset,
    LabelledDataset,
    PreferenceDataset,
    PromptDataset,
    open_example_set,
    open_examples,
    open_prompts,
)

ROWS = [{"prompt": "x" * (1 + i % 5), "chosen": "c" * (1 + i % 3), "rejected": "a", "n": i} for i in range(23)]
LIMITS = {"max_prompt_length": 4, "max_response_length": 4}
KINDS = ["pairs", "labelled", "chats"]


def ids(items):
    return [item.id for item in items]


def test_an_example_carries_its_row():
    rows = [{"prompt": "xa", "chosen": "cc", "rejected": "b", "margin": "1.5", "score_chosen": 9}]
    (example,) = open_example_set(rows, f_bpe(), "pairs", **LIMITS)
    sides = Completion((4, 6, 6, EOS), (True,) * 4, "acc"), Completion((7, EOS), (True,) * 2, "ab")
    assert example == Example("0", (3,), "xa", sides, None, 1.5, rows[0])


@pytest.mark.parametrize("streaming", [False, True])
def test_scores_are_a_margin_only_where_columns_say_so(streaming):
    row = {"prompt": "x", "chosen": "a", "rejected": "c", "score_chosen": 9, "score_rejected": 2, "gap": {"wide": 7}}

    def margin(columns=None, **more):
        feed = open_examples([row | more], f_bpe(), "pairs", columns=columns, streaming=streaming, **LIMITS)
        return feed.take(1)[0].margin

    assert margin() is None and margin(score_chosen="x") is None
    assert margin({"margin": "score_chosen"}) == 9.0 and margin({"margin": "gap.wide"}) == 7.0
    assert margin(margin="") is None and margin(margin=0) == 0.0 and margin(margin="-0.5") == -0.5
    assert margin({"margin": "gap.narrow"}, margin=1) is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_limits_together_are_the_rows(kind):
    rows = [
        {"prompt": p, "completion": "cccc", "chosen": "cccc", "rejected": "a", "label": 1}
        for p in ("x", "xxxxx", "x" * 8)
    ]
    if kind == "pairs":
        rows = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in rows]
    cut = open_example_set(rows, f_bpe(), kind, **LIMITS)
    assert cut.counts == {"kept": 2, "filtered": 1, "truncated": 1} and ids(cut) == ["0", "1"]
    assert [len(e.prompt_ids) for e in cut] == [1, 5], "the prompt is never cut"
    assert [e.completions[0].ids for e in cut] == [(6, 6, 6, 6, EOS), (6, 6, 6)]
    assert cut[1].completions[0].text == "ccc" and len(cut[1].completions[0].mask) == 3
    if kind == "pairs":
        assert cut[1].completions[1].ids == (4, EOS), "each side is cut by its own length"
    left = open_example_set(rows, f_bpe(), kind, overlong="filter", **LIMITS)
    assert left.counts == {"kept": 1, "filtered": 2, "truncated": 0}
    with pytest.raises(DataError, match=r"row 1: prompt 5 \+ (chosen|completion) 5.* the limit for a side is 8; row 2"):
        open_example_set(rows, f_bpe(), kind, overlong="error", bad_rows="drop", **LIMITS)
    with pytest.raises(DataError, match="0 rows after filtering: all 1 rows are longer than 8 tokens"):
        open_example_set(rows[2:], f_bpe(), kind, **LIMITS)


@pytest.mark.parametrize("kind", KINDS)
def test_tokenised_examples_are_cached_and_read_back(kind, tmp_path, monkeypatch):
    def opened():
        return open_example_set(
            ROWS, f_bpe(template="plain"), kind, cache_dir=tmp_path, max_prompt_length=8, max_response_length=2
        )

    first = opened()
    assert first.counts["truncated"] and list(first)
    (file,) = tmp_path.iterdir()
    assert file.name == f"{kind}-{first.fingerprint}.arrow"
    monkeypatch.setattr("verl.data.examples.encode_completions", None)  # a second tokenisation would raise
    again = opened()
    assert list(again) == list(first) and again.counts == first.counts
    assert first[-1] == again[len(first) - 1] and again[1:3] == list(first)[1:3]


def test_the_fingerprint_covers_data_kind_template_tokenizer_and_policies():
    def mark(rows=ROWS, tokenizer=None, kind="pairs", limit=8, **how):
        tokenizer = tokenizer or f_bpe()
        limits = {"max_prompt_length": limit, "max_response_length": 8}
        return open_example_set(rows, tokenizer, kind, **limits, **how).fingerprint

    changed = [
        mark(ROWS[:-1]),
        mark(kind="labelled"),
        mark(kind="chats"),
        mark(tokenizer=f_bpe(template="plain")),
        mark(tokenizer=f_bpe(bos_post=True)),
        mark(limit=9),
        mark(overlong="filter"),
        mark(bad_rows="drop"),
        mark(columns={"n2": "n"}),
    ]
    assert mark() == mark() and len({mark(), *changed}) == 10


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_feeds_draw_every_example_once_per_epoch_and_resume(kind, streaming):
    def feed(seed=1):
        made = open_examples(ROWS, f_bpe(), kind, seed=seed, streaming=streaming, overlong="filter", **LIMITS)
        if streaming:
            made.buffer = 6
        return made

    kept = set(ids(open_example_set(ROWS, f_bpe(), kind, overlong="filter", **LIMITS)))
    n = len(kept)
    assert kept and ("0/rejected" in kept) == (kind == "labelled")
    whole = feed()
    drawn = ids(whole.take(3 * n))
    epochs = [drawn[i * n : (i + 1) * n] for i in range(3)]
    assert all(set(epoch) == kept for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) == 3
    assert whole.size == (None if streaming else n) and ids(feed(seed=2).take(3 * n)) != drawn
    for taken in (0, 4, n, n + 5):
        before, resumed = feed(), feed()
        before.take(taken)
        resumed.restore(json.loads(json.dumps(before.state())))
        assert ids(resumed.take(3 * n - taken)) == drawn[taken:]
    with pytest.raises(DataError, match="saved data position"):
        feed(seed=2).restore(whole.state())
    whole.close()


def test_without_shuffle_the_order_is_the_files():
    for streaming in (False, True):
        feed = open_examples(ROWS[:2], f_bpe(), "labelled", shuffle=False, streaming=streaming, **LIMITS)
        first = ids(feed.take(5))
        assert first == ["0/chosen", "0/rejected", "1/chosen", "1/rejected", "0/chosen"]


def test_a_data_set_of_one_kind_is_a_source_of_the_others():
    pairs = PreferenceDataset(ROWS, cache_dir=None, bad_rows="drop")
    assert ids(open_example_set(pairs, f_bpe(), "labelled", **LIMITS))[:2] == ["0/chosen", "0/rejected"]
    assert len(open_example_set(pairs, f_bpe(), "chats", **LIMITS)) == len(ROWS)
    assert open_prompts(pairs, f_bpe(), max_prompt_length=8)[1].ids == (3, 3)
    assert PreferenceDataset.of(pairs) is pairs is PromptDataset.of(pairs)
    made = LabelledDataset.of(pairs, {"m": "n"})
    assert isinstance(made, LabelledDataset) and made.bad_rows == "drop" and made[3]["m"] == 3
    assert type(PromptDataset.of(pairs, {"m": "n"})) is PreferenceDataset


def test_chats_and_labelled_rows_are_sources_of_prompts():
    talk = [
        {"role": r, "content": c} for r, c in (("user", "xa"), ("assistant", "b"), ("user", "c"), ("assistant", "c"))
    ]
    tokenizer = chatml()
    (prompt,) = open_prompts(ChatDataset([{"messages": talk}]), tokenizer, max_prompt_length=200)
    assert prompt.text == tokenizer.apply_chat_template(talk[:3], tokenize=False, add_generation_prompt=True)
    (prompt,) = open_prompts(
        LabelledDataset([{"prompt": "xa", "answer": "b", "label": 1}]), f_bpe(), max_prompt_length=9
    )
    assert prompt.ids == (3, 4)
