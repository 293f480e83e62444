"""Arithmetic with held-out pairs; reasoning-gym by name."""

from __future__ import annotations

import re

import pytest

from verl.config.errors import DataError
from verl.data.loader import PromptDataset
from verl.data.procedural import make_rows


def pairs(rows):
    return {tuple(sorted(map(int, re.findall(r"\d+", row["prompt"])))) for row in rows}


def test_questions_and_answers():
    rows = make_rows({"name": "arithmetic", "operations": ["+", "-", "*"], "size": 60})
    assert len(rows) == 60
    for row in rows:
        a, sign, b = re.fullmatch(r"What is (\d+) ([-+*]) (\d+)\?", row["prompt"]).groups()
        assert row["answer"] == str({"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign])


def test_the_splits_share_no_unordered_pair_whatever_the_seed():
    train = make_rows({"name": "arithmetic", "seed": 0})
    test = make_rows({"name": "arithmetic", "seed": 7, "split": "test"})
    assert not pairs(train) & pairs(test)
    assert len(pairs(train)) + len(pairs(test)) == 210  # of 0..19
    assert len(train) + len(test) == 400 and 40 <= len(test) <= 120  # every ordered question once
    assert len({row["prompt"] for row in train}) == len(train)


def test_seed_and_size():
    spec = {"name": "arithmetic", "low": 0, "high": 3}
    assert make_rows(spec) == make_rows(spec) != make_rows(spec | {"seed": 1})
    every = len(make_rows(spec))
    twice = [row["prompt"] for row in make_rows(spec | {"size": 2 * every})]
    assert all(twice.count(prompt) == 2 for prompt in twice)
    assert len(make_rows({"name": "arithmetic", "high": 10**6, "size": 50, "split": "test"})) == 50


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hihg": 9}, "hihg"),
        ({"low": 5, "high": 4}, "low 5 is above high 4"),
        ({"operations": ["/"]}, "operations"),
        ({"high": 10**6}, "say how many with `size`"),
    ],
)
def test_wrong_keys_and_values(wrong, said):
    with pytest.raises(DataError, match=said):
        make_rows({"name": "arithmetic", **wrong})


def test_an_unknown_set_is_a_data_set_name_with_its_own_keys():
    with pytest.raises(DataError, match="procedural sets arithmetic"):
        len(PromptDataset({"name": "arithmetics", "low": 1}))


def test_reasoning_gym_rows_can_be_scored_by_its_verifier():
    gym = pytest.importorskip("reasoning_gym")
    rows = list(PromptDataset({"name": "reasoning-gym", "task": "gcd", "size": 3, "seed": 1, "max_value": 50}))
    assert len(rows) == 3 and all(row["task"] == "gcd" for row in rows)
    score = gym.get_score_answer_fn("gcd")
    assert [score(row["answer"], row) for row in rows] == [1.0] * 3
    assert [row["metadata"]["source_dataset"] for row in rows] == ["gcd"] * 3
    assert score("no", rows[0]) < 0.5


def test_reasoning_gym_says_what_it_does_not_know():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match=r"no task 'gdc'; its tasks: .*gcd"):
        make_rows({"name": "reasoning-gym", "task": "gdc"})
    with pytest.raises(DataError, match=r"task 'gcd': .*no_such_key"):
        make_rows({"name": "reasoning-gym", "task": "gcd", "no_such_key": 1})


def test_reasoning_gym_absent(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(DataError, match="pip install"):
        make_rows({"name": "reasoning-gym", "task": "gcd"})
