"""The rules of the batch words (docs/batch-words.md): derive what isn't given, name what doesn't fit, offer what would.

All sizes count rows: a prompt with one of its responses. The number of devices never enters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from verl.config.run import RunConfig

DEFAULT_ROWS = 64  # of a lap where nothing is sampled
DEFAULT_GROUP = 8  # responses per prompt where the baseline is the group's
MOST_DIVISORS = 10**5  # looked at of one size
MOST_TRIED = 16  # accumulations around the given one, for an offer
MOST_DEFAULT_MICRO = 16  # rows of one forward where memory wasn't thought about


@dataclass(frozen=True)
class BatchWords:
    """The sizes as given; None: not given. Field names are the configuration's keys.

    ``least_group``: 2 where the algorithm's baseline is a mean over the group. Where nothing is sampled, ``unit`` is
    the rows that stay together (2 for a preference pair), ``least_train`` the rows that a lap must have, and
    ``rollout_batch_size`` plays no part.
    """

    group_size: int
    rollout_batch_size: int
    train_batch_size: int | None = None
    mini_batch_size: int | None = None
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    least_group: int = 1
    unit: int | None = None
    least_train: int = 1
    whole_groups: bool = False  # a group's rows are one optimizer step's

    @property
    def train(self) -> int:
        return self.train_batch_size or self.rollout_batch_size

    @property
    def mini(self) -> int:
        """Rows of one optimizer step: said directly, or as micro x accumulation, else the whole lap."""
        if self.mini_batch_size:
            return self.mini_batch_size
        if self.micro_batch_size and self.gradient_accumulation_steps:
            return self.micro_batch_size * self.gradient_accumulation_steps
        return self.train

    @property
    def micro(self) -> int:
        """Most rows of one forward. Meaningful where no rule is broken."""
        if self.micro_batch_size:
            return self.micro_batch_size
        if self.gradient_accumulation_steps:
            return self.mini // self.gradient_accumulation_steps
        fit = [d for d in _divisors(self.mini) if d <= MOST_DEFAULT_MICRO and d % (self.unit or 1) == 0]
        return max(fit, default=self.mini)


KEYS = tuple(
    field.name
    for field in fields(BatchWords)
    if field.name not in ("least_group", "unit", "least_train", "whole_groups")
)


@dataclass(frozen=True)
class Fault:
    """One broken rule: the key to blame, what is wrong, the keys it speaks of, and those that could change."""

    key: str
    text: str
    keys: tuple[str, ...]
    remedies: tuple[str, ...]


def words_of(cfg: RunConfig) -> BatchWords:
    """The configuration's sizes, with the algorithm's default group size."""
    algorithm = cfg.algorithm
    unit, least_train = None, 1
    if not algorithm.recipe.samples:
        unit, least_train = (2 if algorithm.recipe.data == "pairs" else 1), (2 if algorithm.name == "kto" else 1)
    return BatchWords(
        unit or cfg.group_size or (DEFAULT_GROUP if algorithm.needs_groups else 1),
        (cfg.train_batch_size or DEFAULT_ROWS) if unit else cfg.rollout_batch_size,
        cfg.train_batch_size or (DEFAULT_ROWS if unit else None),
        cfg.mini_batch_size,
        cfg.micro_batch_size,
        cfg.gradient_accumulation_steps,
        least_group=2
        if algorithm.needs_groups and (algorithm.recipe.pairs_sampled or not algorithm.allow_singletons)
        else 1,
        unit=unit,
        least_train=least_train,
        whole_groups=algorithm.recipe.pairs_sampled,
    )


def derived(cfg: RunConfig) -> dict[str, int]:
    """Every size of a configuration that breaks no rule."""
    words = words_of(cfg)
    return {
        "group_size": words.group_size,
        "train_batch_size": words.train,
        "mini_batch_size": words.mini,
        "micro_batch_size": words.micro,
        "gradient_accumulation_steps": words.mini // words.micro,
    }


def faults(words: BatchWords) -> list[Fault]:
    """Every broken rule."""
    group, rollout, train = words.group_size, words.rollout_batch_size, words.train
    mini, micro, steps = words.mini_batch_size, words.micro_batch_size, words.gradient_accumulation_steps
    # Without a train_batch_size the lap is one rollout, so what doesn't divide the lap doesn't divide that.
    lap = ("train_batch_size" if words.train_batch_size else "rollout_batch_size",)
    found: list[Fault] = []

    def broken(key: str, text: str, *others: str, remedies: tuple[str, ...] = ()) -> None:
        found.append(Fault(key, f"{key} is {getattr(words, key)}: {text}", (key, *others), remedies or (key,)))

    if words.unit:
        if train < words.least_train:
            broken("train_batch_size", f"KTO's baseline pairs each prompt with another row's answer, so it needs at "
                   f"least {words.least_train} rows")  # fmt: skip
        for key in ("train_batch_size", "mini_batch_size", "micro_batch_size"):
            if (getattr(words, key) or 0) % words.unit:
                broken(key, "must be even: it counts rows, a preference pair is two, and pairs are never split")
    else:
        if group < words.least_group:
            broken("group_size", f"a baseline over the responses of one prompt needs at least {words.least_group}")
        if rollout % group:
            broken("rollout_batch_size", f"must be a multiple of group_size {group}", "group_size")
        if train % rollout:
            broken("train_batch_size", f"must be a multiple of rollout_batch_size {rollout}", "rollout_batch_size")
        if words.whole_groups and words.mini % group and not rollout % group:
            key = "mini_batch_size" if mini else "gradient_accumulation_steps"
            broken(key, f"an optimizer step of {words.mini} rows would divide groups of {group}", "group_size")
        if words.whole_groups and words.micro < 2:
            broken("micro_batch_size", "a pair of rows is computed together, so it must be at least 2")

    if mini and train % mini:
        broken("mini_batch_size", f"must divide {lap[0]} {train}", *lap)
    if mini and micro and steps and micro * steps != mini:
        text = f"with micro_batch_size {micro} that is {micro * steps} rows per optimizer step"
        remedies = ("gradient_accumulation_steps", "mini_batch_size")
        text += f", but mini_batch_size is {mini}"
        broken(remedies[0], text, "micro_batch_size", "mini_batch_size", remedies=remedies)
    elif mini and micro and mini % micro:
        broken("micro_batch_size", f"must divide mini_batch_size {mini}", "mini_batch_size")
    elif mini and steps and mini % steps:
        broken("gradient_accumulation_steps", f"must divide mini_batch_size {mini}", "mini_batch_size")
    elif micro and train % micro:
        broken("micro_batch_size", f"must divide {lap[0]} {train}", *lap)
    elif micro and steps and not mini and train % (micro * steps):
        text = f"with micro_batch_size {micro} that is {micro * steps} rows per optimizer step"
        broken("gradient_accumulation_steps", f"{text}, which must divide {lap[0]} {train}", "micro_batch_size", *lap)
    elif steps and not micro and not mini:
        text = "says nothing without micro_batch_size or mini_batch_size"
        keys = ("micro_batch_size", "mini_batch_size")
        broken("gradient_accumulation_steps", text, *keys, *lap, remedies=("micro_batch_size",))
    return found


def advice(words: BatchWords, fault: Fault) -> str:
    """Two settings that would be valid.

    The lap's own size is often changed together with the mini-batch: for it the two nearest multiples come first.
    """
    fit = [(key, value) for key in fault.remedies for value in valid(words, key)][:2]
    near = [(key, value) for key in fault.remedies for value in _nearest(words, key, fault.key)][:2]
    if not fit and "gradient_accumulation_steps" in (fault.key, *fault.remedies) and (both := _both(words)):
        return f"{both} would fit"
    if not fit or fault.key != "train_batch_size" or fit == near:
        return f"{_settings(fit or near)} would fit"
    return f"{_settings(near)} would fit; with the other sizes as they are, {_settings(fit)}"


def _both(words: BatchWords) -> str:
    """Up to two accumulations with a micro-batch each; they fit where neither size would alone."""
    now, found = words.gradient_accumulation_steps or 1, list[str]()
    for steps in sorted(_divisors(words.mini), key=lambda n: (abs(n - now), n))[:MOST_TRIED]:
        micro = valid(replace(words, gradient_accumulation_steps=steps, micro_batch_size=None), "micro_batch_size")
        if micro:
            found.append(f"gradient_accumulation_steps {steps} with micro_batch_size {micro[-1]}")
        if len(found) == 2:
            break
    return " or ".join(found)


def valid(words: BatchWords, key: str) -> list[int]:
    """The two values of ``key`` nearest to the present one that leave no rule broken, in rising order."""
    return _nearest(words, key, None)


def _nearest(words: BatchWords, key: str, rule: str | None) -> list[int]:
    """As ``valid``; with a ``rule``, the values that satisfy that key's rules alone."""
    now: int = getattr(words, key) or MOST_DEFAULT_MICRO
    good: list[int] = []
    for value in sorted(_candidates(words, now), key=lambda v: (abs(v - now), v)):
        changed: dict[str, Any] = {key: value}
        left = faults(replace(words, **changed))
        if not any(rule in (None, fault.key) for fault in left):
            good.append(value)
        if len(good) == 2:
            break
    return sorted(good)


def _candidates(words: BatchWords, now: int) -> set[int]:
    """Values that may fit: divisors of the sizes, and multiples of them around ``now``."""
    sizes = {words.train, words.rollout_batch_size, words.mini}
    if words.micro_batch_size:
        sizes.add(words.micro_batch_size * (words.gradient_accumulation_steps or 1))
    steps = {words.group_size, words.rollout_batch_size, math.lcm(words.rollout_batch_size, words.mini)}
    multiples = {s * k for s in steps for k in (1, 2, now // s, now // s + 1, now // s + 2) if k > 0}
    return multiples.union(*(_divisors(n) for n in sizes))


def _divisors(n: int) -> Iterator[int]:
    """Each with its counterpart; of a huge ``n`` those up to ``MOST_DIVISORS``, which takes no time."""
    for low in range(1, min(math.isqrt(n), MOST_DIVISORS) + 1):
        if n % low == 0:
            yield from (low, n // low)


def _settings(settings: list[tuple[str, int]]) -> str:
    """``train_batch_size 384 or 576``; a key is named once."""
    words, last = [], ""
    for key, value in settings:
        words.append(str(value) if key == last else f"{key} {value}")
        last = key
    return " or ".join(words)
