"""Calling reward functions: sync or async, in this process or a scoring process, results as plain data.

Imported by scoring processes too, so it imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import numbers
import os
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from verl.config.errors import RewardError
from verl.rewards.match import Call


class RewardShapeError(RewardError, ValueError):
    """A reward returned something that can't be matched with the rows: wrong count or wrong kind."""


GRACE = 1.0  # seconds after which calls that stop themselves (async ones) are stopped from outside
Emit = Callable[[int, "Outcome"], None]


@dataclass(frozen=True)
class Target:
    """A function by name (dotted: reached through classes), and packages that it imports when it first runs."""

    module: str
    path: str
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of one call: ``value`` as plain Python data, or why there is none."""

    value: Any = None
    error: str | None = None  # exception and where it was raised, or how the process ended
    timed_out: bool = False
    trace: str = ""  # full traceback
    misshapen: bool = False  # what came back is no score per row, which no policy goes on without

    @property
    def ok(self) -> bool:
        return self.error is None and not self.timed_out


@dataclass(frozen=True)
class Opaque:
    """Stands for a returned object that is no score (and may not be picklable)."""

    kind: str


def describe(value: Any) -> str:
    """A returned thing in a few words."""
    if isinstance(value, Opaque):
        return f"a {value.kind}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    kind = "None" if value is None else f"a bare {type(value).__name__} {value!r}"
    return kind if len(kind) <= 80 else f"{kind[:77]}..."


def plain(value: Any) -> Any:
    """Numbers, strings, None, lists and dicts out of what a reward returned: tensors and arrays become lists."""
    if callable(getattr(value, "tolist", None)):
        return plain(value.tolist())
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (numbers.Real, Decimal)):
        return float(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return Opaque(type(value).__name__)


def load(target: Target) -> Callable:
    """The function that ``target`` names. Importing happens here, so that no call's time limit pays for it."""
    for package in target.imports:
        importlib.import_module(package)
    found: Any = importlib.import_module(target.module)
    for part in target.path.split("."):
        found = getattr(found, part)
    return found


def is_async(function: Callable) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async
    )


def execute(
    function: Callable,
    calls: Sequence[Call],
    limit: float | None,
    emit: Emit,
    runner: asyncio.Runner,
    eager: bool = False,
) -> None:
    """Make the calls and ``emit`` each one's number and outcome as it ends.

    Async calls run side by side and are cancelled after ``limit`` seconds each; others run in order, unlimited. With
    ``eager`` the first failure ends it all.
    """
    if is_async(function):

        async def one(i: int, call: Call) -> None:
            outcome = await _finish(function(*call.args, **call.kwargs), limit)
            emit(i, outcome)
            if eager and not outcome.ok:
                raise _Stop

        async def every() -> None:
            try:
                async with asyncio.TaskGroup() as group:  # one's _Stop cancels the others
                    for i, call in enumerate(calls):
                        group.create_task(one(i, call))
            except* _Stop:
                pass

        runner.run(every())
        return
    for i, call in enumerate(calls):
        try:
            value = function(*call.args, **call.kwargs)
            outcome = runner.run(_finish(value, limit)) if inspect.isawaitable(value) else Outcome(plain(value))
        except BaseException as error:
            outcome = failed(error)
        emit(i, outcome)
        if eager and not outcome.ok:
            return


class _Stop(Exception):
    """Ends the calls that run side by side with a failed one."""


async def _finish(value: Any, limit: float | None) -> Outcome:
    scope = asyncio.timeout(limit)
    try:
        async with scope:
            return Outcome(plain(await value))
    except BaseException as error:
        if scope.expired():
            return Outcome(timed_out=True)
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # by a failed neighbour, not by the function itself
            raise
        return failed(error)


def failed(error: BaseException) -> Outcome:
    """The outcome of a call that raised."""
    if isinstance(error, RewardShapeError):
        return Outcome(error=str(error), misshapen=True)
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" ({os.path.basename(frame.filename)}:{frame.lineno})" for frame in where)
    return Outcome(error=f"{type(error).__name__}: {error}{place}", trace="".join(traceback.format_exception(error)))


class InProcess:
    """Runs a Python callable in a thread of this process, one batch at a time, so that it may keep state.

    A synchronous call that overruns can't be stopped, only left behind: that ends the run whatever the policy.
    """

    def __init__(self, function: Callable, label: str) -> None:
        self._function, self._label = function, label
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._runner = asyncio.Runner()  # one event loop for all batches: clients made in it stay usable

    def run(self, calls: Sequence[Call], limit: float | None, *, eager: bool) -> list[Outcome | None]:
        """Outcomes in the calls' order; ``eager``: the first failure ends it, and some are missing.

        Raises ``RewardError`` when a call overruns ``limit`` seconds and can't be cancelled.
        """
        with self._lock:
            ended: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
            work = (self._function, calls, limit, lambda i, outcome: ended.put((i, outcome)), self._runner, eager)
            self._thread = threading.Thread(target=execute, args=work, daemon=True, name="reward")
            self._thread.start()
            outcomes: list[Outcome | None] = [None] * len(calls)
            for done in range(len(calls)):
                try:  # async calls end by themselves at the limit
                    i, outcome = ended.get(timeout=None if limit is None else limit + GRACE)
                except queue.Empty:
                    raise RewardError(
                        f"reward {self._label} did not return within {limit:g} s (reward_timeout) in call {done} of "
                        f"{len(calls)}. A Python callable can't be stopped: pass it as 'module:function', which runs "
                        "in a process that can, or set reward_timeout: null"
                    ) from None
                outcomes[i] = outcome
                if eager and not outcome.ok:
                    break
            self._thread.join(GRACE)  # it has yet to leave the event loop
        return outcomes

    def close(self) -> None:
        if self._lock.acquire(blocking=False):  # else a batch is being scored, in a thread that ends with the process
            if self._thread is None or not self._thread.is_alive():  # a stuck thread still owns the loop
                self._runner.close()
            self._lock.release()
