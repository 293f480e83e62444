"""Column layouts: how a data set's own columns become ``prompt``, ``chosen`` and ``rejected``, and so on.

Recognised as they are: ``prompt`` or another usual name as text or as messages; ``messages`` whose last assistant
turn is the answer; verl's ``prompt`` with ``reward_model.ground_truth``; Alpaca's ``instruction`` with ``input``;
``chosen``/``rejected`` beside a prompt (TRL, UltraFeedback) or as whole dialogues (hh-rlhf); a completion beside a
prompt, with a label or without. A text column ``system`` or ``system_prompt`` is the first message. Others by
``columns``. What could be meant in two ways is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal

from verl.config.errors import DataError
from verl.data.chat import ASSISTANT, HUMAN, Message, Turns, as_messages, dialogue, is_dialogue, shared_start
from verl.data.policies import Numbered
from verl.data.turns import BadRow, alike, check_said, merged, overlap, parsed, says_something, turns_of

Kind = Literal["prompts", "pairs", "labelled", "chats"]
CHATS = ("messages", "conversations", "conversation")  # hold the answer too, as the last assistant turn
PROMPTS = ("prompt", *CHATS, "question", "problem", "instruction", "query", "input")
COMPLETIONS = ("completion", "response", "output", "answer")
LABELS = ("label", "desirable", "thumbs_up", "thumbs-up", "liked", "upvoted", "is_correct", "correct")
SYSTEM = ("system", "system_prompt")
# further columns that belong to a prompt where a data set has them, and that no prompt is made of here
BESIDE = ("context", "documents", "functions", "history", "image", "images", "input", "instruction", "passage", "tools")
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
        read = {self.prompt_column, *(theirs.split(".")[0] for theirs in self.columns.values())}
        named = ("system",) if "system" in self.columns else SYSTEM
        self.system_columns = [name for name in named if name in self._names and name not in read]
        if self.prompt_column == "instruction":
            read.add("input")
        elif self.prompt_column in CHATS:
            read |= {"instruction", "input"}
        self.unread = sorted({name for name in BESIDE if name in present} - read)
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
            system, said = self._system(fields), None
            if self.whole_chats:
                self._read_chat(fields, system)
            elif self.prompt_column is not None:
                fields["prompt"], said = self._prompt(fields)
                if said is not None:
                    fields.setdefault("response", said["content"])
            if self.sides:
                _read_pair(fields)
            elif self.kind in ("labelled", "chats") and not self.whole_chats:
                self._read_completion(fields, said)
            if system is not None and not self.whole_chats:
                answers = SIDES if self.sides else () if self.kind == "prompts" else ("completion",)
                if is_dialogue(fields["prompt"]):  # no longer one text, so what follows it isn't either
                    fields |= {n: dialogue(ASSISTANT + fields[n]) for n in answers if isinstance(fields[n], str)}
                fields["prompt"] = _after(system, as_messages(fields["prompt"]))
            if self.sides and self.kind == "chats":
                fields["completion"] = fields["chosen"]
            if self.kind == "labelled" and not self.sides:
                fields["label"] = _label(fields.get(str(self.label_column)), str(self.label_column))
            truth = fields.get("reward_model")
            if isinstance(truth, Mapping) and truth.get("ground_truth") is not None:
                fields.setdefault("ground_truth", truth["ground_truth"])
                fields.setdefault("answer", truth["ground_truth"])
            return fields
        except BadRow as problem:
            raise DataError(f"{self.where}, row {number}: {problem}") from None

    def parts(self, number: int, fields: dict[str, Any]) -> list[Numbered]:
        """A row that was read, under its number; of a pair read for its labels, both sides."""
        if not (self.kind == "labelled" and self.sides):
            return [(str(number), fields)]
        return [(f"{number}/{side}", side_of(fields, side)) for side in SIDES]

    def _system(self, fields: Mapping[str, Any]) -> Message | None:
        said: dict[str, str] = {}
        for name in self.system_columns:
            value = fields.get(name)
            if not isinstance(value, str | bool | int | float | None):
                raise BadRow(f"{name} is {type(value).__name__} ({value!r:.40}), not text")
            if isinstance(value, str) and value.strip():
                said.setdefault(value, name)
        if len(said) > 1:
            raise BadRow(f"{' and '.join(said.values())} are two texts; name one with `columns: {{system: ...}}`")
        return next(({"role": "system", "content": text} for text in said), None)

    def _prompt(self, fields: dict[str, Any]) -> tuple[Turns, Message | None]:
        """The prompt, and the answer where the assistant's last turn in the same column gives it."""
        name = self.prompt_column
        assert name is not None
        prompt, said = turns_of(fields.get(name), name), None
        if name in CHATS and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            *prompt, said = prompt
            if not prompt:
                raise BadRow(f"{name} has no turn before the assistant's")
            if self.kind == "labelled" and not self.sides and prompt[-1]["role"] == "assistant":
                raise BadRow(f"{name} ends with two turns of the assistant; join them into one")
        extra = fields.get("input")
        if name == "instruction" and isinstance(prompt, str) and isinstance(extra, str) and extra.strip():
            prompt = f"{prompt}\n\n{extra}"
        return prompt, said

    def _read_chat(self, fields: dict[str, Any], system: Message | None) -> None:
        """``messages`` in which the assistant speaks, but not first; ``prompt`` is what comes before its last turn."""
        name = str(self.prompt_column)
        messages = as_messages(turns_of(fields.get(name), name))
        spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        answer = self.completion_column
        open_end = messages[-1]["role"] != "assistant" and not set(CHATS) & set(self.columns)
        if open_end and answer is not None and fields.get(answer):
            raise BadRow(
                f"{name} doesn't end with a turn of the assistant, and there is {answer}: say by "
                f"`columns: {{prompt: {name}}}` that it is trained, or by `columns: {{messages: {name}}}` that it isn't"
            )
        if not spoken:
            raise BadRow(f"{name} has no turn of the assistant")
        if spoken[0] == 0:
            raise BadRow(f"{name} has no turn before the assistant's")
        if not says_something(messages):
            raise BadRow(f"{name} has no words of the assistant")
        messages, told = _after(system, messages), len(messages)
        fields["messages"] = messages
        fields.pop("completion", None)  # the conversation is what is trained
        fields.setdefault("prompt", messages[: len(messages) - told + spoken[-1]])

    def _read_completion(self, fields: dict[str, Any], said: Message | None) -> None:
        """``completion`` without the prompt's turns where the column repeats them; they may tell more than ``prompt``.

        ``said``: the last turn of the conversation that the prompt begins.
        """
        prompt = fields["prompt"]
        if said is not None and "completion" not in self.columns:
            name, completion = str(self.prompt_column), turns_of([said], str(self.prompt_column))
        elif self.completion_column is None:
            raise BadRow(f"{self.prompt_column} doesn't end with a turn of the assistant")
        else:
            name = self.completion_column
            prompt, (completion,) = parsed(prompt, {name: turns_of(fields.get(name), name)})
        if isinstance(completion, list):
            before = as_messages(prompt)
            if alike(completion[: len(before)], before):
                completion = completion[len(before) :]
                if not completion:
                    raise BadRow(f"{name} has no turn after the prompt")
            lead = next((i for i, message in enumerate(completion) if message["role"] == "assistant"), 0)
            prompt, completion = merged(prompt, completion[:lead], name), completion[lead:]
        check_said(name, completion)
        fields.update(prompt=prompt, completion=completion)


