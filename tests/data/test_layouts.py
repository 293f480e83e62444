"""The field's file layouts, each from a small file in that format, with prompts and masks token by token."""

from __future__ import annotations

import csv
import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.chatml import BOT, END, EOT, START, THINKING, chatml, shown, user
from verl.config.errors import DataError
from verl.data.loader import open_example_set, open_examples, open_prompts

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


MORE, OK, HI = said("user", "And?"), said("assistant", "So."), said("system", "Be brief.")
H = "\n\nHuman: Why?\n\nAssistant:"
OPEN = said("assistant", "It is")
BEGUN = (f"{ASKED}It is", f"[ so.{END}]", f"[ not.{END}]")
TOLD = (f"{ASKED}So.{END}\n{user('And?')}{BOT}", *PAIR[1:])


@pytest.mark.parametrize(
    ("row", "right"),
    [
        # the assistant's open message goes on
        ({"prompt": [Q, OPEN], "chosen": " so.", "rejected": " not."}, BEGUN),
        ({"prompt": [Q, OPEN], "chosen": [said("assistant", " so.")], "rejected": [said("assistant", " not.")]}, BEGUN),
        (
            {
                "prompt": [Q, OPEN],
                "chosen": [said("assistant", " so."), MORE, OK],
                "rejected": [said("assistant", "!")],
            },
            (BEGUN[0], f"[ so.{END}]\n{user('And?')}{BOT}[So.{END}]", f"[!{END}]"),
        ),
        ({"prompt": [Q, said("assistant", "")], "chosen": "Because.", "rejected": "No."}, PAIR),
        # what the sides begin with goes on from the prompt, or repeats it or its end
        ({"prompt": "Why?", "chosen": [OK, MORE, GOOD], "rejected": [OK, MORE, BAD]}, TOLD),
        ({"prompt": "And?", "chosen": [Q, OK, MORE, GOOD], "rejected": [Q, OK, MORE, BAD]}, TOLD),
        (
            {
                "prompt": f"{H} So.\n\nHuman: And?\n\nAssistant:",
                "chosen": [Q, OK, MORE, GOOD],
                "rejected": [Q, OK, MORE, BAD],
            },
            TOLD,
        ),
        ({"prompt": [HI, Q], "chosen": [Q, GOOD], "rejected": [Q, BAD]}, (SYSTEM + ASKED, *PAIR[1:])),
        ({"prompt": "Why?", "chosen": [HI, Q, GOOD], "rejected": [HI, Q, BAD]}, (SYSTEM + ASKED, *PAIR[1:])),
        ({"prompt": [Q], "chosen": [Q, GOOD], "rejected": [BAD]}, PAIR),
        ({"prompt": f"<|user|>\nWhy?{END}\n<|assistant|>", "chosen": [Q, GOOD], "rejected": [Q, BAD]}, PAIR),
        # whole dialogues in text
        ({"prompt": H, "chosen": f"{H} Because.", "rejected": f"{H} No."}, PAIR),
        ({"prompt": "Why?", "chosen": f"{H} Because.", "rejected": f"{H} No."}, PAIR),
        (
            {"chosen": f"{H} Because.\n\nHuman: And?\n\nAssistant: So.", "rejected": f"{H} No."},
            (ASKED, f"[Because.{END}]\n{user('And?')}{BOT}[So.{END}]", PAIR[2]),
        ),
        (
            {"prompt": "Hello", "chosen": "Hello!", "rejected": "Hello?"},
            (user("Hello") + BOT, f"[Hello!{END}]", f"[Hello?{END}]"),
        ),
        # columns that belong to the prompt, and messages as JSON
        (
            {"system": "Be brief.", "question": "Why?", "chosen": "Because.", "rejected": "No."},
            (SYSTEM + ASKED, *PAIR[1:]),
        ),
        ({"system": "Be brief.", "chosen": f"{H} Because.", "rejected": f"{H} No."}, (SYSTEM + ASKED, *PAIR[1:])),
        ({"system": " ", "prompt": "Why?", "chosen": "Because.", "rejected": "No."}, PAIR),
        ({"prompt": "Why?", "chosen": json.dumps([Q, GOOD]), "rejected": json.dumps([Q, BAD])}, PAIR),
    ],
)
def test_where_the_prompt_ends(row, right):
    tokenizer = chatml()
    assert [shown(tokenizer, e) for e in open_example_set([row], tokenizer, "pairs", **LIMITS)] == [right]
    labelled = open_example_set([row], tokenizer, "labelled", **LIMITS)
    if len(row["chosen"]) > 1 or isinstance(row["chosen"], str):
        assert [shown(tokenizer, e)[1] for e in labelled] == [*right[1:]]


