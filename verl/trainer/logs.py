"""Whose a message of the log is, where several runs are alive in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Concatenate, ParamSpec, TypeVar

R = TypeVar("R")
P = ParamSpec("P")
T = TypeVar("T")
RUN: ContextVar[Any] = ContextVar("run", default=None)
"""Whose messages these are. ``None``: nobody knows, as in a thread of a library's, so they are everyone's."""


def logged(method: Callable[Concatenate[R, P], T]) -> Callable[Concatenate[R, P], T]:
    """A method of a run: what is logged in it is the run's, also in tasks and in threads that get its context."""

    @functools.wraps(method)
    def call(run: R, /, *args: P.args, **kwargs: P.kwargs) -> T:
        token = RUN.set(run)
        try:
            return method(run, *args, **kwargs)
        finally:
            RUN.reset(token)

    return call
