"""Which tokens of a conversation the assistant said: for any chat template, by rendering it turn by turn."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl.config.errors import DataError
from verl.data import chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.data.chat import Message

Span = tuple[int, int]


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[list[int], list[bool], str]:
    """``(ids, mask, prompt)`` of a conversation up to the end of the assistant's last turn.

    ``mask`` is True on the assistant's tokens and on those that end its turns, False on headers and on all others';
    ``prompt`` is the text before the first of them. An assistant message with ``weight: 0`` is not trained. A token
    that reaches over the start of a turn belongs to it, one that reaches over its end does not. After the last turn
    comes an end-of-sequence token, unless the text has it.
    """
    text, spans = render_chat(tokenizer, messages)
    if not spans:
        raise DataError("no turn of the assistant to train on")
    text = text[: spans[-1][1]]
    ids, places = _places(tokenizer, text, spans)
    mask = [False] * len(ids)
    for first, past in places:
        mask[first:past] = [True] * (past - first)
    eos = tokenizer.eos_token_id
    if eos is not None and ids[-1] != eos:
        ids, mask = [*ids, eos], [*mask, True]
    return ids, mask, text[: spans[0][0]]


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[str, list[Span]]:
    """The conversation's text, and where in it each trained turn of the assistant is, its end included, in characters.

    DataError where the template writes earlier turns otherwise once more follow: then no prefix of the text is what
    the policy reads when it speaks.
    """
    if not chat.has_template(tokenizer):
        return _marked(messages)
    whole = _render(tokenizer, messages)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("weight") == 0:
            continue
        closed, after = _render(tokenizer, messages[:i]), _render(tokenizer, messages[: i + 1])
        if not (after.startswith(closed) and whole.startswith(after)):
            raise DataError(
                f"the chat template writes the turns before turn {i + 1} otherwise once more turns follow: split the "
                "conversation into rows that end with one turn of the assistant each, as prompt and completion"
            )
        opened = _render(tokenizer, messages[:i], add_generation_prompt=True)
        # Some templates open a turn otherwise than they write a finished one (a thinking header): the words decide.
        start = len(opened) if after.startswith(opened) else after.find(message["content"].strip(), len(closed))
        if start < 0:
            raise DataError(f"the chat template doesn't write the words of turn {i + 1} as they are")
        spans.append((start, start + chat.turn_end(tokenizer, after[start:])))
    return whole, spans


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **how: Any) -> str:
    return chat.apply_template(tokenizer, list(messages), **how)


def _marked(messages: Sequence[Message]) -> tuple[str, list[Span]]:
    """Without a template: the plain form of a dialogue; with one answer at the end, the prompt has no marks."""
    *before, last = messages
    if last["role"] == "assistant" and all(m["role"] != "assistant" for m in before):
        start = chat.render_plain(before)
        return start + last["content"], [(len(start), len(start) + len(last["content"]))]
    text, spans = "", []
    for message in messages:
        text += chat.MARKS.get(message["role"], "")
        end = len(text) + 1 + len(message["content"])
        if message["role"] == "assistant" and message.get("weight") != 0:
            spans.append((len(text), end))
        text += f" {message['content']}" if message["role"] in chat.MARKS else message["content"]
    return text, spans


def _places(tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[Span]) -> tuple[list[int], list[Span]]:
    """The text's ids, and for each span its first token and the one after its last."""
    if not getattr(tokenizer, "is_fast", False):
        (ids,) = chat.encode(tokenizer, [text])

        # No offsets: the ids of the text up to a character go apart from the whole's where a token reaches over it.
        def place(character: int) -> int:
            return chat.shared_start(chat.encode(tokenizer, [text[:character]])[0], ids)

        return ids, [(place(start), place(stop)) for start, stop in spans]
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, ends = whole["input_ids"], [end for _, end in whole["offset_mapping"]]
    lead = chat.leading_specials(tokenizer)
    extra = 0 if ids[: len(lead)] == lead else len(lead)
    return lead[:extra] + ids, [
        (extra + bisect_right(ends, start), extra + bisect_right(ends, stop)) for start, stop in spans
    ]
