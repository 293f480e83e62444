"""Column layouts: how a data set's own columns become ``prompt``, ``chosen`` and ``rejected``, and so on.

Recognised as they are: ``prompt`` or another usual name as text or as messages; ``messages`` whose last assistant
turn is the answer; verl's ``prompt`` with ``reward_model.ground_truth``; Alpaca's ``instruction`` with ``input``;
``chosen``/``rejected`` beside a prompt (TRL, UltraFeedback) or as whole dialogues (hh-rlhf); a completion beside a
prompt, with a label or without. Others by ``columns``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal

from verl.config.errors import DataError
from verl.data.chat import ASSISTANT, HUMAN, Message, Turns, as_messages, shared_start
from verl.data.policies import Numbered

Kind = Literal["prompts", "pairs", "labelled", "chats"]
CHATS = ("messages", "conversations", "conversation")  # hold the answer too, as the last assistant turn
PROMPTS = ("prompt", *CHATS, "question", "problem", "instruction", "query", "input")
COMPLETIONS = ("completion", "response", "output", "answer")
LABELS = ("label", "desirable", "thumbs_up", "thumbs-up", "liked", "upvoted", "is_correct", "correct")
SHAREGPT = {"human": "user", "gpt": "assistant"}
SIDES = ("chosen", "rejected")
TRUE, FALSE = ("true", "1", "+1", "1.0"), ("false", "0", "-1", "0.0", "-1.0")


class Layout:
    """How to read the rows of one data set.

    ``present``: its columns. ``columns``: ``{ours: theirs}``, where ``theirs`` may be dotted (``a.b`` is key ``b`` of
    column ``a``). ``kind``: what every row must have. ``where`` names the set in messages. Raises DataError, listing
    the columns there are, when one that is needed is missing.
    """

    def __init__(
        self, present: Collection[str], columns: Mapping[str, str], where: str, kind: Kind = "prompts"
    ) -> None:
        self.columns, self.where, self.kind = dict(columns), where, kind
        there = f"{where} has the columns {', '.join(sorted(present)) or '(none)'}"
        for ours, theirs in self.columns.items():
            if theirs not in present and theirs.split(".")[0] not in present:
                near = get_close_matches(theirs, list(present), 1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise DataError(f"columns: {{{ours}: {theirs}}} names no column{hint}; {there}")
        self._names = {*present, *self.columns}
        self.chat_column = self._first(CHATS)
        self.prompt_column = self._first(PROMPTS)
        self.completion_column = self._first(COMPLETIONS)
        self.label_column = self._first(LABELS)
        both = self._names >= set(SIDES)
        if kind == "chats" and self.chat_column is not None and not {"prompt", "completion"} & set(self.columns):
            self.prompt_column = self.chat_column
        if self.prompt_column is None and not both:
            raise DataError(f"no prompt column; {there}; name it with `columns: {{prompt: ...}}`")
        answered = self.prompt_column in CHATS or self.completion_column is not None
        if kind == "pairs" and not both:
            raise DataError(f"a preference data set needs chosen and rejected; {there}; name them with `columns`")
        if kind == "labelled" and not both and not (answered and self.label_column):
            raise DataError(
                f"a labelled data set needs a completion (or {', '.join(COMPLETIONS[1:])}, or messages) and a label "
                f"(or {', '.join(LABELS[1:])}), or chosen and rejected; {there}; name them with `columns`"
            )
        if kind == "chats" and not both and not answered:
            raise DataError(
                f"a chat data set needs messages (or conversations), or a completion beside the prompt (or "
                f"{', '.join(COMPLETIONS[1:])}), or chosen and rejected; {there}; name them with `columns`"
            )
        needed = {"prompts": False, "pairs": True, "labelled": not (answered and self.label_column)}
        self.whole_chats = kind == "chats" and self.prompt_column in CHATS
        self.sides = self.prompt_column is None or needed.get(kind, not answered)

    def _first(self, usual: Sequence[str]) -> str | None:
        return next((name for name in usual if name in self._names), None)

    def read(self, row: Mapping[str, Any], number: int) -> dict[str, Any]:
        """All columns of the row, with those that the kind needs in our form.

        prompts: ``prompt``. pairs: ``prompt``, ``chosen``, ``rejected``. labelled: ``prompt``, ``completion``,
        ``label``, or those of a pair, see ``parts``. chats: ``messages``, or ``prompt`` and ``completion``. Prompt,
        completion and sides are texts or lists of messages. ``number`` counts from 0. Raises DataError naming the row
        when a needed value is missing, empty or no text.
        """
        try:
            fields = dict(row)
            for ours, theirs in self.columns.items():
                fields[ours] = _pick(row, theirs)
            if self.whole_chats:
                _read_chat(fields, str(self.prompt_column))
            elif self.prompt_column is not None:
                fields["prompt"] = self._prompt(fields)
            if self.sides:
                _read_pair(fields)
                if self.kind == "chats":
                    fields["completion"] = fields["chosen"]
            elif self.kind in ("labelled", "chats") and not self.whole_chats:
                fields["completion"] = self._completion(fields)
            if self.kind == "labelled" and not self.sides:
                fields["label"] = _label(fields.get(str(self.label_column)), str(self.label_column))
            truth = fields.get("reward_model")
            if isinstance(truth, Mapping) and truth.get("ground_truth") is not None:
                fields.setdefault("ground_truth", truth["ground_truth"])
                fields.setdefault("answer", truth["ground_truth"])
            return fields
        except _Bad as problem:
            raise DataError(f"{self.where}, row {number}: {problem}") from None

    def parts(self, number: int, fields: dict[str, Any]) -> list[Numbered]:
        """A row that was read, under its number; of a pair read for its labels, both sides."""
        if not (self.kind == "labelled" and self.sides):
            return [(str(number), fields)]
        return [(f"{number}/{side}", side_of(fields, side)) for side in SIDES]

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

    def _completion(self, fields: dict[str, Any]) -> Turns:
        """What the assistant said, without the prompt's turns where the column repeats them."""
        last_turn = self.prompt_column in CHATS and fields.get("response") is not None
        name = "response" if last_turn else self.completion_column
        if name is None:
            raise _Bad(f"{self.prompt_column} doesn't end with a turn of the assistant")
        completion, prompt = _turns(fields.get(name), name), as_messages(fields["prompt"])
        if isinstance(completion, list) and completion[: len(prompt)] == prompt:
            completion = completion[len(prompt) :]
        if not completion:
            raise _Bad(f"{name} has no turn after the prompt")
        if isinstance(completion, list) and not any(m["content"].strip() for m in completion):
            raise _Bad(f"{name} is empty")
        return completion


