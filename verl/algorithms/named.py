"""Calling a pure function by its argument names: they say what it reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def call(function: Callable[..., T], facts: Mapping[str, Any]) -> T:
    """``function`` with those of ``facts`` that it names. ``KeyError`` when one without a default isn't there."""
    required, optional = _names(function)
    if missing := [name for name in required if name not in facts]:
        raise KeyError(f"{function.__name__} reads {', '.join(missing)}, which this flow doesn't have")
    return function(**{name: facts[name] for name in (*required, *optional) if name in facts})


@cache
def _names(function: Callable[..., Any]) -> tuple[list[str], list[str]]:
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty]
    return required, [p.name for p in parameters if p.default is not p.empty]
