"""Masks of conversations: against the template's own marks, and for templates that make it hard."""

from __future__ import annotations

import pytest

from tests.data.chatml import BOT, END, ENDING, EOT, TEMPLATE, THINKING, USER, chatml, user
from tests.tiny import EOS, f_bpe
from verl.config.errors import DataError
from verl.data.chat import HUMAN
from verl.data.masks import _places, encode_chat, render_chat
from verl.data.pairs import encode_completions


def talk(*turns):
    return [{"role": ("user", "assistant")[i % 2], "content": said} for i, said in enumerate(turns)]


LONG = [{"role": "system", "content": "Be brief."}, *talk("Why?", "Becäuse ☃.", "And?", "\n\nSo.\n", "Bye.", "Bye!")]


@pytest.mark.parametrize("messages", [talk("a", "b"), talk("a", "b", "c"), LONG])
def test_the_templates_own_marks_agree(messages):
    tokenizer = chatml()
    theirs = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    ids, mask, prompt = encode_chat(tokenizer, messages)
    assert ids == theirs["input_ids"][: len(ids)] and not any(theirs["assistant_masks"][len(ids) :])
    assert mask == [bool(m) for m in theirs["assistant_masks"][: len(ids)]] and mask[-1]
    assert prompt.endswith(BOT) and tokenizer(prompt).input_ids == ids[: mask.index(True)]


@pytest.mark.parametrize("template", [None, "plain", "bos"])
@pytest.mark.parametrize("bos_post", [False, True])
@pytest.mark.parametrize("turns", [("xa", "b"), ("xa", "cb"), ("xab", "ab")])
def test_one_turn_is_what_a_prompt_with_a_completion_is(turns, bos_post, template):
    tokenizer = f_bpe(bos_post=bos_post, template=template)
    ids, mask, _ = encode_chat(tokenizer, talk(*turns))
    prompt, said = encode_completions(tokenizer, turns[0], [turns[1]])
    assert (ids, mask) == (prompt + said, [False] * len(prompt) + [True] * len(said))


def test_a_token_over_the_start_of_a_turn_belongs_to_it_and_one_over_its_end_does_not():
    template = (
        "{% for m in messages %}{{ '|' + m['role'][0] + '\\n' + m['content'] + 'x' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '|a\\n' }}{% endif %}"
    )
    tokenizer = chatml(template, merges=(("Ċ", "b"), ("x", "|")))
    ids, mask, _ = encode_chat(tokenizer, talk("u", "bb", "u", "b"))
    tokens = [tokenizer.decode([i]) for i in ids]
    assert tokens == [*"|u\nu", "x|", "a", "\nb", "b", "x|", *"u\nu", "x|", "a", "\nb", "x", END]
    assert [t for t, m in zip(tokens, mask, strict=True) if m] == ["\nb", "b", "\nb", "x", END]


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_a_tokenizer_without_offsets_gives_the_same(template):
    fast = chatml(template, merges=(("Ċ", "S"), ("Ġ", "S"), (".", "Ċ")))
    turns = ("Why?", "So.", "And?\n", "\nSo.")

    class Slow:
        def __call__(self, *args, **how):
            assert "return_offsets_mapping" not in how
            return fast(*args, **how)

    text, spans = render_chat(fast, talk(*turns))
    ids, places = _places(fast, text, spans)
    assert _places(Slow(), text, spans) == (ids, places) and len(places) == 2
    assert all(start < end for start, end in places)


def test_without_a_template_turns_are_marked():
    tokenizer = chatml(template=None)
    ids, mask, prompt = encode_chat(tokenizer, talk("Why?", "So.", "And?", "Yes."))
    trained = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert (trained, prompt) == (f" So. Yes.{END}", f"{HUMAN} Why?\n\nAssistant:")


def test_an_open_turn_that_is_written_otherwise_than_a_finished_one():
    tokenizer = chatml(template=TEMPLATE.replace("assistant\\n' }}{% endif", "assistant\\n<think>' }}{% endif"))
    assert tokenizer.chat_template != TEMPLATE
    ids, mask, prompt = encode_chat(tokenizer, talk("Why?", "So.", "And?", "Yes."))
    assert prompt == user("Why?") + BOT
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == f"So.{END}Yes.{END}"


