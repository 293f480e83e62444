"""G14: tokens that merge over the boundary of prompt and answer; both sides must continue the same prompt ids."""

from __future__ import annotations

import pytest

from tests.tiny import BOS, EOS, f_bpe
from verl.data.chat import render_text
from verl.data.pairs import encode_completions, encode_pair

ROW = {"prompt": "xa", "chosen": "b", "rejected": "c"}


def test_the_fixture_merges_over_the_boundary():
    tokenizer = f_bpe()
    assert tokenizer("xa").input_ids == [3, 4]
    assert tokenizer("xab").input_ids == [3, 7]
    assert tokenizer("xac").input_ids == [3, 4, 6]


@pytest.mark.parametrize("template", [None, "plain", "bos"])
@pytest.mark.parametrize("bos_post", [False, True])
@pytest.mark.parametrize(
    "row", [ROW, ROW | {"prompt": "a"}, ROW | {"chosen": "c", "rejected": "b"}, ROW | {"prompt": "xab"}]
)
def test_invariants(row, bos_post, template):
    tokenizer = f_bpe(bos_post=bos_post, template=template)
    pair = encode_pair(tokenizer, row, max_length=64)
    assert pair is not None
    start = render_text(tokenizer, row["prompt"]).replace("<bos>", "")
    for ids, said in ((pair.chosen_ids, row["chosen"]), (pair.rejected_ids, row["rejected"])):
        assert ids[-1] == EOS and ids.count(EOS) == 1
        assert len(ids) > 1, "a trained token beside the end"
        assert tokenizer.decode(pair.prompt_ids + ids, skip_special_tokens=True).rstrip("\n") == start + said
    assert [i for i in pair.prompt_ids if i != BOS], "the first answer token has something to follow"
    assert pair.prompt_ids.count(BOS) == (bos_post or template == "bos")


def test_both_sides_are_cut_at_the_common_prefix():
    pair = encode_pair(f_bpe(), ROW, max_length=8)
    assert pair is not None
    assert (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids) == ((3,), (7, EOS), (4, 6, EOS))


def test_a_prompt_that_would_vanish_is_tokenised_apart():
    pair = encode_pair(f_bpe(), ROW | {"prompt": "a"}, max_length=8)
    assert pair is not None
    assert (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids) == ((4,), (5, EOS), (6, EOS))


def test_one_completion_alone_keeps_the_same_invariants():
    assert encode_completions(f_bpe(), "xa", ["b"]) == [[3], [7, EOS]]
    assert encode_completions(f_bpe(), "xa", ["c<eos>"]) == [[3, 4], [6, EOS]]
