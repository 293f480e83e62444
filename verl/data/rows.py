"""Column layouts: how a data set's own columns become ``prompt`` (and ``chosen``, ``rejected``).

Recognised as they are: ``prompt`` or another usual name as text or as messages; ``messages`` whose last assistant
turn is the answer; verl's ``prompt`` with ``reward_model.ground_truth``; Alpaca's ``instruction`` with ``input``;
``chosen``/``rejected`` beside a prompt (TRL, UltraFeedback) or as whole dialogues (hh-rlhf). Others by ``columns``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from verl.config.errors import DataError
from verl.data.chat import ASSISTANT, Message, Turns, as_messages, shared_start

CHATS = ("messages", "conversations", "conversation")  # hold the answer too, as the last assistant turn
PROMPTS = ("prompt", *CHATS, "question", "problem", "instruction", "query", "input")
SHAREGPT = {"human": "user", "gpt": "assistant"}


class Layout:
    """How to read the rows of one data set.

    ``present``: its columns. ``columns``: ``{ours: theirs}``, where ``theirs`` may be dotted (``a.b`` is key ``b`` of
    column ``a``). ``pairs``: every row must have ``chosen`` and ``rejected``. ``where`` names the set in messages.
    Raises DataError, listing the columns there are, when one that is needed is missing.
    """

    def __init__(self, present: Collection[str], columns: Mapping[str, str], where: str, pairs: bool = False) -> None:
        self.columns, self.where = dict(columns), where
        there = f"{where} has the columns {', '.join(sorted(present)) or '(none)'}"
        for ours, theirs in self.columns.items():
            if theirs not in present and theirs.split(".")[0] not in present:
                near = get_close_matches(theirs, list(present), 1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise DataError(f"columns: {{{ours}: {theirs}}} names no column{hint}; {there}")
        names = {*present, *self.columns}
        both = {"chosen", "rejected"} <= names
        if pairs and not both:
            raise DataError(f"a preference data set needs chosen and rejected; {there}; name them with `columns`")
        self.prompt_column = next((name for name in PROMPTS if name in names), None)
        if self.prompt_column is None and not both:
            raise DataError(f"no prompt column; {there}; name it with `columns: {{prompt: ...}}`")
        self.pairs = pairs or self.prompt_column is None

    def read(self, row: Mapping[str, Any], number: int) -> dict[str, Any]:
        """All columns of the row, with ``prompt`` (and with ``pairs`` also ``chosen`` and ``rejected``) in our form.

        ``number`` counts from 0. Raises DataError naming the row when a needed value is missing, empty or no text.
        """
        try:
            fields = dict(row)
            for ours, theirs in self.columns.items():
                fields[ours] = _pick(row, theirs)
            if self.prompt_column is not None:
                fields["prompt"] = self._prompt(fields)
            if self.pairs:
                _read_pair(fields)
            truth = fields.get("reward_model")
            if isinstance(truth, Mapping) and truth.get("ground_truth") is not None:
                fields.setdefault("ground_truth", truth["ground_truth"])
                fields.setdefault("answer", truth["ground_truth"])
            return fields
        except _Bad as problem:
            raise DataError(f"{self.where}, row {number}: {problem}") from None

    def _prompt(self, fields: dict[str, Any]) -> Turns:
        name = self.prompt_column
        assert name is not None
        prompt = _turns(fields.get(name), name)
        if name in CHATS and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            fields.setdefault("response", prompt[-1]["content"])
            prompt = prompt[:-1]
            if not prompt:
                raise _Bad(f"{name} has no turn before the assistant's")
        extra = fields.get("input")
        if name == "instruction" and isinstance(prompt, str) and isinstance(extra, str) and extra.strip():
            prompt = f"{prompt}\n\n{extra}"
        return prompt


class _Bad(Exception):
    """What is wrong with a row; its number is added where it is known."""


def _pick(row: Mapping[str, Any], path: str) -> Any:
    if path in row:
        return row[path]
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _turns(value: Any, name: str) -> Turns:
    """A text that is not blank, or messages with role and content."""
    if value is None:
        raise _Bad(f"{name} is missing")
    if isinstance(value, str):
        if not value.strip():
            raise _Bad(f"{name} is empty")
        return value
    if not isinstance(value, list | tuple):
        raise _Bad(f"{name} is {type(value).__name__} ({value!r:.40}), not text or a list of messages")
    if not value:
        raise _Bad(f"{name} is empty")
    return [_message(m, name) for m in value]


def _message(raw: Any, name: str) -> Message:
    if not isinstance(raw, Mapping):
        raise _Bad(f"{name} holds {type(raw).__name__} ({raw!r:.40}), not messages with role and content")
    message = {key: value for key, value in raw.items() if value is not None}  # Arrow writes absent keys as null
    if "from" in message and "value" in message:
        message = {"role": SHAREGPT.get(message["from"], message["from"]), "content": message["value"]}
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        message["content"] = content = "".join(part["text"] for part in content)
    if not isinstance(message.get("role"), str) or not message["role"] or not isinstance(content, str):
        raise _Bad(f"{name} holds a message without role and text content: {dict(raw)!r:.80}")
    return message


def _read_pair(fields: dict[str, Any]) -> None:
    """Bring ``prompt``, ``chosen`` and ``rejected`` into the form prompt + two completions."""
    chosen, rejected = _turns(fields.get("chosen"), "chosen"), _turns(fields.get("rejected"), "rejected")
    prompt = fields.get("prompt")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise _Bad("one of chosen and rejected is text, the other a list of messages")
    if isinstance(chosen, list) and isinstance(rejected, list):
        shared = 0  # turns of both sides before their last one
        while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
            shared += 1
        lead, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if lead:
            before = as_messages(prompt) if prompt else []
            repeated = isinstance(prompt, str) or lead[: len(before)] == before
            prompt = lead if repeated or not before else before + lead
    elif prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
        common = chosen[: shared_start(chosen, rejected)]
        end = common.rfind(ASSISTANT) + len(ASSISTANT)
        if end < len(ASSISTANT):
            raise _Bad(f"no prompt: chosen and rejected don't share a start that ends with {ASSISTANT.strip()!r}")
        prompt, chosen, rejected = chosen[:end], chosen[end:], rejected[end:]
    if not prompt:
        raise _Bad("no prompt: chosen and rejected share no first turn")
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if not (side if isinstance(side, str) else "".join(m["content"] for m in side)).strip():
            raise _Bad(f"{name} is empty")
    fields.update(prompt=prompt, chosen=chosen, rejected=rejected)
