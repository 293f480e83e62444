from __future__ import annotations

import json
import time
from typing import Any

import pytest
import reasoning_gym

from tests.rewards.rows import make_rows
from verl.config.errors import RequestError
from verl.rewards import rules
from verl.rewards.base import Rewards
from verl.rewards.functions import resolve


@pytest.mark.parametrize(
    ("response", "answer", "options", "expected"),
    [
        ("It is 12.", "12", {}, 1),
        ("5 + 7 = 12", 12, {}, 1),
        ("first 12, then 13", "12", {}, 0),
        ("#### 1,234", "1234", {}, 1),
        ("one of 1,2,3", "3", {}, 1),
        ("-4", -4, {}, 1),
        ("10-4", "4", {}, 1),
        ("x = −4", "-4", {}, 1),
        ("12.50", "12.5", {}, 1),
        ("12.5", "12", {}, 0),
        ("12 of 12.5", "12", {"integer": True}, 1),
        ("about 3.14", "3.1416", {"tolerance": 0.01}, 1),
        ("no idea", "3", {}, 0),
        ("so\n#### 7", "...\n#### 7", {}, 1),
        ("9" * 5000, "9" * 5000, {}, 1),
    ],
)
def test_numeric(response: str, answer: Any, options: dict, expected: float) -> None:
    assert rules.numeric(response, answer, False, **options) == expected


def test_numeric_pays_a_cut_answer_as_told() -> None:
    assert rules.numeric("it is 5", "5", True) == 1.0
    assert rules.numeric("it is 5", "5", True, cut_score=0.5) == 0.5
    assert rules.numeric("it is 6", "5", True, cut_score=0.5) == 0.0


def test_numeric_refuses_an_answer_without_number() -> None:
    with pytest.raises(ValueError, match="'five' holds no number"):
        rules.numeric("5", "five", False)


def test_numeric_is_linear_in_the_text() -> None:
    start = time.perf_counter()
    rules.numeric("1,111" * 40_000 + "." + "1" * 200_000 + "-" * 200_000, "1", False)
    assert time.perf_counter() - start < 10


def test_exact() -> None:
    assert rules.exact(" Paris\n", "Paris") == 1.0
    assert rules.exact("paris", "Paris") == 0.0
    assert rules.exact("paris", "Paris", ignore_case=True) == 1.0
    with pytest.raises(ValueError, match="no answer"):
        rules.exact("None", None)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a</think>\n<answer>b</answer>", 1),
        ("<think></think><answer></answer>", 1),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think><answer>b</answer> more", 0),
        ("so <think>a</think><answer>b</answer>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b", 0),
        ("", 0),
    ],
)
def test_format(response: str, expected: float) -> None:
    assert rules.format(response) == expected


@pytest.mark.parametrize(("tokens", "expected"), [(60, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (150, -1.0)])
def test_length(tokens: int, expected: float) -> None:
    assert rules.length(range(tokens), max_tokens=100, buffer=20) == expected


def test_regex() -> None:
    assert rules.regex("so Answer: 5", pattern=r"Answer: \d") == 1.0
    assert rules.regex("so Answer: 5", pattern=r"Answer: \d", full=True) == 0.0
    assert rules.regex("Answer: 5 .", "5", pattern=r"Answer: (?P<answer>\S+)") == 1.0
    assert rules.regex("Answer: 6 .", "5", pattern=r"Answer: (?P<answer>\S+)") == 0.0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("numerical", "did you mean 'numeric'"),
        ({"name": "numeric", "integr": True}, "no option 'integr'; it has integer, tolerance, cut_score"),
        ({"name": "exact", "answer": 1}, "no option 'answer'"),
        ({"name": "exact", "ignore_case": "no"}, "ignore_case is 'no': must be true or false"),
        ({"name": "regex", "pattern": "a", "full": 1}, "full is 1: must be true or false"),
        ({"name": "format", "tags": "think"}, "tags is 'think': must be a list, each a text"),
        ({"name": "format", "tags": 5}, "tags is 5"),
        ({"name": "numeric", "tolerance": "abc"}, "tolerance is 'abc': must be a number"),
        ({"name": "numeric", "tolerance": -1}, "tolerance -1 must be at least 0"),
        ({"name": "code", "memory_mb": 64.5}, "memory_mb is 64.5: must be an integer"),
        ({"name": "http", "url": "http://h", "timeout": 1e10}, "must be under 1e\\+09"),
        ("regex", "needs the option 'pattern'"),
        ({"name": "regex", "pattern": "("}, "pattern '\\(' is invalid"),
        ({"name": "length", "max_tokens": 5, "buffer": 0}, "buffer 0"),
        ({"rule": "numeric"}, "has no name"),
        (3, "3 is neither"),
        ("no_such_module_x:score", "no module 'no_such_module_x'"),
        ("tests.rewards.graders:scor", r"graders.py has no 'scor'"),
        ("tests.rewards.graders:FOREVER", "is a float, not a function"),
    ],
)
def test_wrong_rewards_are_told_at_once(spec: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        resolve(spec)


def test_a_module_that_fails_to_import_says_why(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_grader.py").write_text("import no_such_thing_y\n")
    (tmp_path / "worse_grader.py").write_text("raise RuntimeError('no key')\n")
    (tmp_path / "script_grader.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="importing broken_grader failed: No module named 'no_such_thing_y'"):
        resolve("broken_grader:score")
    with pytest.raises(RequestError, match="importing worse_grader failed: RuntimeError: no key"):
        resolve("worse_grader:score")
    with pytest.raises(RequestError, match="importing script_grader failed: SystemExit: 0"):
        resolve("script_grader:score")


def test_math_and_gym_run_in_scoring_processes() -> None:
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)[0]
    gym = make_rows(
        [f"so <answer>{entry['answer']}</answer>", entry["answer"], "<answer>-1</answer>"],
        answer=[entry["answer"]] * 3,
        metadata=[entry["metadata"], json.dumps(entry["metadata"]), entry["metadata"]],
    )
    latex = make_rows(
        ["so $0.5$", r"\boxed{\frac{1}{3}}", "unsure"],
        answer=[r"\frac{1}{2}"] * 3,
        metadata=[{"source_dataset": "chain_sum"}] * 3,
    )
    with Rewards(["math", "reasoning_gym"], processes=1) as rewards:
        assert rewards.score(latex).per_reward["math"] == [1.0, 0.0, 0.0]
        right, also, wrong = rewards.score(gym).per_reward["reasoning_gym"]
    assert right == also == 1.0 and wrong is not None and wrong < 0.1