def side_of(fields: Mapping[str, Any], side: str) -> dict[str, Any]:
    """One side of a pair as a labelled row: chosen is desirable, rejected is not."""
    return {**fields, "completion": fields[side], "label": side == SIDES[0]}


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
    raise BadRow(f"{name} is {value!r:.40}, not true or false, 1 or 0, +1 or -1")


def _after(system: Message | None, messages: list[Message]) -> list[Message]:
    """The messages, with the system column's in front unless they begin with it."""
    if system is None or alike(messages[:1], [system]):
        return messages
    if messages[0]["role"] == "system":
        raise BadRow(f"the prompt has another system message than the system column ({system['content']!r:.40})")
    return [system, *messages]


def _read_pair(fields: dict[str, Any]) -> None:
    """Bring ``prompt``, ``chosen`` and ``rejected`` into the form prompt + two completions."""
    chosen, rejected = (turns_of(fields.get(side), side) for side in SIDES)
    prompt: Turns | None = fields.get("prompt")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BadRow("one of chosen and rejected is text, the other a list of messages")
    if not prompt and isinstance(chosen, str) and isinstance(rejected, str):
        common = chosen[: shared_start(chosen, rejected)]
        marked = HUMAN in chosen
        end = common.rfind(ASSISTANT) + len(ASSISTANT) if marked else max(map(common.rfind, " \n"))
        if end < (len(ASSISTANT) if marked else 1):
            at = repr(ASSISTANT.strip()) if marked else "a whole word"
            raise BadRow(f"no prompt: chosen and rejected don't share a start that ends with {at}")
        prompt, chosen, rejected = chosen[:end], chosen[end:], rejected[end:]
    prompt, (chosen, rejected) = parsed(prompt, {"chosen": chosen, "rejected": rejected})
    if isinstance(chosen, list) and isinstance(rejected, list):
        shared = 0  # turns of both sides before their last one
        while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
            shared += 1
        lead, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if lead and lead[-1]["role"] == "assistant" and "assistant" in (chosen[0]["role"], rejected[0]["role"]):
            raise BadRow("chosen and rejected have two turns of the assistant in a row; join them into one")
        if prompt and not lead:
            before = as_messages(prompt)
            chosen, rejected = (side[overlap(before, side[:-1]) :] for side in (chosen, rejected))
        prompt = merged(prompt, lead, "chosen and rejected")
    if not prompt:
        raise BadRow("no prompt: chosen and rejected share no first turn")
    for name, side in zip(SIDES, (chosen, rejected), strict=True):
        check_said(name, side)
    fields.update(prompt=prompt, chosen=chosen, rejected=rejected)
