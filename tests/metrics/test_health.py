"""Each rule on steps made by hand: it tells once, not for what healthy runs show, and again after a while."""

from __future__ import annotations

import math
import random
import re

import pytest

from verl.config import schema
from verl.metrics import health
from verl.metrics.health import Health

KEYS = {".".join(path) for path, _ in schema.every_key()}


def told(values, name, *, watch=None, **others):
    """Steps, from 1, at which the values of one metric make a warning."""
    watch = watch or Health(health.GAP_FP32)
    steps = []
    for step, value in enumerate(values, 1):
        for text in watch.see({name: value, **others}):
            assert text.startswith(f"{name}, ")
            assert [word for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", text) if word in KEYS], text
            steps.append(step)
    return steps


UP = [0.1 + 0.08 * i for i in range(10)]  # a reward that learns


@pytest.mark.parametrize(
    ("name", "fine", "bad", "patience"),
    [
        ("policy/bad_steps", 0.0, 2.0, 1),
        ("critic/bad_steps", 0.0, 1.0, 1),
        ("process_reward/bad_steps", 0.0, 1.0, 1),
        ("kl/mean", 0.4, 6.0, 3),
        ("policy/kl_step", 0.05, 0.5, 3),
        ("rollout/logprob_diff_max", 1e-4, 0.5, 3),
        ("policy/entropy", 1.5, 0.004, 5),
        ("reward/flat_groups", 0.9, 1.0, 5),
        ("response/truncated", 0.9, 1.0, 5),
    ],
)
def test_a_condition_is_told_once_and_again_when_it_came_back(name, fine, bad, patience):
    first = [fine] * 6 + [bad] * 20
    begins = 6 + patience
    assert told(first, name) == [begins]
    assert told(([fine] * 6 + [bad] * (patience - 1)) * 4 + [fine], name) == []  # never long enough
    gap = [fine] * (health.CLEAR - 1)
    assert told(first + gap + [bad] * 20, name) == [begins]  # not gone for long enough
    again = len(first) + health.CLEAR + patience
    assert told([*first, *gap, fine] + [bad] * 20, name) == [begins, again]


def test_steps_without_the_metric_say_nothing():
    bad = [1.0, None, math.nan, 1.0, 1.0, None, 1.0, 1.0]
    assert told(bad, "reward/flat_groups") == [8]


def test_what_holds_is_counted():
    watch, counts = Health(), []
    for flat, cut in [(1.0, 0.0)] * 5 + [(1.0, 1.0)] * 5 + [(0.0, 1.0)] * 5:
        watch.see({"reward/flat_groups": flat, "response/truncated": cut})
        counts.append(watch.conditions)
    assert counts == [0] * 4 + [1] * 5 + [2] * 5 + [1]


@pytest.mark.parametrize("scale", [1.0, -3.0, 1000.0])
def test_a_reward_that_falls_to_where_it_began_is_told(scale):
    """Whatever its zero is and in whatever unit."""
    shift, unit = (scale, 1.0) if scale < 0 else (0.0, scale)

    def steps(rewards):
        return told([shift + unit * r for r in rewards], "reward/mean", **{"reward/std": 0.3 * unit})

    fall = [*UP, *[0.1] * 10]
    (step,) = steps(fall)
    assert health.FEW < step - len(UP) <= health.WINDOW + health.FEW
    twice = [*fall, *UP, *[0.9] * 10, *[0.1] * 10]
    first, second = steps(twice)
    assert first == step and health.FEW < second - (len(twice) - 10) <= health.WINDOW + health.FEW
    assert steps([*UP, *[0.6] * 20]) == []  # it lost a third of what it gained
    assert steps([*UP, 0.1, 0.2, *[0.8] * 10]) == []  # two bad steps
    assert steps(UP + [0.8, 0.9] * 20) == []


def test_a_noisy_reward_is_no_collapse():
    rng = random.Random(0)
    for rows in (8, 64):
        rewards = [sum(rng.random() < 0.5 for _ in range(rows)) / rows for _ in range(2000)]
        assert told(rewards, "reward/mean", **{"reward/std": 0.5}) == []


def test_kl_is_compared_with_what_is_usual():
    jumps = [0.0, *[0.1] * 20, *[1.5] * 10]
    assert told(jumps, "kl/mean") == [len(jumps) - 7]
    assert told([0.001] * 21 + [0.5] * 10, "kl/mean") == []  # much more, but little
    assert told([0.01 * 1.1**i for i in range(60)], "kl/mean") == []  # grows slowly
    assert told([0.3, 3.7, 0.2, 3.3, 0.5] * 10, "kl/mean") == []  # few rows, large single values


def test_entropy_that_began_high_collapses_earlier():
    assert told([10.0] * 5 + [0.04] * 10, "policy/entropy") == [10]
    assert told([2.0] * 5 + [0.04] * 10, "policy/entropy") == []
    assert told([2.0] * 5 + [0.009, 0.02] * 10, "policy/entropy") == []


def test_the_gap_between_trainer_and_sampler_depends_on_dtype_and_age():
    gaps = [0.5] * 10
    assert told(gaps, "rollout/logprob_diff_max", watch=Health(health.GAP_BF16)) == []
    assert told(gaps, "rollout/logprob_diff_max", watch=Health(None)) == []
    assert told(gaps, "rollout/logprob_diff_max", **{"rollout/staleness": 1.0}) == []
    assert told(gaps, "rollout/logprob_diff_max", **{"rollout/staleness": 0.0}) == [3]


def test_a_healthy_run_tells_nothing():
    """What GRPO on addition showed, its base model cut at first, and 11 of 12 groups flat in the end."""
    watch = Health(health.GAP_FP32)
    rewards = "0.01 0.05 0.15 0.39 0.77 0.46 0.6 0.71 0.65 0.9 0.79 0.81 0.81 0.69 0.98 0.83 0.92 0.46 0.67 0.65"
    kls = "1e-10 0.14 0.06 0.14 0.21 0.18 1.16 0.19 1.66 0.37 0.35 0.18 0.4 0.44 0.29 0.82 0.22 0.45 0.65 0.34"
    entropies = "2.52 2.2 0.93 0.68 0.43 0.12 0.17 0.14 0.13 0.06 0.11 0.07 0.05 0.06 0.02 0.11 0.07 0.07 0.13 0.04"
    flat = "0.83 0.75 0.33 0.08 0.5 0.67 0.75 0.58 0.58 0.92 0.75 0.67 0.92 0.83 0.92 0.75 0.83 0.58 0.67 0.92"
    columns = {"reward/mean": rewards, "kl/mean": kls, "policy/entropy": entropies, "reward/flat_groups": flat}
    lines = zip(*(map(float, column.split()) for column in columns.values()), strict=True)
    for step, values in enumerate(lines):
        line = dict(zip(columns, values, strict=True)) | {
            "reward/std": 0.4, "response/truncated": max(0.0, 0.9 - 0.1 * step), "policy/kl_step": 0.0,
            "rollout/logprob_diff_max": 3e-5, "policy/bad_steps": 0.0,
        }  # fmt: skip
        assert watch.see(line) == []
    assert watch.conditions == 0


def test_rewards_without_an_opinion_are_told():
    assert told([0.0, 8.0, 8.0, 8.0], "reward/abstained") == [4]
    assert told([8.0] * 5, "reward/abstained", **{"reward/mean": 0.5}) == []  # of some rows only
