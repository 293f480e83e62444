"""From what ``reward_fn`` says to a function that can be called, and from what it returned to numbers per row."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from verl.config.errors import RequestError
from verl.rewards import rules
from verl.rewards.calls import Outcome, RewardShapeError, Target, describe, load

if TYPE_CHECKING:
    from verl.rewards.base import RewardRow


_LONGEST = 1e9  # seconds; the system's own waits take not much more


class Model(ABC):
    """What scores rows in a function's place, all of them in one call."""

    @abstractmethod
    def evaluate(self, rows: Sequence[RewardRow]) -> tuple[list[float], int]:
        """One number per row, and how many rows were cut to the model's limit."""


@dataclass(frozen=True)
class RewardFunction:
    """One reward: ``name`` in metrics, ``label`` in messages, ``target`` where it runs in a scoring process.

    ``model``: what scores in the function's place.
    """

    name: str
    label: str
    function: Callable
    options: dict[str, Any]
    target: Target | None  # None: runs in this process
    model: Model | None = None


@dataclass(frozen=True)
class Score:
    """One row's result: ``value`` (None: no opinion), numbers returned beside it, or the reason why it failed."""

    value: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    timed_out: bool = False
    trace: str = ""

    @staticmethod
    def failed(outcome: Outcome) -> Score:
        reason = "timed out" if outcome.timed_out else f"failed: {outcome.error}"
        return Score(failure=reason, timed_out=outcome.timed_out, trace=outcome.trace)


def resolve(spec: Any, limit: float | None = None) -> RewardFunction:
    """A rule's name, ``"module:function"``, a callable, a ``Model``, or ``{name: one of these, option: value, ...}``.

    ``as`` beside the options is what metrics call it. ``limit``: seconds that one call may take; a rule's own
    ``timeout`` must stay under it.
    Raises ``RequestError`` when it can't be found, imported or set up as asked.
    """
    options: dict[str, Any] = {}
    called = None
    if isinstance(spec, dict):
        if "name" not in spec:
            raise RequestError(f"reward_fn: {spec!r} has no name (a rule, or 'module:function')")
        options = {key: value for key, value in spec.items() if key not in ("name", "as")}
        called, spec = spec.get("as"), spec["name"]
    reward = _found(spec, options, limit)
    if called is None:
        return reward
    return replace(reward, name=called, label=reward.label if reward.model is None else f"model {called!r}")


def _found(spec: Any, options: dict[str, Any], limit: float | None) -> RewardFunction:
    if isinstance(spec, Model):
        return RewardFunction("reward_model", "model", spec.evaluate, {}, None, spec)
    if callable(spec):
        name = getattr(spec, "__name__", type(spec).__name__).strip("<>")
        return RewardFunction(name, name, spec, options, None)
    if not isinstance(spec, str):
        raise RequestError(f"reward_fn: {spec!r} is neither a rule's name, nor 'module:function', nor a callable")
    if ":" in spec:
        module, _, path = spec.partition(":")
        return RewardFunction(path, spec, imported(spec, "reward_fn"), options, Target(module, path))
    return _rule(spec, options, limit)


def _rule(name: str, options: dict[str, Any], limit: float | None) -> RewardFunction:
    function = rules.IN_PROCESS.get(name) or rules.IN_WORKERS.get(name)
    if function is None:
        known = sorted((*rules.IN_PROCESS, *rules.IN_WORKERS))
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RequestError(f"reward_fn: {name!r} is neither 'module:function' nor a rule ({', '.join(known)}){hint}")
    package = rules.PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise RequestError(f"reward rule {name!r} needs the package: pip install {package.replace('_', '-')}")
    known_options = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    names = [p.name for p in known_options]
    if unknown := sorted(set(options) - set(names)):
        raise RequestError(f"reward rule {name!r} has no option {unknown[0]!r}; it has {', '.join(names) or 'none'}")
    # every option is fixed here, so that none is ever matched with a data column of the same name
    fixed = {p.name: options.get(p.name, p.default) for p in known_options}
    if missing := [key for key, value in fixed.items() if value is inspect.Parameter.empty]:
        raise RequestError(f"reward rule {name!r} needs the option {', '.join(map(repr, missing))}")
    try:
        _check_types(function, fixed)
        rules.CHECKS.get(name, lambda options: None)(fixed)
    except (ValueError, TypeError) as error:
        raise RequestError(f"reward rule {name!r}: {error}") from error
    most, whose = (_LONGEST, "") if limit is None else (limit, "reward_timeout ")
    if fixed.get("timeout", 0.0) >= most:
        raise RequestError(f"reward rule {name!r}: timeout {fixed['timeout']:g} must be under {whose}{most:g}")
    imports = () if package is None else (package,)
    target = Target(rules.__name__, name, imports) if name in rules.IN_WORKERS else None
    return RewardFunction(name, f"rule {name!r}", function, fixed, target)


