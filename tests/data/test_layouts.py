"""The field's file layouts, each from a small file in that format, with prompts and masks token by token."""

from __future__ import annotations

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.chatml import BOT, END, EOT, START, chatml, shown, user
from verl.config.errors import DataError
from verl.data.loader import open_example_set, open_prompts

LIMITS = {"max_prompt_length": 400, "max_response_length": 400}


def write(folder, form, rows):
    path = folder / f"data.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "json":
        path.write_text(json.dumps(rows))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return path


def said(role, content, **more):
    return {"role": role, "content": content, **more}


Q, GOOD, BAD = said("user", "Why?"), said("assistant", "Because."), said("assistant", "No.")
ASKED = user("Why?") + BOT
HH = "\n\nHuman: Why?\n\nAssistant: So.\n\nHuman: Really?\n\nAssistant:"
HH_ASKED = f"{ASKED}So.{END}\n{user('Really?')}{BOT}"
PAIR = (ASKED, f"[Because.{END}]", f"[No.{END}]")
ONE = (ASKED, f"[Because.{END}]")
SYSTEM = f"{START}system\nBe brief.{END}\n"

PAIRS = {
    "hh-rlhf": (
        "jsonl parquet json",
        {"chosen": f"{HH} Yes.", "rejected": f"{HH} Go away."},
        (HH_ASKED, f"[Yes.{END}]", f"[Go away.{END}]"),
        None,
    ),
    "ultrafeedback": (
        "jsonl parquet json",
        {
            "prompt": "Why?",
            "prompt_id": "a1",
            "chosen": [Q, GOOD],
            "rejected": [Q, BAD],
            "messages": [Q, GOOD],
            "score_chosen": 8.5,
            "score_rejected": 6.0,
        },
        PAIR,
        None,
    ),
    "trl standard": ("jsonl parquet csv json", {"prompt": "Why?", "chosen": "Because.", "rejected": "No."}, PAIR, None),
    "trl standard, implicit prompt": (
        "jsonl parquet csv",
        {"chosen": "The sky is blue.", "rejected": "The sky is brown."},
        (user("The sky is") + BOT, f"[ blue.{END}]", f"[ brown.{END}]"),
        None,
    ),
    "trl conversational": (
        "jsonl parquet",
        {"prompt": [said("system", "Be brief."), Q], "chosen": [GOOD], "rejected": [BAD]},
        (SYSTEM + ASKED, *PAIR[1:]),
        None,
    ),
    "trl conversational, implicit prompt": ("jsonl parquet", {"chosen": [Q, GOOD], "rejected": [Q, BAD]}, PAIR, None),
    "margin column": (
        "jsonl csv",
        {
            "prompt": "Why?",
            "chosen": "Because.",
            "rejected": "No.",
            "margin": 0.5,
            "score_chosen": 9,
            "score_rejected": 2,
        },
        PAIR,
        0.5,
    ),
    "turns of others in an answer": (
        "jsonl parquet",
        {"prompt": [Q], "chosen": [GOOD, said("user", "And?"), BAD], "rejected": [BAD]},
        (ASKED, f"[Because.{END}]\n{user('And?')}{BOT}[No.{END}]", f"[No.{END}]"),
        None,
    ),
}
LABELLED = {
    "trl unpaired": ("jsonl parquet csv json", {"prompt": "Why?", "completion": "Because.", "label": True}, True),
    "trl unpaired, conversational": ("jsonl parquet", {"prompt": [Q], "completion": [GOOD], "label": False}, False),
    "clicks": ("jsonl csv", {"prompt": "Why?", "response": "Because.", "thumbs_up": -1}, False),
    "rated chats": ("jsonl parquet", {"messages": [Q, GOOD], "desirable": 1}, True),
    "the prompt's turns repeated": ("jsonl", {"prompt": [Q], "completion": [Q, GOOD], "label": "true"}, True),
}
CONVERSATION = [
    said("system", "Be brief."), Q, GOOD, said("user", "And?"), said("assistant", "So."), said("user", "Bye."),
]  # fmt: skip
TURNS = f"[Because.{END}]\n{user('And?')}{BOT}[So.{END}]"
CHATS = {
    "openai messages": ("jsonl parquet json", {"messages": CONVERSATION}, (SYSTEM + ASKED, TURNS)),
    "openai weights": (
        "jsonl",
        {"messages": [Q, GOOD | {"weight": 0}, said("user", "And?"), said("assistant", "So.", weight=1)]},
        (f"{ASKED}Because.{END}\n{user('And?')}{BOT}", f"[So.{END}]"),
    ),
    "sharegpt": (
        "jsonl parquet json",
        {
            "conversations": [
                {"from": {"user": "human", "assistant": "gpt"}.get(m["role"], "system"), "value": m["content"]}
                for m in CONVERSATION
            ]
        },
        (SYSTEM + ASKED, TURNS),
    ),
    "alpaca": (
        "jsonl json csv parquet",
        {"instruction": "Why?", "input": "", "output": "Because."},
        ONE,
    ),
    "alpaca with input": (
        "json csv",
        {"instruction": "Why?", "input": "sky", "output": "Because."},
        (user("Why?\n\nsky") + BOT, ONE[1]),
    ),
    "gsm8k": (
        "jsonl parquet csv",
        {"question": "Why?", "answer": "6*7=42\n#### 42"},
        (ASKED, f"[6*7=42\n#### 42{END}]"),
    ),
    "prompt and response": ("jsonl csv", {"prompt": "Why?", "response": "Because."}, ONE),
    "trl prompt-completion": ("jsonl parquet", {"prompt": [Q], "completion": [GOOD]}, ONE),
    "several turns after the prompt": (
        "jsonl",
        {"prompt": CONVERSATION[:2], "completion": CONVERSATION[2:5]},
        (SYSTEM + ASKED, TURNS),
    ),
    "the chosen side of a pair": (
        "jsonl",
        {"chosen": f"{HH} Yes.", "rejected": f"{HH} No."},
        (HH_ASKED, f"[Yes.{END}]"),
    ),
    "ultrafeedback": ("jsonl", PAIRS["ultrafeedback"][1], ONE),
}
PROMPTS = {
    "plain text": ("csv jsonl json parquet", {"prompt": "Why?"}, ASKED),
    "verl": (
        "parquet jsonl",
        {
            "data_source": "sums",
            "prompt": [said("system", "Be brief."), Q],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "42"},
            "extra_info": {"index": 7, "split": "train"},
        },
        SYSTEM + ASKED,
    ),
    "gsm8k": ("jsonl parquet csv", {"question": "Why?", "answer": "6*7=42\n#### 42"}, ASKED),
    "openai messages": ("jsonl parquet", {"messages": [Q, GOOD]}, ASKED),
    "hh-rlhf": ("jsonl", PAIRS["hh-rlhf"][1], HH_ASKED),
}


