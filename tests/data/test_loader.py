"""The doors: lazy construction, tokenised prompts, the cache, and feeds in training order."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.tiny import f_bpe
from verl.config.errors import DataError
from verl.data.loader import PreferenceDataset, PromptDataset, open_prompts

ROWS = [{"prompt": "x" * (1 + i % 7), "answer": i} for i in range(25)]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def test_a_prompt_carries_its_row(jsonl):
    prompts = open_prompts(jsonl, f_bpe(template="plain"), max_prompt_length=32, columns={"truth": "answer"})
    assert len(prompts) == 25
    third = prompts[3]
    assert third.id == "3" and third.text == "u:xxxx\na:" and third.ids == (8, 11, 3, 3, 3, 3, 12, 4, 11)
    assert third.fields == {"prompt": "xxxx", "answer": 3, "truth": 3}
    assert prompts[-1].id == "24" and [p.id for p in prompts[:2]] == ["0", "1"]


def test_constructors_read_nothing_and_a_preference_set_gives_prompts():
    PromptDataset("nowhere.jsonl"), PreferenceDataset("path/to/hh-rlhf")
    pairs = PreferenceDataset([{"prompt": "xa", "chosen": "b", "rejected": "c"}])
    assert open_prompts(pairs, f_bpe(), max_prompt_length=8)[0].ids == (3, 4)


def test_a_prompt_without_tokens_is_named():
    with pytest.raises(DataError, match=r"row 1: the tokenizer makes no token of prompt 'QQ'"):
        open_prompts(["x", "QQ"], f_bpe(), max_prompt_length=8)


def test_the_fingerprint_covers_data_template_tokenizer_and_limits(jsonl):
    def mark(rows=jsonl, tokenizer=None, limit=32, **how):
        return open_prompts(rows, tokenizer or f_bpe(), max_prompt_length=limit, **how).fingerprint

    assert mark() == mark() == mark(ROWS)
    changed = [
        mark([*ROWS[:-1], ROWS[-1] | {"answer": 0}]),
        mark(tokenizer=f_bpe(template="plain")),
        mark(tokenizer=f_bpe(bos_post=True)),
        mark(limit=31),
        mark(overlong="filter"),
        mark(columns={"truth": "answer"}),
    ]
    assert len({mark(), *changed}) == 7


def test_tokenised_rows_are_cached_and_read_back(jsonl, tmp_path, monkeypatch):
    def opened():
        return open_prompts(jsonl, f_bpe(), max_prompt_length=5, cache_dir=tmp_path / "cache")

    first = opened()
    (file,) = (tmp_path / "cache").iterdir()
    assert file.name == f"prompts-{first.fingerprint}.arrow"
    with pytest.raises(DataError, match=r"dataset_cache_dir: can't write to .*\.jsonl: File exists"):
        open_prompts(jsonl, f_bpe(), max_prompt_length=5, cache_dir=jsonl)
    with pytest.raises(DataError, match="dataset_cache_dir: can't write to /proc/nowhere: No such file"):
        open_prompts(jsonl, f_bpe(), max_prompt_length=5, cache_dir="/proc/nowhere")
    monkeypatch.setattr("verl.data.chat.encode", None)  # a second tokenisation would raise
    again = opened()
    assert list(again) == list(first)
    assert again.counts == first.counts == {"kept": 25, "filtered": 0, "truncated": 6}
    file.write_bytes(b"broken")
    with pytest.raises(DataError, match="delete the file"):
        opened()


def ids(prompts):
    return [int(p.id) for p in prompts]


@pytest.mark.parametrize("streaming", [False, True])
def test_feeds_draw_every_row_once_per_epoch_and_resume(jsonl, streaming):
    def feed(seed=1):
        data = PromptDataset(jsonl)
        made = data.feed(f_bpe(), max_prompt_length=5, overlong="filter", seed=seed, streaming=streaming)
        if streaming:
            made.buffer = 6
        return made

    whole = feed()
    kept = {i for i, row in enumerate(ROWS) if len(row["prompt"]) <= 5}
    n = len(kept)
    drawn = ids(whole.take(3 * n))
    epochs = [drawn[i * n : (i + 1) * n] for i in range(3)]
    assert all(set(epoch) == kept for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) == 3
    assert ids(feed(seed=2).take(3 * n)) != drawn
    for taken in (0, 4, n, n + 5, 2 * n):
        before = feed()
        assert ids(before.take(taken)) == drawn[:taken]
        resumed = feed()
        resumed.restore(json.loads(json.dumps(before.state())))
        assert ids(resumed.take(3 * n - taken)) == drawn[taken:]
        assert resumed.epoch == whole.epoch
        assert not streaming or resumed.counts == whole.counts
    with pytest.raises(DataError, match="saved data position"):
        feed(seed=2).restore(whole.state())


def test_a_stream_knows_no_size_and_stops_when_no_row_is_left(jsonl):
    data = PromptDataset(jsonl)
    assert data.feed(f_bpe(), max_prompt_length=5).size == 25
    stream = data.feed(f_bpe(template="plain"), max_prompt_length=3, overlong="filter", streaming=True)
    assert stream.size is None and data.field_names == PromptDataset(jsonl).field_names == {"prompt", "answer"}
    with pytest.raises(DataError, match="0 rows after filtering"):
        stream.take(1)


def test_a_stream_that_got_shorter_is_not_resumed_silently(jsonl):
    feed = PromptDataset(jsonl).feed(f_bpe(), max_prompt_length=9, streaming=True)
    feed.take(20)
    with pytest.raises(DataError, match="ends after 10 rows, the saved position is 20"):
        PromptDataset(ROWS[:10]).feed(f_bpe(), max_prompt_length=9, streaming=True).restore(feed.state())


def test_importing_the_room_loads_neither_datasets_nor_torch():
    code = "import sys, verl.data.loader; print({'torch', 'datasets', 'transformers', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