@pytest.mark.parametrize(
    ("kind", "row", "right"),
    [
        ("labelled", {"prompt": [Q, OPEN], "completion": " so.", "label": True}, BEGUN[:2]),
        ("chats", {"prompt": [Q, OPEN], "completion": [said("assistant", " so.")]}, BEGUN[:2]),
        ("labelled", {"prompt": H, "completion": f"{H} Because.", "label": 1}, ONE),
        ("chats", {"prompt": "Why?", "completion": f"{H} Because."}, ONE),
        ("chats", {"prompt": H, "completion": " Because.\n\nHuman: Bye."}, ONE),
        ("chats", {"prompt": [HI, Q], "completion": [Q, GOOD]}, (SYSTEM + ASKED, ONE[1])),
        ("labelled", {"messages": [Q, GOOD], "response": "42", "answer": "42", "label": True}, ONE),
        (
            "chats",
            {"instruction": "Why?", "output": "Because.", "system_prompt": "Be brief."},
            (SYSTEM + ASKED, ONE[1]),
        ),
        ("chats", {"conversations": [Q, GOOD], "system": "Be brief."}, (SYSTEM + ASKED, ONE[1])),
        ("chats", {"messages": [HI, Q, GOOD], "system": "Be brief."}, (SYSTEM + ASKED, ONE[1])),
        ("chats", {"messages": json.dumps([Q, GOOD])}, ONE),
        ("chats", {"prompt": "Why?", "completion": '[{"role": "cook"}]'}, (ASKED, f'[[{{"role": "cook"}}]{END}]')),
    ],
)
def test_where_the_answer_begins(kind, row, right):
    tokenizer = chatml()
    assert [shown(tokenizer, e) for e in open_example_set([row], tokenizer, kind, **LIMITS)] == [right]


def test_prompts_begin_with_the_system_column():
    row = {"question": "Why?", "system": "Be brief."}
    assert open_prompts([row], chatml(), max_prompt_length=400)[0].text == SYSTEM + ASKED
    named = open_prompts([row | {"rule": "No."}], chatml(), max_prompt_length=400, columns={"system": "rule"})
    assert named[0].text == f"{START}system\nNo.{END}\n{ASKED}"


