"""G14: tokens that merge over the boundary of prompt and answer; both sides must continue the same prompt ids."""

from __future__ import annotations

import pytest

from tests.data.chatml import chatml, shown
from tests.tiny import BOS, EOS, f_bpe
from verl.config.errors import DataError
from verl.data.chat import render_text
from verl.data.loader import open_example_set
from verl.data.pairs import encode_completions

ROW = {"prompt": "xa", "chosen": "b", "rejected": "c"}
LIMITS = {"max_prompt_length": 32, "max_response_length": 32}


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
    (pair,) = open_example_set([row], tokenizer, "pairs", **LIMITS)
    start = render_text(tokenizer, row["prompt"]).replace("<bos>", "")
    for side, said in zip(pair.completions, (row["chosen"], row["rejected"]), strict=True):
        ids = side.ids
        assert ids[-1] == EOS and ids.count(EOS) == 1
        assert sum(side.mask) == len(ids) > 1, "a trained token beside the end"
        assert tokenizer.decode(pair.prompt_ids + ids, skip_special_tokens=True).rstrip("\n") == start + said
    assert [i for i in pair.prompt_ids if i != BOS], "the first answer token has something to follow"
    assert pair.prompt_ids.count(BOS) == (bos_post or template == "bos")


def test_both_sides_are_cut_at_the_common_prefix():
    (pair,) = open_example_set([ROW], f_bpe(), "pairs", **LIMITS)
    assert (pair.prompt_ids, *(side.ids for side in pair.completions)) == ((3,), (7, EOS), (4, 6, EOS))
    two = open_example_set([ROW], f_bpe(), "labelled", **LIMITS)
    assert [(e.prompt_ids, e.completions[0].ids) for e in two] == [((3,), (7, EOS)), ((3, 4), (6, EOS))]


def test_a_prompt_that_would_vanish_is_tokenised_apart():
    (pair,) = open_example_set([ROW | {"prompt": "a"}], f_bpe(), "pairs", **LIMITS)
    assert (pair.prompt_ids, *(side.ids for side in pair.completions)) == ((4,), (5, EOS), (6, EOS))


def test_one_completion_alone_keeps_the_same_invariants():
    assert encode_completions(f_bpe(), "xa", ["b"]) == [[3], [7, EOS]]
    assert encode_completions(f_bpe(), "xa", ["c<eos>"]) == [[3, 4], [6, EOS]]


@pytest.mark.parametrize("template", [None, "plain", "bos"])
@pytest.mark.parametrize("bos_post", [False, True])
@pytest.mark.parametrize("said", ["b", "c", "ab"])
def test_examples_of_every_kind_cut_at_the_same_place(said, bos_post, template):
    tokenizer = f_bpe(bos_post=bos_post, template=template)
    row = ROW | {"completion": said, "chosen": said, "rejected": said, "label": 1}
    talk = [{"role": "user", "content": "xa"}, {"role": "assistant", "content": said}]
    examples = [
        open_example_set([made], tokenizer, kind, **LIMITS)[0]
        for kind, made in (
            ("pairs", ROW | row),
            ("labelled", row),
            ("chats", {"prompt": "xa", "completion": said}),
            ("chats", {"messages": talk}),
        )
    ]
    (prompt,) = {example.prompt_ids for example in examples}
    (side,) = {side for example in examples for side in example.completions}
    assert all(side.mask) and len(side.ids) > 1 and side.ids[-1] == EOS
    start = render_text(tokenizer, "xa").replace("<bos>", "")
    assert tokenizer.decode(prompt + side.ids, skip_special_tokens=True).rstrip("\n") == start + said


def test_answers_of_several_turns_begin_where_the_first_of_them_does():
    def answer(*said):
        return [{"role": ("assistant", "user")[i % 2], "content": words} for i, words in enumerate(said)]

    tokenizer = chatml(merges=(("Ċ", "b"),))
    row = {
        "prompt": [{"role": "user", "content": "x"}],
        "chosen": answer("b", "x", "c"),
        "rejected": answer("c", "x", "b"),
    }
    (pair,) = open_example_set([row], tokenizer, "pairs", max_prompt_length=99, max_response_length=99)
    cut = len(pair.prompt_ids) + 1  # of the rejected side that is its header's last token
    with pytest.raises(DataError, match="0 rows after filtering"):
        open_example_set([row], tokenizer, "pairs", max_prompt_length=cut, max_response_length=0)
    chosen, rejected = shown(tokenizer, pair)[1:]
    assert chosen.startswith("[\nb<|im_end|>]") and rejected.startswith("\n[c<|im_end|>]")
    assert tokenizer.decode([*pair.prompt_ids, *pair.completions[1].ids]).endswith(
        "x<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    )