def side_of(fields: Mapping[str, Any], side: str) -> dict[str, Any]:
    """One side of a pair as a labelled row: chosen is desirable, rejected is not."""
    return {**fields, "completion": fields[side], "label": side == SIDES[0]}


class _Bad(Exception):
    """What is wrong with a row; its number is added where it is known."""


def _pick(row: Mapping[str, Any], path: str) -> Any:
    if path in row:
        return row[path]
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _label(value: Any, name: str) -> bool:
    said = str(value).strip().lower()
    if said in TRUE or said in FALSE:
        return said in TRUE
    raise _Bad(f"{name} is {value!r:.40}, not true or false, 1 or 0, +1 or -1")


def _read_chat(fields: dict[str, Any], name: str) -> None:
    """``messages`` in which the assistant speaks, but not first; ``prompt`` is what comes before its last turn."""
    messages = as_messages(_turns(fields.get(name), name))
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not spoken:
        raise _Bad(f"{name} has no turn of the assistant")
    if spoken[0] == 0:
        raise _Bad(f"{name} has no turn before the assistant's")
    if not any(messages[i]["content"].strip() for i in spoken):
        raise _Bad(f"{name} has no words of the assistant")
    fields["messages"] = messages
    fields.pop("completion", None)  # the conversation is what is trained
    fields.setdefault("prompt", messages[: spoken[-1]])


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
        dialogue = HUMAN in chosen
        end = common.rfind(ASSISTANT) + len(ASSISTANT) if dialogue else max(map(common.rfind, " \n"))
        if end < (len(ASSISTANT) if dialogue else 1):
            at = repr(ASSISTANT.strip()) if dialogue else "a whole word"
            raise _Bad(f"no prompt: chosen and rejected don't share a start that ends with {at}")
        prompt, chosen, rejected = chosen[:end], chosen[end:], rejected[end:]
    if not prompt:
        raise _Bad("no prompt: chosen and rejected share no first turn")
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if not (side if isinstance(side, str) else "".join(m["content"] for m in side)).strip():
            raise _Bad(f"{name} is empty")
    fields.update(prompt=prompt, chosen=chosen, rejected=rejected)
