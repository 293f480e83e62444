"""Rendering with and without a template; see also the cases G14 and G15."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.data.chatml import BOT, END, chatml, user
from tests.tiny import f_bpe
from verl.config.errors import DataError
from verl.data import chat

HH = "\n\nHuman: xa\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
TURNS = [{"role": r, "content": c} for r, c in (("user", "xa"), ("assistant", "b"), ("user", "c"))]


def test_a_dialogue_becomes_turns_with_a_template_and_stays_text_without():
    assert chat.render_text(f_bpe(template="plain"), HH) == "u:xa\na:b\nu:c\na:"
    assert chat.render_text(f_bpe(), HH) == HH


def test_turns_without_a_template_are_joined_plainly():
    assert chat.render_text(f_bpe(), [{"role": "system", "content": "s"}, TURNS[0]]) == "s\n\nxa"
    assert chat.render_text(f_bpe(), TURNS) == HH


def test_completion_ends_at_the_end_of_sequence_token():
    tokenizer = f_bpe()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '<eos>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
    )
    assert chat.render_completion(tokenizer, "xa", "b") == "b<eos>"
    assert chat.render_completion(tokenizer, HH, " b") == "b<eos>"


def test_a_template_that_writes_finished_turns_otherwise():
    tokenizer = f_bpe()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a:t' }}{% endif %}"
    )
    assert chat.render_completion(tokenizer, "xa", "b") == "b"


def test_a_template_that_refuses_names_the_turns():
    tokenizer = f_bpe()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"refuses the turns \(user\): roles must alternate"):
        chat.render(tokenizer, "xa")


def test_notes_for_a_base_model():
    assert chat.notes(f_bpe(template="plain")) == []
    said = chat.notes(f_bpe(pad=None))
    assert len(said) == 2 and "no chat template" in said[0] and "no pad token" in said[1]


def test_fingerprint_covers_what_changes_ids():
    first = chat.fingerprint(f_bpe())
    again = f_bpe()
    again(["xa", "x"], padding=True)  # leaves its mark in the backend, not in the ids
    assert chat.fingerprint(again) == first
    others = [f_bpe(bos_post=True), f_bpe(template="plain"), f_bpe(template="bos")]
    assert len({first, *map(chat.fingerprint, others)}) == 4


# -- what stands between two turns of the assistant ------------------------------------------------------------------

ASKED, SAID, NEXT = ({"role": r, "content": c} for r, c in (("user", "xa"), ("assistant", "b"), ("user", "c")))


def test_what_follows_a_turn_by_hand():
    """The whole text is ``u:xa/a:b/u:c/a:`` (a slash for each newline)."""
    tokenizer = f_bpe(template="plain")
    after = [12, 8, 11, 6, 12, 4, 11]
    assert chat.follow(tokenizer, [ASKED, SAID], [NEXT], [5]) == after
    assert chat.follow(tokenizer, [ASKED, SAID], [NEXT], [5, 2]) == after  # its end is not the template's
    assert chat.follow(tokenizer, [ASKED, SAID], [NEXT], [5, 12]) == after[1:]  # a stop text that is
    two = [{"role": "tool", "content": "c"}, {"role": "system", "content": "x"}]
    assert chat.follow(f_bpe(template="bos"), [ASKED, SAID], two, [5]) == [12, 10, 11, 6, 12, 9, 11, 3, 12, 4, 11]


@pytest.mark.parametrize("words", ["b", "", "ab\n", "the number is 7"])
@pytest.mark.parametrize("ended", [True, False])
def test_what_was_said_and_what_follows_are_the_whole(words, ended):
    """As if the conversation had been written at once, whether the policy ended its turn itself or a stop text did."""
    tokenizer = chatml(merges=(("a", "b"), ("c", "d")))
    messages = [ASKED, SAID | {"content": words}]
    said = tokenizer(words + END * ended)["input_ids"]
    whole = chat.render(tokenizer, [*messages, NEXT])[1]
    start = chat.render(tokenizer, [ASKED])[1]
    assert start + said + chat.follow(tokenizer, messages, [NEXT], said) == whole


def test_a_template_that_forgets_thoughts():
    """It leaves out earlier thoughts, and writes an empty one before an answer: what follows is not touched by it."""
    tokenizer = chatml(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
        "{{ m['content'].split('</think>')[-1] + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think></think>' }}{% endif %}"
    )
    said = tokenizer(f"<think>a long one</think>b{END}")["input_ids"]
    messages = [ASKED, SAID | {"content": "<think>a long one</think>b"}]
    ids = chat.follow(tokenizer, messages, [NEXT], said)
    assert tokenizer.decode(ids) == f"\n{user('c')}{BOT}<think></think>"


def test_no_space_comes_in_where_a_text_begins_with_one():
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(["</s>", "▁", "a", "b", ":", "u"])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + eos_token }}{% endfor %}"
    said = [3, 0]
    assert tokenizer("b</s>")["input_ids"] == [1, *said]
    assert chat.follow(tokenizer, [ASKED | {"content": "a"}, SAID], [NEXT | {"content": "a"}], said) == [5, 4, 2, 0]


def test_a_template_that_refuses_or_forgets_what_was_said():
    tokenizer = f_bpe(template="plain")
    tokenizer.chat_template = "{% if messages|length > 2 %}{{ raise_exception('one turn') }}{% endif %}"
    with pytest.raises(DataError, match="refuses the turns"):
        chat.follow(tokenizer, [ASKED, SAID], [NEXT], [5])
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(DataError, match="doesn't write"):
        chat.follow(tokenizer, [ASKED, SAID], [NEXT], [5])


def test_words_keep_special_tokens_but_the_last():
    tokenizer = f_bpe()
    assert chat.words_of(tokenizer, [7, 1, 6, 2]) == "ab<bos>c"
    assert chat.words_of(tokenizer, [7, 6]) == "abc" and chat.words_of(tokenizer, []) == ""
