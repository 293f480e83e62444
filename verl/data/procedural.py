"""Prompts made by rule: addition and its kin, reasoning-gym's tasks, and a handful of toy prompts.

``{name: arithmetic, low: 0, high: 19, split: train}`` and ``{name: reasoning-gym, task: gcd, size: 1000}``.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from verl.config.errors import DataError
from verl.config.section import Section, faults

TOY_PROMPTS = (
    "Say hello.",
    "Name a colour.",
    "Name an animal.",
    "What is the opposite of hot?",
    "Count to three.",
    "What day comes after Monday?",
    "Finish the sentence: the sky is",
    "Name a fruit.",
)

MOST_QUESTIONS = 1_000_000  # a bigger set needs `size`
TEST_SHARE = 5  # one pair in five is held out


class Arithmetic(Section):
    """``What is a + b?`` with ``low <= a, b <= high``; the field ``answer`` holds the result as text.

    A pair of operands belongs to the test split or not by a hash of the unordered pair: neither order nor seed nor
    operation brings a held-out pair into training. ``size`` rows (default: every question of the split once), in a
    seeded order; more rows than questions repeat them, each as often as the others give or take one.
    """

    name: Literal["arithmetic"]
    size: int | None = Field(None, ge=1)
    seed: int = 0
    low: int = 0
    high: int = 19
    operations: list[Literal["+", "-", "*"]] = Field(default_factory=lambda: ["+"], min_length=1)  # type: ignore[arg-type]
    split: Literal["train", "test"] = "train"

    @model_validator(mode="after")
    def _range(self) -> Arithmetic:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self

    def rows(self) -> list[dict[str, Any]]:
        span = self.high - self.low + 1
        total = span * span * len(self.operations)
        if self.size is None and total > MOST_QUESTIONS:
            raise DataError(f"arithmetic: {total} questions; say how many with `size`")
        rng = random.Random(f"arithmetic/{self.seed}")
        # A wide range is sampled: ten times the wanted rows hold twice as many held-out ones as wanted.
        drawn = rng.sample(range(total), min(total, 10 * self.size + 1000 if self.size else total))
        questions = [q for q in map(self._question, drawn) if q is not None]
        if not questions:
            raise DataError(f"arithmetic: no pair of {self.low}..{self.high} is in the {self.split} split")
        size = self.size or len(questions)
        return [questions[i % len(questions)] for i in range(size)]

    def _question(self, index: int) -> dict[str, Any] | None:
        span = self.high - self.low + 1
        index, a = divmod(index, span)
        which, b = divmod(index, span)
        a, b = a + self.low, b + self.low
        if held_out(a, b) != (self.split == "test"):
            return None
        sign = self.operations[which]
        answer = {"+": a + b, "-": a - b, "*": a * b}[sign]
        return {"prompt": f"What is {a} {sign} {b}?", "answer": str(answer)}


def held_out(a: int, b: int) -> bool:
    """Whether the unordered pair belongs to the test split, whatever the range, seed and operation."""
    digest = hashlib.sha256(f"{min(a, b)},{max(a, b)}".encode()).digest()
    return int.from_bytes(digest[:8]) % TEST_SHARE == 0


class ReasoningGym(Section):
    """A task of the package reasoning-gym; other keys go to the task's own configuration.

    A row is the gym's own entry (``question``, ``answer``, ``metadata``) with ``prompt`` and ``task``:
    what its verifier, ``reasoning_gym.get_score_answer_fn(task)(answer, entry)``, needs.
    """

    model_config = ConfigDict(extra="allow")

    name: Literal["reasoning-gym", "reasoning_gym"]
    task: str
    size: int = Field(1000, ge=1)
    seed: int = 0

    def rows(self) -> list[dict[str, Any]]:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise DataError("reasoning-gym is not installed: pip install 'reasoning-gym>=0.1.20'") from error
        if self.task not in DATASETS:
            raise DataError(f"reasoning-gym has no task {self.task!r}; its tasks: {', '.join(sorted(DATASETS))}")
        keys = {"size": self.size, "seed": self.seed, **(self.model_extra or {})}
        try:
            entries = list(reasoning_gym.create_dataset(self.task, **keys))
        except (TypeError, AssertionError) as error:  # how its configurations refuse keys and values
            raise DataError(f"reasoning-gym task {self.task!r}: {error}") from error
        return [{"prompt": entry["question"], **entry, "task": self.task} for entry in entries]


SETS: dict[str, type[Arithmetic] | type[ReasoningGym]] = {
    "arithmetic": Arithmetic,
    "reasoning-gym": ReasoningGym,
    "reasoning_gym": ReasoningGym,
}


def make_rows(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that ``{name: ..., ...}`` describes, its name one of ``SETS``; DataError names every wrong key."""
    name = spec["name"]
    try:
        return SETS[name].model_validate(dict(spec)).rows()
    except ValidationError as error:
        raise DataError(f"data set {name}: {faults(error)}") from error
