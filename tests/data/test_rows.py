"""Column layouts that are recognised, and rows that can't be used."""

from __future__ import annotations

import pytest

from verl.config.errors import DataError
from verl.data.loader import PreferenceDataset, PromptDataset

USER, BOT, OTHER = ({"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "good"), ("assistant", "bad")))
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "q", "question": "other"}, "q"),
        ({"question": "q"}, "q"),
        ({"problem": "q"}, "q"),
        ({"instruction": "q", "input": ""}, "q"),
        ({"instruction": "q", "input": "more"}, "q\n\nmore"),
        ({"prompt": [SYSTEM, USER]}, [SYSTEM, USER]),
        ({"messages": [USER, BOT]}, [USER]),
        ({"messages": [USER]}, [USER]),
        ({"messages": [USER | {"name": None}, BOT]}, [USER]),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "good"}]}, [USER]),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]}, None),
        (
            {"chosen": "\n\nHuman: q\n\nAssistant: A", "rejected": "\n\nHuman: q\n\nAssistant: B"},
            "\n\nHuman: q\n\nAssistant:",
        ),
    ],
)
def test_prompt_layouts(row, prompt):
    read = PromptDataset([row])[0]["prompt"]
    assert read == prompt if prompt is not None else read[0]["content"] == "q"


def test_the_dropped_answer_is_kept_as_response():
    assert PromptDataset([{"messages": [USER, BOT]}])[0]["response"] == "good"


def test_verl_rows():
    row = {"data_source": "d", "prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "7"}}
    read = PromptDataset([row])[0]
    assert (read["prompt"], read["answer"], read["ground_truth"], read["data_source"]) == ([USER], "7", "7", "d")


DIALOGUE = "\n\nHuman: q\n\nAssistant: first\n\nHuman: r\n\nAssistant:"


@pytest.mark.parametrize(
    ("row", "right"),
    [
        ({"chosen": DIALOGUE + " good", "rejected": DIALOGUE + " bad"}, (DIALOGUE, " good", " bad")),
        ({"prompt": "q", "chosen": "good", "rejected": "bad"}, ("q", "good", "bad")),
        ({"prompt": "q", "chosen": [USER, BOT], "rejected": [USER, OTHER]}, ([USER], [BOT], [OTHER])),
        ({"prompt": [USER], "chosen": [BOT], "rejected": [OTHER]}, ([USER], [BOT], [OTHER])),
        ({"prompt": [USER], "chosen": [USER, BOT], "rejected": [USER, OTHER]}, ([USER], [BOT], [OTHER])),
        ({"prompt": [SYSTEM], "chosen": [USER, BOT], "rejected": [USER, OTHER]}, ([SYSTEM, USER], [BOT], [OTHER])),
        ({"chosen": [USER, BOT], "rejected": [USER, OTHER]}, ([USER], [BOT], [OTHER])),
        ({"question": "q", "chosen": "good", "rejected": "bad"}, ("q", "good", "bad")),
    ],
)
def test_preference_layouts(row, right):
    read = PreferenceDataset([row])[0]
    assert (read["prompt"], read["chosen"], read["rejected"]) == right


def test_columns_by_name():
    rows = [{"q": {"text": "x"}, "chosen": "c", "answer_1": "a", "answer_0": "b"}]
    assert PromptDataset(rows, {"prompt": "q.text"})[0]["prompt"] == "x"
    pair = PreferenceDataset(rows, {"prompt": "q.text", "chosen": "answer_1", "rejected": "answer_0"})[0]
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ("x", "a", "b")


@pytest.mark.parametrize(
    ("cls", "row", "columns", "said"),
    [
        (
            PromptDataset,
            {"question": "x", "answer": "y"},
            {"prompt": "quesion"},
            r"did you mean 'question'.*answer, question",
        ),
        (PromptDataset, {"t": "x", "u": "y"}, {}, "no prompt column; the data list has the columns t, u"),
        (PreferenceDataset, {"prompt": "x", "good": "y"}, {}, "needs chosen and rejected; .* good, prompt"),
    ],
)
def test_wrong_columns_list_those_there_are(cls, row, columns, said):
    with pytest.raises(DataError, match=said):
        cls([row], columns)[0]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (None, "prompt is missing"),
        ("  ", "prompt is empty"),
        ([], "prompt is empty"),
        (7, "prompt is int"),
        (["x"], "prompt holds str"),
        ([{"role": "user"}], "prompt holds a message without role and text content"),
        ([{"content": "x"}], "prompt holds a message without role and text content"),
    ],
)
def test_bad_prompts_are_named_by_row(bad, said):
    with pytest.raises(DataError, match=f"row 1: {said}"):
        list(PromptDataset([{"prompt": "x"}, {"prompt": bad}]))


def test_the_first_bad_rows_are_told_in_one_message():
    with pytest.raises(DataError, match=r"row 1: prompt is empty; row 3: prompt is missing$"):
        list(PromptDataset([{"prompt": "x"}, {"prompt": ""}, {"prompt": "y"}, {}]))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chosen": "abc", "rejected": "abd"}, "don't share a start"),
        ({"prompt": "q", "chosen": "", "rejected": "b"}, "chosen is empty"),
        ({"prompt": "q", "chosen": "a", "rejected": [BOT]}, "one of chosen and rejected is text"),
        ({"chosen": DIALOGUE, "rejected": DIALOGUE + " x"}, "chosen is empty"),
        ({"chosen": [BOT], "rejected": [OTHER]}, "share no first turn"),
    ],
)
def test_bad_pairs(row, said):
    with pytest.raises(DataError, match=f"row 0: .*{said}"):
        PreferenceDataset([row])[0]
