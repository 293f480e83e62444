"""The rules of docs/batch-words.md, and that what a message offers is really valid."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from tests.config.samples import load, refusal
from verl.config.batch_words import BatchWords, advice, faults, valid
from verl.config.load import notes

PAGE = Path(__file__).parents[2] / "docs" / "batch-words.md"


def test_rollout_that_does_not_divide_the_lap():
    text = refusal(rollout_batch_size=192, train_batch_size=512)
    assert "train_batch_size is 512: must be a multiple of rollout_batch_size 192" in text
    assert "train_batch_size 384 or 576 would fit" in text


def test_rollout_that_does_not_divide_the_lap_with_a_mini_batch():
    text = refusal(rollout_batch_size=192, train_batch_size=512, micro_batch_size=32, gradient_accumulation_steps=4)
    assert (
        "train_batch_size 384 or 576 would fit; with the other sizes as they are, train_batch_size 384 or 768" in text
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"group_size": 4, "rollout_batch_size": 6}, ["rollout_batch_size is 6", "group_size 4", "4 or 8"]),
        ({"rollout_batch_size": 64, "train_batch_size": 32}, ["multiple of rollout_batch_size 64", "64 or 128"]),
        ({"mini_batch_size": 48}, ["mini_batch_size is 48", "must divide", "64", "32 or 64"]),
        ({"mini_batch_size": 4, "micro_batch_size": 8}, ["micro_batch_size is 8", "mini_batch_size 4", "2 or 4"]),
        ({"micro_batch_size": 24}, ["micro_batch_size is 24", "rollout_batch_size 64", "16 or 32"]),
        (
            {"micro_batch_size": 8, "gradient_accumulation_steps": 3},
            ["gradient_accumulation_steps is 3", "24 rows per optimizer step", "gradient_accumulation_steps 2 or 4"],
        ),
        (
            {"micro_batch_size": 8, "gradient_accumulation_steps": 2, "mini_batch_size": 32},
            ["is 16 rows per optimizer step, but mini_batch_size is 32", "steps 4 or mini_batch_size 16"],
        ),
        ({"gradient_accumulation_steps": 5, "mini_batch_size": 32}, ["must divide mini_batch_size 32", "2 or 4"]),
        (
            {"gradient_accumulation_steps": 3},
            ["gradient_accumulation_steps 2 with micro_batch_size 16 or gradient_accumulation_steps 4 with micro"],
        ),
        ({"gradient_accumulation_steps": 4}, ["says nothing without", "micro_batch_size 8 or 16 would fit"]),
    ],
)  # fmt: skip
def test_broken_rules(values, words):
    text = refusal(**values)
    assert text.startswith("1 setting is wrong"), text
    for word in words:
        assert word in text


def test_independent_faults_come_together():
    text = refusal(group_size=5, rollout_batch_size=64, train_batch_size=100, mini_batch_size=30, micro_batch_size=7)
    for key in (
        "rollout_batch_size is 64",
        "train_batch_size is 100",
        "mini_batch_size is 30",
        "micro_batch_size is 7",
    ):
        assert key in text


@pytest.mark.parametrize(
    ("values", "mini", "micro", "steps"),
    [
        ({}, 64, 16, 4),
        ({"micro_batch_size": 8}, 64, 8, 8),
        ({"mini_batch_size": 32}, 32, 16, 2),
        ({"micro_batch_size": 8, "gradient_accumulation_steps": 4}, 32, 8, 4),
        ({"mini_batch_size": 32, "gradient_accumulation_steps": 4}, 32, 8, 4),
        ({"mini_batch_size": 32, "gradient_accumulation_steps": 4, "micro_batch_size": 8}, 32, 8, 4),
        ({"rollout_batch_size": 17}, 17, 1, 17),
    ],
)
def test_derived_sizes(values, mini, micro, steps):
    cfg = load(**values)
    assert (cfg.mini_batch_size, cfg.micro_batch_size, cfg.gradient_accumulation_steps) == (mini, micro, steps)


def all_words():
    some = (None, 3, 8)
    for group, rollout, train, mini, micro, steps, least in itertools.product(
        (1, 4), (6, 8), (None, 8, 36), some, some, (None, 2, 3), (1, 2)
    ):
        yield BatchWords(group, rollout, train, mini, micro, steps, least)


def test_what_is_offered_is_valid():
    """Every setting that a message offers leaves no rule broken, or (for the lap's size alone) not that one."""
    for words in all_words():
        for fault in faults(words):
            text = advice(words, fault).rpartition(";")[2]
            key = ""
            offered = re.findall(r"([a-z_]+_[a-z]+ )?(\d+)(?: with ([a-z_]+) (\d+))?", text)
            for name, value, other, its in offered:
                key = name.strip() or key
                left = faults(dataclasses.replace(words, **{key: int(value)}, **({other: int(its)} if other else {})))
                assert not left or (not valid(words, key) and all(f.key != fault.key for f in left)), text
            assert offered, (words, fault, text)


def test_where_no_rule_is_broken_the_sizes_divide():
    sound = [w for w in all_words() if not faults(w)]
    assert len(sound) > 20
    for words in sound:
        assert words.train % words.mini == 0
        assert words.mini % words.micro == 0
        assert words.train % words.rollout_batch_size == 0
        assert words.rollout_batch_size % words.group_size == 0


def test_huge_sizes_are_judged_at_once():
    assert "would fit" in refusal(rollout_batch_size=3_000_017, train_batch_size=10_000_019, micro_batch_size=7)


def test_the_pages_example():
    blocks = re.findall(r"```(?:yaml)?\n(.*?)```", PAGE.read_text(), re.S)
    example = dict(re.findall(r"(\w+): (\d+)", blocks[0]))
    assert notes(load(**{k: int(v) for k, v in example.items()}))[:2] == blocks[1].splitlines()
    assert blocks[2].strip() in refusal(rollout_batch_size=192, train_batch_size=512)