def each(table):
    return [
        pytest.param(form, *rest, id=f"{name}, {form}")
        for name, (forms, *rest) in table.items()
        for form in forms.split()
    ]


def opened(path, kind, **how):
    tokenizer = chatml()
    examples = open_example_set(path, tokenizer, kind, **LIMITS, **how)
    for example in examples:
        assert tokenizer(example.prompt_text).input_ids == list(example.prompt_ids)
    return examples, [shown(tokenizer, example) for example in examples]


@pytest.mark.parametrize(("form", "row", "right", "margin"), each(PAIRS))
def test_pairs(tmp_path, form, row, right, margin):
    examples, texts = opened(write(tmp_path, form, [row, row]), "pairs")
    assert texts == [right, right] and [e.id for e in examples] == ["0", "1"]
    assert examples[0].margin == margin and examples[0].label is None
    assert "[" not in "".join(side.text for side in examples[0].completions) and examples[0].completions[0].text


@pytest.mark.parametrize(("form", "row", "label"), each(LABELLED))
def test_labelled(tmp_path, form, row, label):
    examples, texts = opened(write(tmp_path, form, [row]), "labelled")
    assert texts == [ONE] and examples[0].label is label and examples[0].margin is None


@pytest.mark.parametrize(("form", "row", "right", "margin"), each(PAIRS))
def test_pairs_read_for_labels_are_two_rows(tmp_path, form, row, right, margin):
    examples, texts = opened(write(tmp_path, form, [row]), "labelled")
    assert texts == [(right[0], right[1]), (right[0], right[2])]
    assert [(e.id, e.label) for e in examples] == [("0/chosen", True), ("0/rejected", False)]
    assert examples[1].fields["completion"] == examples[1].fields["rejected"]


@pytest.mark.parametrize(("form", "row", "right"), each(CHATS))
def test_chats(tmp_path, form, row, right):
    examples, texts = opened(write(tmp_path, form, [row]), "chats")
    assert texts == [right] and (examples[0].label, examples[0].margin) == (None, None)


@pytest.mark.parametrize(("form", "row", "right"), each(PROMPTS))
def test_prompts(tmp_path, form, row, right):
    tokenizer = chatml()
    (prompt,) = open_prompts(write(tmp_path, form, [row]), tokenizer, max_prompt_length=400)
    assert tokenizer.decode(list(prompt.ids)) == prompt.text == right
    if "question" in row:
        assert prompt.fields["answer"] == "6*7=42\n#### 42"
    if "reward_model" in row:
        assert prompt.fields["answer"] == prompt.fields["ground_truth"] == "42"
        assert prompt.fields["extra_info"]["index"] == 7 and prompt.fields["data_source"] == "sums"


