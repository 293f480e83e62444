"""G15: exactly one BOS, whoever writes it: the template, the tokenizer, both or none."""

from __future__ import annotations

import pytest

from tests.tiny import f_bpe
from verl.data.chat import render
from verl.data.loader import PromptDataset, open_example_set

TURN = [8, 11, 3, 4, 12, 4, 11]  # u : x a newline a :


@pytest.mark.parametrize(
    ("bos_post", "template", "right"),
    [
        (True, "bos", [1, *TURN]),
        (False, "bos", [1, *TURN]),
        (True, "plain", [1, *TURN]),
        (False, "plain", TURN),
        (True, None, [1, 3, 4]),
        (False, None, [3, 4]),
    ],
)
def test_one_leading_bos(bos_post, template, right):
    tokenizer = f_bpe(bos_post=bos_post, template=template)
    text, ids = render(tokenizer, "xa")
    assert ids == right
    assert render(tokenizer, [{"role": "user", "content": "xa"}]) == (text, ids)
    prompt = PromptDataset(["xa"]).prompts(tokenizer, max_prompt_length=16)[0]
    assert (prompt.ids, prompt.text) == (tuple(right), text)  # what rollout, scoring and rewards get
    assert text.count("\na:") == (template is not None)  # the generation header, once


def test_a_plain_prompt_that_says_bos_itself_gets_no_second_one():
    assert render(f_bpe(bos_post=True), "<bos>xa")[1] == [1, 3, 4]


def test_an_answer_begun_by_the_assistant_is_continued_without_a_new_header():
    turns = [{"role": "user", "content": "xa"}, {"role": "assistant", "content": "b"}]
    assert render(f_bpe(template="bos"), turns)[0] == "<bos>u:xa\na:b"


@pytest.mark.parametrize("template", ["bos", None])
@pytest.mark.parametrize("kind", ["pairs", "labelled", "chats"])
def test_offline_rows_continue_it_as_rollouts_do(kind, template):
    turns = [{"role": "user", "content": "xa"}, {"role": "assistant", "content": "b"}]
    row = {"prompt": turns, "chosen": "c", "rejected": "x", "completion": "c", "label": 1}
    tokenizer = f_bpe(template=template)
    limits = {"max_prompt_length": 64, "max_response_length": 64}
    example = open_example_set([row], tokenizer, kind, **limits)[0]
    assert list(example.prompt_ids) == render(tokenizer, turns)[1] and example.completions[0].text.strip() == "c"
    assert all(example.completions[0].mask)
