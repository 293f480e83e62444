from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.rewards.rows import make_rows
from verl.config.errors import RequestError
from verl.rewards.match import bind

ROWS = make_rows(["one", "three"], answer=["1", "3"], choices=[["a"], ["b"]], text=["t0", "t1"])
COLUMNS = ("prompt", "answer", "choices", "text")


def calls(function: Any, **options: Any) -> list[tuple[tuple, dict]]:
    return [(call.args, call.kwargs) for call in bind(function, "f", COLUMNS, options).calls(ROWS)]


def test_singular_names_give_one_rows_values() -> None:
    def f(prompt, response, answer, prompt_text, prompt_ids, response_ids, finish_reason, truncated, row): ...

    first, second = calls(f)
    assert first[1] == dict(
        prompt="Q?",
        response="one",
        answer="1",
        prompt_text="<user>Q?<assistant>",
        prompt_ids=(1, 2),
        response_ids=(0, 1, 2),
        finish_reason="stop",
        truncated=False,
        row=ROWS[0],
    )
    assert second[1]["answer"] == "3"


def test_aliases_mean_the_response_even_beside_a_column_of_that_name() -> None:
    assert [kwargs for _, kwargs in calls(lambda completion, text: 0)] == [
        {"completion": "one", "text": "one"},
        {"completion": "three", "text": "three"},
    ]


def test_a_plural_name_makes_every_argument_a_list() -> None:
    (call,) = calls(lambda completions, answer, answers, choices, truncated: 0)
    assert call[1] == dict(
        completions=["one", "three"],
        answer=["1", "3"],
        answers=["1", "3"],
        choices=[["a"], ["b"]],
        truncated=[False, False],
    )


def test_a_column_whose_name_looks_plural_is_one_rows_value() -> None:
    assert [kwargs["choices"] for _, kwargs in calls(lambda response, choices: 0)] == [["a"], ["b"]]


@pytest.mark.parametrize(
    "function",
    [lambda x: 0, lambda x, limit=3: 0, lambda x, **rest: 0, lambda s, /: 0],
    ids=["x", "default", "rest", "/"],
)
def test_one_argument_with_another_name_gets_the_responses_text(function: Any) -> None:
    assert [args[0] if args else kwargs["x"] for args, kwargs in calls(function)] == ["one", "three"]


def test_builtin_functions_and_bound_methods_work() -> None:
    assert [args for args, _ in calls(len)] == [("one",), ("three",)]
    assert [kwargs for _, kwargs in calls(functools.partial(lambda answer, scale: 0, scale=2))] == [
        {"answer": "1"},
        {"answer": "3"},
    ]


def test_kwargs_get_everything_else() -> None:
    (_, kwargs), _ = calls(lambda response, **rest: 0)
    assert {"prompt", "answer", "choices", "finish_reason", "response_ids"} <= set(kwargs)
    assert kwargs["answer"] == "1" and "text" not in kwargs
    (_, kwargs) = calls(lambda completions, **rest: 0)[0]
    assert kwargs["answer"] == ["1", "3"] and "response" not in kwargs


def test_a_default_stays_where_nothing_matches() -> None:
    assert calls(lambda response, strict=True: 0)[0][1] == {"response": "one"}


def test_options_are_fixed_values() -> None:
    assert calls(lambda response, answer: 0, answer="9")[1][1] == {"response": "three", "answer": "9"}
    with pytest.raises(RequestError, match=r"reward f: it has no argument 'answr'; it has 'answer', 'response'"):
        calls(lambda response, answer: 0, answr="9")


def test_an_argument_that_nothing_matches_is_named_with_what_there_is() -> None:
    with pytest.raises(RequestError) as error:
        calls(lambda response, solution: 0)
    message = str(error.value)
    assert "reward f" in message and "'solution'" in message
    assert "answer" in message and "finish_reason" in message and "completions" in message
    with pytest.raises(RequestError, match="'x', 'y'"):
        calls(lambda x, y: 0)


def test_a_row_without_the_column_gives_none() -> None:
    rows = make_rows(["one"])
    assert bind(lambda answer: 0, "f", ("answer",), {}).calls(rows)[0].kwargs == {"answer": None}
