"""Rendering with and without a template; see also the cases G14 and G15."""

from __future__ import annotations

import pytest

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
