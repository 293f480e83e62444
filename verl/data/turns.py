"""What a column says as turns, and where a prompt ends that answers repeat or go on with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.data.chat import ASSISTANT, HUMAN, Message, Turns, as_messages, dialogue, is_dialogue

SHAREGPT = {"human": "user", "gpt": "assistant"}
ROLES = ("system", "developer", "user", "assistant", "tool", "function", *SHAREGPT)
FEW_WORDS = 5  # an answer may well begin with a prompt that has fewer: "Hello", say
_PYTHON_LIST = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)'\s*:.*'(role|content|from|value)'\s*:", re.DOTALL)
_MARK = re.compile(r"<[^<>]*>|\[/?\w+\]|\b(?:human|user|assistant|system|question|answer|q|a)\b|\W|_", re.IGNORECASE)


class BadRow(Exception):
    """What is wrong with a row; its number is added where it is known."""


def turns_of(value: Any, name: str) -> Turns:
    """A text that is not blank, or messages with role and content, also as JSON in a text."""
    if value is None:
        raise BadRow(f"{name} is missing")
    if isinstance(value, str):
        if not value.strip():
            raise BadRow(f"{name} is empty")
        if _PYTHON_LIST.match(value):
            raise BadRow(f"{name} is a text of messages as Python prints them ({value!r:.40}): write them as JSON")
        value = _listed(value)
        if isinstance(value, str):
            return value
    if not isinstance(value, list | tuple):
        raise BadRow(f"{name} is {type(value).__name__} ({value!r:.40}), not text or a list of messages")
    if not value:
        raise BadRow(f"{name} is empty")
    return [_message(m, name) for m in value]


def _listed(text: str) -> Any:
    """The messages that a text holds as JSON, as exports to tables write them; else the text."""
    if not text.lstrip().startswith("["):
        return text
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_message = [
        isinstance(m, dict) and str(m.get("role", m.get("from"))) in ROLES and ("content" in m or "value" in m)
        for m in found
    ]
    return found if is_message and all(is_message) else text


def _message(raw: Any, name: str) -> Message:
    if not isinstance(raw, Mapping):
        raise BadRow(f"{name} holds {type(raw).__name__} ({raw!r:.40}), not messages with role and content")
    message = {key: value for key, value in raw.items() if value is not None}  # Arrow writes absent keys as null
    if "from" in message and "value" in message:
        said_by = message["from"]
        message = {"role": SHAREGPT.get(said_by, said_by) if isinstance(said_by, str) else None,
                   "content": message["value"]}  # fmt: skip
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        message["content"] = content = "".join(part["text"] for part in content)
    if content is None and ("tool_calls" in message or "function_call" in message):
        raise BadRow(f"{name} holds a message that calls a tool and says nothing; tool calls are not trained")
    if not isinstance(message.get("role"), str) or not message["role"] or not isinstance(content, str):
        raise BadRow(f"{name} holds a message without role and text content: {dict(raw)!r:.80}")
    return message


def alike(some: Sequence[Message], others: Sequence[Message]) -> bool:
    """Whether the same roles say the same words; white space doesn't count."""
    return [(m["role"], _bare(m["content"])) for m in some] == [(m["role"], _bare(m["content"])) for m in others]


def _bare(text: str) -> str:
    return " ".join(text.split())


def says_something(messages: Sequence[Message]) -> bool:
    return any(m["role"] == "assistant" and m["content"].strip() for m in messages)


def check_said(name: str, said: Turns) -> None:
    if not (said if isinstance(said, str) else "".join(m["content"] for m in said)).strip():
        raise BadRow(f"{name} is empty")
    if isinstance(said, list) and not says_something(said):
        raise BadRow(f"{name} has no words of the assistant")


def parsed(prompt: Turns | None, said: Mapping[str, Turns]) -> tuple[Turns | None, list[Turns]]:
    """The prompt and what is said after it, with the turns of a dialogue in text as messages where others speak in it.

    Answers in text are left as they are, without the prompt's text where it is a dialogue that they repeat.
    """
    texts = [text for text in said.values() if isinstance(text, str)]
    if prompt is None or len(texts) < len(said):
        return prompt, list(said.values())
    asked = prompt.rstrip() if isinstance(prompt, str) else ""
    names, sides = " and ".join(said), list[Turns](texts)
    if asked and all(text.startswith(asked) for text in texts):
        if is_dialogue(asked):
            texts = [text.removeprefix(asked) for text in texts]
            sides = list[Turns](texts)
        elif len(texts) > 1 and (asked.endswith(":") or len(asked.split()) >= FEW_WORDS):
            raise BadRow(
                f"{names} begin with the text of the prompt: leave it out of them, or, where the assistant is to say "
                "it, give them as messages"
            )
    whole = [text.startswith(HUMAN) and ASSISTANT in text for text in texts]
    if all(whole):
        return prompt, [dialogue(text) for text in texts]
    if any(whole):
        raise BadRow(f"one of {names} is a whole dialogue, the other an answer")
    if ASSISTANT in asked and any(HUMAN in text for text in texts):
        if not asked.endswith(ASSISTANT):
            raise BadRow(f"{names} hold turns of others, but the prompt doesn't end with {ASSISTANT.strip()!r}")
        prompt = as_messages(asked) if is_dialogue(asked) else dialogue(asked)[:-1]
        sides = [dialogue(ASSISTANT + text) for text in texts]
    return prompt, sides


def merged(prompt: Turns | None, lead: list[Message], names: str) -> Turns:
    """The prompt with the turns that what follows it begins with: they may repeat it, or its end, or go on from it."""
    if not prompt or not lead:
        return prompt or lead
    before = as_messages(prompt)
    n = len(before)
    if any(alike(lead[i : i + n], before) for i in range(len(lead) - n + 1)):
        return lead
    if all(message["role"] == "system" for message in lead):
        if alike(before[: len(lead)], lead):
            return prompt
        if before[0]["role"] != "system":
            return [*lead, *before]
    if isinstance(prompt, str) and lead[0]["role"] != "assistant":
        # the text may be one of the turns, or all of them with marks between
        text, words = _bare(prompt), [_bare(message["content"]) for message in lead]
        rest = text
        for said in words:
            rest = rest.replace(said, " ", 1)
        if any(text in said for said in words) or (all(said in text for said in words) and not _MARK.sub("", rest)):
            return lead
        raise BadRow(f"the turns before the answer in {names} are others than the prompt ({prompt!r:.40})")
    kept = overlap(before, lead)
    if kept == 0 and lead[0]["role"] == "system":
        raise BadRow(f"the prompt has another system message than {names}")
    return [*before, *lead[kept:]]


def overlap(before: Sequence[Message], said: Sequence[Message]) -> int:
    """How many of the last turns are said again."""
    n = len(before)
    return max(k for k in range(min(n, len(said)) + 1) if alike(before[n - k :], said[:k]))
