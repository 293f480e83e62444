"""Prompt to text to token ids: the one place that decides templates, BOS and headers.

A chat template owns the special tokens it writes, so rendered text is tokenised without adding any; only what the
tokenizer would put in front by itself (usually BOS) and the template did not write is prepended, once. Data set,
rollout, scoring and reward model all use these ids.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl.config.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Turns = str | list[Message]

# The plain text form of a dialogue, as in hh-rlhf: a prompt ends with the open assistant mark.
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
MARKS = {"user": HUMAN, "assistant": ASSISTANT}
STAND_IN = "[what the assistant said stands here]"
_TURN = re.compile(r"\n\n(Human|Assistant):")


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def notes(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What a user should know about an unusual tokenizer, one sentence each; nothing here stops a run."""
    said = []
    if not has_template(tokenizer):
        said.append("the tokenizer has no chat template: prompts are used as plain text, turns joined by blank lines")
    if tokenizer.pad_token_id is None:
        said.append("the tokenizer has no pad token: none is needed, masks come from lengths")
    if tokenizer.eos_token_id is None:
        said.append("the tokenizer has no end-of-sequence token: responses end by the model's own setting or by length")
    return said


def render(tokenizer: PreTrainedTokenizerBase, prompt: Turns) -> tuple[str, list[int]]:
    """``(text, ids)`` of a prompt (text, or messages), up to where the response begins."""
    text = render_text(tokenizer, prompt)
    return text, encode(tokenizer, [text])[0]


def render_text(tokenizer: PreTrainedTokenizerBase, prompt: Turns) -> str:
    """The prompt as the policy reads it, generation header included.

    With a chat template, a text is one user turn (a text in the plain form of a dialogue: its turns), and a final
    assistant message is one that the policy continues. Without a template, a text stays as it is.
    """
    if not has_template(tokenizer):
        return prompt if isinstance(prompt, str) else render_plain(prompt)
    messages = _asked(prompt)
    if messages[-1]["role"] == "assistant":
        return apply_template(tokenizer, messages, continue_final_message=True)
    return apply_template(tokenizer, messages, add_generation_prompt=True)


def render_completion(tokenizer: PreTrainedTokenizerBase, prompt: Turns, completion: Turns) -> str:
    """The text that follows ``render_text(prompt)`` when the assistant says ``completion``.

    A final assistant message of the prompt goes on in it, see ``join``. Text that a template writes after the
    end-of-sequence token is left off: the policy never generates it.
    """
    if not has_template(tokenizer):
        if isinstance(completion, str):
            return completion
        return completion[0]["content"] if len(completion) == 1 else render_plain(completion)
    if isinstance(completion, str):
        # The plain form of a dialogue has a space after the mark; a template brings its own spacing.
        completion = [{"role": "assistant", "content": completion.lstrip() if is_dialogue(prompt) else completion}]
    start = render_text(tokenizer, prompt)
    whole = apply_template(tokenizer, join(prompt, completion))
    # Some templates write a finished turn otherwise than an open one (a thinking header): then the words decide.
    if whole.startswith(start):
        text = whole[len(start) :]
    else:
        text = _after_mark(tokenizer, prompt, start, completion[-1]["content"])
    return text[: turn_end(tokenizer, text)]


def _after_mark(tokenizer: PreTrainedTokenizerBase, prompt: Turns, start: str, words: str) -> str:
    """The words without the mark with which the template opens a turn, a thinking mark, say: ``start`` has it."""
    finished = apply_template(tokenizer, join(prompt, [{"role": "assistant", "content": STAND_IN}]))
    header, found, _ = finished.rpartition(STAND_IN)
    opened = start[len(header) :] if found and start.startswith(header) else ""
    mark, space = opened.strip(), opened[len(opened.rstrip()) :]
    if not mark or not words.lstrip().startswith(mark):
        return words
    return words.lstrip().removeprefix(mark).removeprefix(space)


def turn_end(tokenizer: PreTrainedTokenizerBase, said: str) -> int:
    """Where a turn's text ends: after its end-of-sequence token, else after a special token that only space follows."""
    eos = tokenizer.eos_token
    if eos and eos in said:
        return said.rindex(eos) + len(eos)
    bare = said.rstrip()
    special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return len(bare) if any(bare.endswith(token) for token in special) else len(said)


def follow(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], new: Sequence[Message], said: Sequence[int]
) -> list[int]:
    """The ids between the assistant's last message and its next one, when ``new`` are said in between.

    ``messages`` end with the assistant's, which was sampled as ``said``: these ids stay as they are, so what the
    template writes after them is tokenised alone, without the start of it (the end of the turn) that ``said`` has.
    """
    # Templates may write the words of earlier turns otherwise (without their thoughts): others stand for them here.
    held = [*messages[:-1], messages[-1] | {"content": STAND_IN}, *new]
    _, found, text = apply_template(tokenizer, held, add_generation_prompt=True).rpartition(STAND_IN)
    if not found:
        raise DataError("the chat template doesn't write the assistant's message before the new ones")
    # After a special token, as in the whole, a tokenizer that begins a text with a space doesn't do so.
    lead = [tokenizer.eos_token_id] if tokenizer.eos_token else []
    ids: list[int] = tokenizer((tokenizer.eos_token or "") + text, add_special_tokens=False, verbose=False)["input_ids"]
    ids = ids[len(lead) :] if ids[: len(lead)] == lead else tokenizer(text, add_special_tokens=False)["input_ids"]
    shared = next((n for n in range(min(len(ids), len(said)), 0, -1) if ids[:n] == list(said[-n:])), 0)
    return ids[shared:]