def test_a_template_that_rewrites_earlier_turns_is_refused():
    tokenizer = chatml(
        template="{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
        "{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% else %}(cut){% endif %}{{ '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    assert sum(encode_chat(tokenizer, talk("Why?", "So."))[1]) == 4
    with pytest.raises(DataError, match="before turn 2 otherwise once more turns follow: split the conversation"):
        encode_chat(tokenizer, talk("Why?", "So.", "And?", "Yes."))


def test_a_template_that_drops_the_words_is_refused():
    tokenizer = chatml(
        template="{% for m in messages %}{{ m['role'] }}{% endfor %}{% if add_generation_prompt %}{{ '!' }}{% endif %}"
    )
    with pytest.raises(DataError, match="doesn't write the words of turn 2"):
        encode_chat(tokenizer, talk("Why?", "So."))


def test_user_words_that_look_like_headers_are_not_trained():
    tokenizer = chatml()
    ids, mask, _ = encode_chat(tokenizer, talk("say: " + USER, "So.", BOT + "No.", "Yes."))
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == f"So.{END}Yes.{END}"


def test_the_end_is_trained_and_added_where_the_template_has_none():
    ids, mask, _ = encode_chat(f_bpe(template="plain"), talk("xa", "b"))
    assert ids[-1] == EOS and mask[-1] and ids.count(EOS) == 1


INST = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}"
    "{% else %}{{ '[INST] ' + m['content'].strip() + ' [/INST]' }}{% endif %}{% endfor %}"
)
MODEL = (
    "{% for m in messages %}{{ '<|im_start|>' + ('model' if m['role'] == 'assistant' else 'user') + '\\n' }}"
    "{{ m['content'] | trim }}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "eos", "trained"),
    [
        (INST, END, [f" So. {END}", f" Yes. {END}"]),  # no header: the answer begins where the question ends
        (MODEL, EOT, [f"So.{END}", f"Yes.{END}{EOT}"]),  # turns end with a token of their own
    ],
)
def test_templates_of_other_families(template, eos, trained):
    tokenizer = chatml(template, eos=eos)
    ids, mask, _ = encode_chat(tokenizer, talk("Why?", " So.", "And?", "Yes. "))
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "".join(trained)
    assert tokenizer.decode(ids).replace(EOT, "") in tokenizer.apply_chat_template(
        talk("Why?", " So.", "And?", "Yes. "), tokenize=False
    )


def trained(tokenizer, messages, *before):
    """The prompt, and what is trained, as text."""
    ids, mask, prompt = encode_chat(tokenizer, messages, *before)
    return prompt, tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])


@pytest.mark.parametrize("answer", ["a", "s", "assistant", "st", "<", "<b>", ">", "So.", ""])
def test_words_that_the_header_has_too(answer):
    tokenizer = chatml(THINKING)
    assert trained(tokenizer, talk("Why?", answer, "And?", "Yes.")) == (user("Why?") + BOT, f"{answer}{END}Yes.{END}")


def test_words_that_the_template_writes_only_in_part_are_refused():
    tokenizer = chatml(
        THINKING.replace("m['content'] + '<|im_end|>' }}{% endg", "m['content'][1:] + '<|im_end|>' }}{% endg")
    )
    for said in ("So.", "SSo.", "oo"):
        with pytest.raises(DataError, match="doesn't write the words of turn 2"):
            encode_chat(tokenizer, talk("Why?", said))


def test_the_end_of_a_turn_that_swallows_white_space_is_trained():
    tokenizer = chatml(swallow=True, eos=EOT)
    ids, mask, _ = encode_chat(tokenizer, talk("Why?", "So.", "And?", "Yes."))
    end = tokenizer.convert_tokens_to_ids(END)
    assert ids.count(end) == 4 and [m for i, m in zip(ids, mask, strict=True) if i == end] == [False, True] * 2
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == f"So.{END}Yes.{END}{EOT}"


def test_a_template_that_ends_only_the_whole_with_the_end_of_sequence():
    tokenizer = chatml(ENDING, eos=EOT)
    assert trained(tokenizer, talk("Why?", "So.")) == (user("Why?") + BOT, f"So.{END}\n{EOT}")
    assert trained(tokenizer, talk("Why?", "So.", "And?", "Yes."))[1] == f"So.{END}Yes.{END}\n{EOT}"


@pytest.mark.parametrize("template", [TEMPLATE, THINKING, ENDING, None])
def test_what_the_prompt_begins_is_not_trained(template):
    tokenizer = chatml(template)
    before, more = talk("Why?", "The "), [*talk("", "sky.", "And?", "Yes.")[1:]]
    prompt, said = trained(tokenizer, more, before)
    assert prompt.endswith("The ") and said.replace(END, "").strip() == ("sky.Yes." if template else "sky. Yes.")
