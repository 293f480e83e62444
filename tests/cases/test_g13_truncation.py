"""G13: truncation never leaves a side of a pair, or a short row, without tokens."""

from __future__ import annotations

import pytest

from tests.tiny import EOS, f_bpe
from verl.config.errors import DataError
from verl.data.examples import ExampleEncoder
from verl.data.loader import PreferenceDataset, PromptDataset, open_example_set

EIGHT = {"max_prompt_length": 6, "max_response_length": 2}  # prompt and completion together


def test_a_prompt_that_leaves_no_room_drops_the_pair_and_counts_it():
    rows = [
        {"prompt": "x" * 12, "chosen": "a", "rejected": "c"},
        {"prompt": "xx", "chosen": "a", "rejected": "c"},
    ]
    done = PreferenceDataset(rows).examples(f_bpe(), **EIGHT)
    assert done.counts == {"kept": 1, "filtered": 1, "truncated": 0}
    (pair,) = done
    assert pair.id == "1" and pair.prompt_ids and [bool(side.ids) for side in pair.completions] == [True, True]


def test_a_prompt_that_leaves_no_room_is_an_error_with_row_and_lengths_when_asked():
    rows = [{"prompt": "xx", "chosen": "a", "rejected": "c"}, {"prompt": "x" * 12, "chosen": "a", "rejected": "c"}]
    with pytest.raises(ValueError, match=r"row 1: prompt 12 \+ chosen 2 / rejected 2 tokens, .* 8"):
        PreferenceDataset(rows).examples(f_bpe(), overlong="error", **EIGHT)


def test_b_keep_end_cuts_each_row_by_its_own_length():
    prompts = PromptDataset(["xxxx", "x" * 16 + "caca"]).prompts(f_bpe(), max_prompt_length=8)
    assert [p.ids for p in prompts] == [(3, 3, 3, 3), (3, 3, 3, 3, 6, 4, 6, 4)]


def test_c_each_side_is_cut_by_its_own_length():
    row = {"prompt": "xxxx", "chosen": "cc", "rejected": "c" * 11}  # 4 tokens, 3 and 12
    encode = ExampleEncoder(f_bpe(), "pairs", max_length=8)
    (pair,) = encode([("0", row)])
    assert pair.prompt_ids == (3,) * 4 and [side.ids for side in pair.completions] == [(6, 6, EOS), (6,) * 4]
    assert encode.counts == {"kept": 1, "filtered": 0, "truncated": 1}
    left = ExampleEncoder(f_bpe(), "pairs", max_length=8, overlong="filter")
    assert left([("0", row)]) == [] and left.counts == {"kept": 0, "filtered": 1, "truncated": 0}


@pytest.mark.parametrize("overlong", ["truncate", "filter", "error"])
@pytest.mark.parametrize(("parts", "lengths"), [("Qac", (0, 1, 1)), ("xQc", (1, 0, 1)), ("xcQ", (1, 1, 0))])
def test_an_empty_side_always_raises(parts, lengths, overlong):
    tokenizer = f_bpe()  # has no token for Q
    tokenizer.eos_token = None  # it would be added to an empty side
    row = dict(zip(("prompt", "chosen", "rejected"), parts, strict=True))
    said = "row 0: prompt {}, chosen {}, rejected {} tokens; none may be empty".format(*lengths)
    with pytest.raises(DataError, match=said):
        PreferenceDataset([row]).examples(tokenizer, overlong=overlong, **EIGHT)


def test_no_pair_left_is_an_error():
    with pytest.raises(DataError, match="0 rows after filtering"):
        PreferenceDataset([{"prompt": "x" * 12, "chosen": "a", "rejected": "c"}]).examples(f_bpe(), **EIGHT)


TURNS = [
    {"role": r, "content": c} for r, c in (("user", "x"), ("assistant", "c"), ("user", "x" * 9), ("assistant", "c"))
]
OFFLINE = {
    "pairs": lambda prompt: {"prompt": prompt, "chosen": "cccc", "rejected": "a"},
    "labelled": lambda prompt: {"prompt": prompt, "completion": "cccc", "label": 1},
    "chats": lambda prompt: {"prompt": prompt, "completion": "cccc"},
}


@pytest.mark.parametrize("kind", OFFLINE)
@pytest.mark.parametrize("length", range(1, 14))
def test_no_example_is_without_a_trained_token(kind, length):
    rows = [OFFLINE[kind]("x"), OFFLINE[kind]("x" * length)]
    done = open_example_set(rows, f_bpe(), kind, **EIGHT)
    assert done.counts["kept"] == len(done) == (2 if length < 8 else 1) and done.counts["filtered"] == (length >= 8)
    for example in done:
        assert all(any(side.mask) and len(side.mask) == len(side.ids) > 0 for side in example.completions)
        assert max(len(example.prompt_ids) + len(side.ids) for side in example.completions) <= 8


@pytest.mark.parametrize("kind", OFFLINE)
def test_an_example_without_room_is_an_error_with_row_and_lengths_when_asked(kind):
    with pytest.raises(DataError, match=r"row 1: prompt 12 \+ (chosen|completion) 5.* 8"):
        open_example_set([OFFLINE[kind]("x"), OFFLINE[kind]("x" * 12)], f_bpe(), kind, overlong="error", **EIGHT)


@pytest.mark.parametrize("limit", range(7, 30))
def test_a_cut_conversation_keeps_a_trained_token_of_its_first_answer(limit):
    rows = [{"messages": TURNS}]
    (chat,) = open_example_set(
        rows, f_bpe(template="plain"), "chats", max_prompt_length=limit - 1, max_response_length=1
    )
    (side,) = chat.completions
    assert len(chat.prompt_ids) == 6 and len(side.ids) <= limit - 6
    assert side.mask[0] and side.mask[-1] and sum(side.mask) == min(2, limit - 6) + max(0, min(limit, 25) - 22)