def words_of(tokenizer: PreTrainedTokenizerBase, said: Sequence[int]) -> str:
    """What the assistant said, as a message's content: special tokens are told, but the one that ends the turn."""
    last = tokenizer.added_tokens_decoder.get(said[-1]) if said else None
    ids = list(said[:-1] if last is not None and last.special else said)
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of rendered texts: the tokenizer's leading special tokens exactly once, no trailing ones."""
    if not texts:
        return []
    rows = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    lead = leading_specials(tokenizer)
    return [ids if ids[: len(lead)] == lead else lead + ids for ids in rows]


def leading_specials(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer puts before a text by itself, e.g. ``[bos]``."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    raise DataError(f"{type(tokenizer).__name__} tokenises a text otherwise when it adds special tokens")


def header_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids with which the template opens the assistant's turn; empty without a template."""
    if not has_template(tokenizer):
        return []
    turn = [{"role": "user", "content": "a"}]
    closed, opened = apply_template(tokenizer, turn), apply_template(tokenizer, turn, add_generation_prompt=True)
    header = opened[shared_start(closed, opened) :]
    return tokenizer(header, add_special_tokens=False)["input_ids"]


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Changes when the same prompt could become other ids: vocabulary, merges, special tokens, template."""
    if getattr(tokenizer, "is_fast", False):
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state.pop("padding", None), state.pop("truncation", None)  # of the latest call, not of the tokenizer
    else:
        state = tokenizer.get_vocab()
    parts = [state, tokenizer.chat_template, leading_specials(tokenizer), tokenizer.eos_token]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def shared_start(*rows: Any) -> int:
    """How many first items (characters, ids) are the same in all rows."""
    first, last = min(rows), max(rows)  # what these two share, all that sort between them share
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def as_messages(prompt: Turns) -> list[Message]:
    """Messages of a prompt; a text is one user turn, or the turns it holds in the plain form of a dialogue."""
    if not isinstance(prompt, str):
        return prompt
    return dialogue(prompt)[:-1] if is_dialogue(prompt) else [{"role": "user", "content": prompt}]


def join(prompt: Turns, said: Sequence[Message]) -> list[Message]:
    """The prompt's messages and those that follow; a last one of the assistant's goes on in the first of these."""
    before = _asked(prompt)
    if not said or not before or {before[-1]["role"], said[0]["role"]} != {"assistant"}:
        return [*before, *said]
    kept = {key: value for key, value in before[-1].items() if key != "weight"}
    return [*before[:-1], kept | said[0] | {"content": before[-1]["content"] + said[0]["content"]}, *said[1:]]


def _asked(prompt: Turns) -> list[Message]:
    """The prompt's messages; an empty last one of the assistant's only says that its turn begins."""
    messages = as_messages(prompt)
    empty = len(messages) > 1 and messages[-1]["role"] == "assistant" and not messages[-1]["content"].strip()
    return messages[:-1] if empty else messages


def is_dialogue(prompt: Turns) -> bool:
    """Whether it is a text in the plain form that leaves the assistant's turn open."""
    if not isinstance(prompt, str) or not prompt.startswith(HUMAN):
        return False
    *asked, last = dialogue(prompt)
    return bool(asked) and last == {"role": "assistant", "content": ""}


def dialogue(text: str) -> list[Message]:
    """The turns that a text holds in the plain form; what it says before them is a system message."""
    lead, *pieces = _TURN.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    said = [{"role": roles[mark], "content": words.strip()} for mark, words in turns]
    return [{"role": "system", "content": lead.strip()}, *said] if lead.strip() else said


def render_plain(messages: Sequence[Message]) -> str:
    """Messages without a template: contents joined by blank lines, or, where the assistant spoke, marked turns."""
    if all(m["role"] != "assistant" for m in messages):
        return "\n\n".join(m["content"] for m in messages)
    text = "".join(f"{MARKS[m['role']]} {m['content']}" if m["role"] in MARKS else m["content"] for m in messages)
    return text if messages[-1]["role"] == "assistant" else text + ASSISTANT


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: list[Message], **how: Any) -> str:
    """The template's text; DataError where it refuses the turns."""
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **how))
    except TemplateError as error:
        roles = ", ".join(m["role"] for m in messages)
        raise DataError(f"the chat template refuses the turns ({roles}): {error}") from error