@pytest.mark.parametrize(
    ("kind", "row", "columns", "right"),
    [
        (
            "pairs",
            {"q": "Why?", "yes": "Because.", "no": "No."},
            {"prompt": "q", "chosen": "yes", "rejected": "no"},
            PAIR,
        ),
        ("labelled", {"q": "Why?", "a": "Because.", "up": 1}, {"prompt": "q", "completion": "a", "label": "up"}, ONE),
        (
            "chats",
            {"extra_info": {"question": "Why?", "answer": "Because."}},
            {"prompt": "extra_info.question", "completion": "extra_info.answer"},
            ONE,
        ),
        ("chats", {"talk": {"turns": [Q, GOOD]}}, {"messages": "talk.turns"}, ONE),
        (
            "chats",
            {"prompt": "Why?", "messages": [Q, BAD], "output": "Because."},
            {"completion": "output"},
            ONE,
        ),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_anything_else_by_columns(tmp_path, form, kind, row, columns, right):
    assert opened(write(tmp_path, form, [row]), kind, columns=columns)[1] == [right]


@pytest.mark.parametrize(
    ("kind", "row", "said"),
    [
        (
            "pairs",
            {"prompt": "q", "good": "a"},
            r"needs chosen and rejected; .* good, prompt; name them with `columns`",
        ),
        ("labelled", {"prompt": "q", "completion": "a"}, r"needs a completion .* and a label .*completion, prompt"),
        ("labelled", {"prompt": "q", "label": 1}, r"needs a completion .* label, prompt; name them"),
        ("chats", {"prompt": "q", "label": 1}, r"needs messages .* completion beside the prompt"),
        ("chats", {"text": "q"}, r"no prompt column; .* text; name it"),
    ],
)
def test_when_no_layout_fits(tmp_path, kind, row, said):
    with pytest.raises(DataError, match=said):
        opened(write(tmp_path, "jsonl", [row]), kind)


@pytest.mark.parametrize(
    ("kind", "row", "said"),
    [
        ("labelled", {"prompt": "q", "completion": "a", "label": 2}, "label is 2, not true or false"),
        ("labelled", {"prompt": "q", "completion": "a", "label": "good"}, "label is 'good', not"),
        ("labelled", {"prompt": "q", "completion": "a", "label": None}, "label is None, not"),
        ("labelled", {"prompt": "q", "completion": "", "label": 1}, "completion is empty"),
        ("labelled", {"prompt": [Q], "completion": [Q], "label": 1}, "completion has no turn after the prompt"),
        ("labelled", {"messages": [Q], "label": 1}, "messages doesn't end with a turn of the assistant"),
        ("pairs", {"prompt": "q", "chosen": "a", "rejected": "b", "margin": "much"}, "margin: 'much', not a finite"),
        ("pairs", {"prompt": "q", "chosen": "a", "rejected": "b", "margin": float("inf")}, "margin: inf, not a finite"),
        ("chats", {"messages": [Q]}, "messages has no turn of the assistant"),
        ("chats", {"messages": [GOOD, Q]}, "messages has no turn before the assistant's"),
        ("chats", {"messages": [Q, said("assistant", " ")]}, "messages has no words of the assistant"),
        ("chats", {"messages": [Q, GOOD | {"weight": 0}]}, "no turn of the assistant to train on"),
    ],
)
def test_bad_rows_are_named(tmp_path, kind, row, said):
    fine = {"prompt": "q", "chosen": "a", "rejected": "b", "completion": "a", "label": 1, "messages": [Q, GOOD]}
    fine = {name: fine[name] for name in row if name in fine}
    with pytest.raises(DataError, match=f"row 1: {said}"):
        opened(write(tmp_path, "jsonl", [fine, row]), kind)


@pytest.mark.parametrize("label", [True, 1, 1.0, "true", "TRUE", "1", "+1", False, 0, -1, "false", "0", "-1"])
def test_labels_in_words_and_numbers(label):
    row = {"prompt": "q", "completion": "a", "label": label}
    (example,) = open_example_set([row], chatml(), "labelled", **LIMITS)
    assert example.label is (label in (True, "true", "TRUE", "1", "+1"))


def test_another_end_of_sequence_follows_the_last_turn():
    tokenizer = chatml(eos=EOT)
    for row in ({"messages": CONVERSATION[1:5]}, {"prompt": CONVERSATION[1:4], "completion": [CONVERSATION[4]]}):
        (example,) = open_example_set([row], tokenizer, "chats", **LIMITS)
        assert shown(tokenizer, example)[1].endswith(f"[{'So.'}{END}{EOT}]")
