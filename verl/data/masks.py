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


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], before: Sequence[Message] = ()
) -> tuple[list[int], list[bool], str]:
    """``(ids, mask, prompt)`` of a conversation up to the end of the assistant's last turn.

    ``before`` come first and aren't trained; a last one of the assistant's goes on in ``messages``. ``mask`` is True on
    the assistant's tokens and on those that end its turns, False on headers and on all others'; ``prompt`` is the text
    before the first of them. An assistant message with ``weight: 0`` is not trained. A token that reaches over the
    start of a turn belongs to it, one that reaches over its end does not, but white space that a special token
    swallows doesn't count. After the last turn comes an end-of-sequence token, unless the text has it.
    """
    text, spans = render_chat(tokenizer, messages, before)
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


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], before: Sequence[Message] = ()
) -> tuple[str, list[Span]]:
    """The conversation's text, and where in it each trained turn of the assistant is, its end included, in characters.

    DataError where the template writes earlier turns otherwise once more follow: then no prefix of the text is what
    the policy reads when it speaks.
    """
    if not chat.has_template(tokenizer):
        return _marked(messages, before)
    turns = chat.join(list(before), messages)
    first = len(turns) - len(messages)
    whole = _render(tokenizer, turns)
    spans = []
    for i, message in enumerate(turns):
        if i < first or message["role"] != "assistant" or message.get("weight") == 0:
            continue
        after = _lasting(tokenizer, _render(tokenizer, turns[: i + 1]), whole)
        if i == first and before:
            opened = chat.render_text(tokenizer, list(before))
        else:
            opened = _render(tokenizer, turns[:i], add_generation_prompt=True)
        closed = "" if after.startswith(opened) else _lasting(tokenizer, _render(tokenizer, turns[:i]), after)
        if not (after.startswith(closed) and whole.startswith(after)):
            raise DataError(
                f"the chat template writes the turns before turn {i + 1} otherwise once more turns follow: split the "
                "conversation into rows that end with one turn of the assistant each, as prompt and completion"
            )
        said = messages[i - first]["content"]
        begun = message["content"].removesuffix(said)
        start = len(opened) if after.startswith(opened) else _words(tokenizer, turns[:i], message, begun, after, closed)
        if start < 0:
            raise DataError(f"the chat template doesn't write the words of turn {i + 1} as they are")
        spans.append((start, start + chat.turn_end(tokenizer, after[start:])))
    return whole, spans


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **how: Any) -> str:
    return chat.apply_template(tokenizer, list(messages), **how)


def _lasting(tokenizer: PreTrainedTokenizerBase, text: str, whole: str) -> str:
    """The text of the first turns, without an end-of-sequence token that only the whole ends with."""
    eos, bare = tokenizer.eos_token, text.rstrip()
    return bare.removesuffix(eos) if eos and bare.endswith(eos) and not whole.startswith(text) else text


def _words(
    tokenizer: PreTrainedTokenizerBase, asked: Sequence[Message], message: Message, begun: str, after: str, closed: str
) -> int:
    """Where in ``after`` the words of its last message begin, those it was ``begun`` with left off; -1: not found.

    For templates that open a turn otherwise than they write a finished one (a thinking header).
    """
    words = message["content"].removeprefix(begun).strip()
    held = _render(tokenizer, [*asked, message | {"content": begun + chat.STAND_IN}])
    header, found, _ = held.rpartition(chat.STAND_IN)
    if found and after.startswith(header):
        start = after.find(words, len(header))
        return start if not after[len(header) : start].strip() else -1
    return after.find(words, len(closed)) if after.count(words, len(closed)) == 1 else -1


def _marked(messages: Sequence[Message], before: Sequence[Message]) -> tuple[str, list[Span]]:
    """Without a template: the plain form of a dialogue; with one answer at the end, a chat's prompt has no marks."""
    turns = chat.join(list(before), messages)
    *asked, last = turns
    if not before and last["role"] == "assistant" and all(m["role"] != "assistant" for m in asked):
        prompt = chat.render_plain(asked)
        whole = prompt + last["content"]
        return whole, [(len(prompt), len(whole))] if last.get("weight") != 0 else []
    text, spans, first = "", [], len(turns) - len(messages)
    for i, message in enumerate(turns):
        text += chat.MARKS.get(message["role"], "")
        start, end = len(text), len(text) + 1 + len(message["content"])
        if i >= first and message["role"] == "assistant" and message.get("weight") != 0:
            said = messages[i - first]["content"]
            spans.append((start if said == message["content"] else end - len(said), end))
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
    ids, special = whole["input_ids"], {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = [  # a token that ends a turn may swallow the white space after it
        start + len(text[start:end].rstrip()) if id in special else end
        for id, (start, end) in zip(ids, whole["offset_mapping"], strict=True)
    ]
    lead = chat.leading_specials(tokenizer)
    extra = 0 if ids[: len(lead)] == lead else len(lead)
    return lead[:extra] + ids, [
        (extra + bisect_right(ends, start), extra + bisect_right(ends, stop)) for start, stop in spans
    ]