def _check_types(function: Callable, options: Mapping[str, Any]) -> None:
    """``ValueError`` where an option is of another type than the rule's signature says: a text "no" would be true."""
    from pydantic import (
        ConfigDict,
        TypeAdapter,
        ValidationError,
    )  # scoring processes import this module, and load light
    from pydantic.fields import FieldInfo

    from verl.config.schema import rule

    types = get_type_hints(function, localns={"RewardRow": object})
    for name, value in options.items():
        try:
            adapter = TypeAdapter[Any](types[name], config=ConfigDict(strict=True, allow_inf_nan=False))
            adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{name} is {value!r}: must be {rule(FieldInfo.from_annotation(types[name]))}") from error


def unique(functions: Iterable[RewardFunction]) -> list[RewardFunction]:
    """The same functions under names that differ: a second ``score`` becomes ``score_2``."""
    taken: set[str] = set()
    named = []
    for function in functions:
        name, n = function.name, 1
        while name in taken:
            n += 1
            name = f"{function.name}_{n}"
        taken.add(name)
        named.append(replace(function, name=name))
    return named


def imported(spec: str, key: str) -> Callable:
    """The function that ``module:function`` names; ``RequestError`` that begins with ``key`` if there is none."""
    module, _, path = spec.partition(":")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # a console script doesn't look in the current directory by itself
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise RequestError(
                f"{key} {spec!r}: no module {error.name!r} in {os.getcwd()} or among the installed ones"
            ) from error
        raise RequestError(f"{key} {spec!r}: importing {module} failed: {error}") from error
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` may end itself
        raise RequestError(f"{key} {spec!r}: importing {module} failed: {type(error).__name__}: {error}") from error
    try:
        function = load(Target(module, path))
    except AttributeError as error:
        where = getattr(sys.modules[module], "__file__", None) or module
        raise RequestError(f"{key} {spec!r}: {where} has no {path!r}") from error
    if not callable(function):
        raise RequestError(f"{key} {spec!r} is a {type(function).__name__}, not a function")
    return function


def read_row(value: Any, label: str, where: str) -> Score:
    """What one row's call returned: a number, a bool, None, or ``{score: one of these, other numbers}``.

    NaN and infinities are failures; anything else raises ``RewardShapeError``. Beside the score, values that are no
    finite numbers are left out.
    """
    extra: dict[str, float] = {}
    if isinstance(value, dict):
        if "score" not in value:
            raise RewardShapeError(f"reward {label} on {where}: the returned dict has no 'score', only {sorted(value)}")
        extra = {k: float(v) for k, v in value.items() if k != "score" and _is_number(v) and math.isfinite(v)}
        value = value["score"]
    if value is None:
        return Score(None, extra)
    if not _is_number(value):
        raise RewardShapeError(f"reward {label} on {where}: expected one number, received {describe(value)}")
    if not math.isfinite(value):
        return Score(None, extra, f"returned {value}")
    return Score(float(value), extra)


def read_batch(value: Any, label: str, rows: Sequence[str]) -> list[Score]:
    """What a batch function returned: a list, tensor or array with a value per row; ``(N, 1)`` is read as ``(N,)``.

    ``rows`` names the rows. Raises ``RewardShapeError`` with the expected and the received number otherwise.
    """
    expected = f"reward {label}: expected {len(rows)} values, one per row,"
    if not isinstance(value, list):
        raise RewardShapeError(f"{expected} received {describe(value)}")
    if len(value) != len(rows):
        raise RewardShapeError(f"{expected} received {len(value)}")
    if all(isinstance(item, list) and len(item) == 1 for item in value):
        value = [item[0] for item in value]
    return [read_row(item, label, where) for item, where in zip(value, rows, strict=True)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))
