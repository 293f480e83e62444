"""docs/rewards.md tells every rule, option and name, and its last example runs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from verl.rewards import match, rules
from verl.rewards.model import _PAIR_TYPES

TEXT = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


def test_every_rule_and_option_is_told() -> None:
    for name, function in (rules.IN_PROCESS | rules.IN_WORKERS).items():
        (line,) = re.findall(rf"^\| `{name}`.*$", TEXT, re.MULTILINE)
        assert (" * |" in line) == (name in rules.IN_WORKERS)
        for option in inspect.signature(function).parameters.values():
            assert option.kind is not option.KEYWORD_ONLY or f"`{option.name}`" in line


def test_every_argument_name_is_told() -> None:
    for name in (*match.ROW_VALUES, *match._ALIASES, *match._PLURALS):
        assert f"`{name}`" in TEXT or name == "prompt_texts"
    assert len(_PAIR_TYPES) == 11


def test_the_last_example_runs(capsys) -> None:
    exec(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[-1], {})
    assert capsys.readouterr().out.startswith("[0.92] {'numeric': [1.0], 'len': [8.0]}")