@pytest.mark.parametrize(
    ("kind", "row", "said"),
    [
        (
            "pairs",
            {"prompt": "Other", "chosen": [Q, GOOD], "rejected": [Q, BAD]},
            "in chosen and rejected are others than the prompt",
        ),
        (
            "pairs",
            {"prompt": "Be brief. Why?", "chosen": [Q, GOOD], "rejected": [Q, BAD]},
            "are others than the prompt",
        ),
        ("pairs", {"prompt": f"{H} So,", "chosen": f" a{H} b", "rejected": " c"}, "doesn't end with 'Assistant:'"),
        ("pairs", {"prompt": "Why?", "chosen": [MORE], "rejected": [MORE]}, "chosen has no words of the assistant"),
        (
            "pairs",
            {"prompt": "Q: hi\nA:", "chosen": "Q: hi\nA: a", "rejected": "Q: hi\nA: b"},
            "begin with the text of",
        ),
        ("pairs", {"prompt": "Why?", "chosen": f"{H} Because.", "rejected": "No."}, "is a whole dialogue"),
        ("pairs", {"chosen": [Q, OK, GOOD], "rejected": [Q, OK, BAD]}, "two turns of the assistant in a row"),
        ("pairs", {"prompt": [Q], "chosen": [HI, MORE, GOOD], "rejected": [HI, MORE, BAD]}, "another system message"),
        ("pairs", {"prompt": [HI, Q], "system": "No.", "chosen": "a", "rejected": "b"}, "another system message"),
        ("pairs", {"prompt": "q", "chosen": [GOOD | {"weight": 0}], "rejected": [BAD]}, "no turn of the assistant to"),
        ("labelled", {"prompt": "q", "completion": [Q], "label": 1}, "completion has no words of the assistant"),
        ("labelled", {"messages": [Q, OK, GOOD], "label": 1}, "messages ends with two turns of the assistant"),
        ("chats", {"prompt": "q", "completion": [GOOD | {"weight": 0}]}, "no turn of the assistant to train on"),
        ("chats", {"messages": [Q, OK, MORE], "completion": "c"}, "messages doesn't end .* and there is completion"),
        ("chats", {"messages": [Q], "response": "c"}, "messages doesn't end .* and there is response"),
        ("chats", {"messages": str([Q, GOOD])}, "as Python prints them .*: write them as JSON"),
        (
            "chats",
            {"messages": [Q, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "calls a tool and says",
        ),
        ("chats", {"prompt": "q", "system": ["a"], "completion": "c"}, "system is list"),
        (
            "chats",
            {"prompt": "q", "system": "a", "system_prompt": "b", "completion": "c"},
            "system and system_prompt are",
        ),
    ],
)
def test_rows_that_could_mean_two_things_are_refused(tmp_path, kind, row, said):
    path = write(tmp_path, "jsonl", [row])
    with pytest.raises(DataError, match=f"{path}: row 0: .*{said}"):
        open_example_set(path, chatml(), kind, **LIMITS)


def test_columns_say_what_a_chat_with_a_completion_means():
    row, tokenizer = {"messages": [Q, OK, MORE], "completion": "Because."}, chatml()
    for ours, right in (("prompt", TOLD[:2]), ("messages", (ASKED, f"[So.{END}]"))):
        (example,) = open_example_set([row], tokenizer, "chats", columns={ours: "messages"}, **LIMITS)
        assert shown(tokenizer, example) == right


def test_columns_beside_the_prompt_that_are_not_read_are_told_once(caplog):
    rows = [{"instruction": "Why?", "input": "", "context": "c", "tools": [], "output": "So."}] * 2
    with caplog.at_level(logging.WARNING, "verl"):
        for streaming in (False, True):
            open_examples(rows, chatml(), "chats", streaming=streaming, **LIMITS).take(5)
        open_example_set(rows, chatml(), "chats", columns={"input": "context", "calls": "tools"}, **LIMITS)
    assert [r.getMessage() for r in caplog.records] == [
        "the data list: columns that don't go into the prompt: context, tools"
    ] * 2


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("<think>\nhm\n</think>\n\nSo.", "hm\n</think>\n\nSo."),
        ("\n<think>hm</think>So.", "hm</think>So."),
        ("So.", "So."),
    ],
)
@pytest.mark.parametrize("kept", ["", ".split('</think>')[-1]"])
def test_a_thinking_mark_that_opens_the_turn_comes_once(said, right, kept):
    tokenizer = chatml(
        THINKING.replace("m['content'] + '<|im_end|>' }}{% endg", f"m['content']{kept} + '<|im_end|>' }}}}{{% endg")
    )
    rows = [{"prompt": "Why?", "chosen": said, "rejected": "No.", "completion": said}]
    for kind in ("pairs", "chats"):
        (example,) = open_example_set(rows, tokenizer, kind, **LIMITS)
        assert shown(tokenizer, example)[:2] == (f"{ASKED}<think>\n", f"[{right}{END}]")
