"""Scoring that can be stopped: reward calls in fresh interpreters, killed and replaced when they hang or die.

A reward that loops inside one C call (a regular expression) holds the interpreter lock, so neither a thread nor a
signal handler could stop it: only another process can. Such a process starts from a bare interpreter (it doesn't
run the caller's script again) and imports what the functions need, never torch by itself. This module serves both
ends and is imported by both.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from verl.config.devices import cores
from verl.config.errors import RewardError
from verl.rewards.calls import GRACE, Emit, Outcome, Target, execute, failed, load
from verl.rewards.match import Call

START_LIMIT = 120.0  # seconds for a process to import the reward functions
ASYNC_ROWS = 32  # rows that one process awaits side by side
TIMED_OUT = "timed out"
_PR_SET_PDEATHSIG = 1


def default_size() -> int:
    """Scoring processes: one per core this process may use, at most 4."""
    return min(4, cores())


def serve(handle: int) -> None:
    """A scoring process's whole life: load the functions, answer tasks, end when the other side closes."""
    if sys.platform == "linux":  # a call that hangs doesn't outlive who asked for it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(handle)
    targets, limit = pickle.loads(connection.recv_bytes())
    try:
        functions = [load(target) for target in targets]
        ready = Outcome()
    except BaseException as error:
        ready = failed(error)
    with asyncio.Runner() as runner, open(os.devnull, "w") as nowhere:
        try:
            connection.send_bytes(pickle.dumps(ready))
            while ready.ok:
                number, calls = pickle.loads(connection.recv_bytes())
                if limit is not None:  # ends this process even if nobody is left to kill it; needs no interpreter lock
                    faulthandler.dump_traceback_later(limit + 5 * GRACE, exit=True, file=nowhere)
                emit: Emit = lambda i, outcome: connection.send_bytes(pickle.dumps((i, outcome)))  # noqa: E731
                execute(functions[number], calls, limit, emit, runner)
                faulthandler.cancel_dump_traceback_later()
        except (EOFError, ConnectionError):
            return


class Job:
    """The calls of one function on one batch, filled in by several threads. ``eager``: the first failure ends it."""

    def __init__(self, size: int, eager: bool) -> None:
        self._outcomes: list[Outcome | None] = [None] * size
        self._missing, self._eager = size, eager
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()

    @property
    def over(self) -> bool:
        return self._done.is_set()

    def put(self, i: int, outcome: Outcome) -> None:
        with self._lock:
            self._outcomes[i] = outcome
            self._missing -= 1
            if self._missing == 0 or (self._eager and not outcome.ok):
                self._done.set()

    def abort(self, error: Exception) -> None:
        """End it with an error that ``wait`` raises."""
        self._error = error
        self._done.set()

    def cancel(self) -> None:
        """Calls that haven't begun won't; no effect on a job that is over."""
        self._done.set()

    def wait(self) -> list[Outcome | None]:
        """Outcomes in the calls' order; some are missing only where an eager job ended at a failure."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return list(self._outcomes)


@dataclass(frozen=True)
class _Task:
    job: Job
    number: int  # of the function
    calls: list[tuple[int, Call]]  # with their numbers in the job
    grace: float = 0.0  # seconds beyond the limit, for calls that stop themselves
    again: bool = False  # a process has ended over it


class _Process:
    """Our end of one scoring process. It leads its own session: Ctrl-C passes it by, and its children die with it."""

    def __init__(self, targets: Sequence[Target], limit: float | None) -> None:
        ours, theirs = socket.socketpair()
        paths = [path for path in sys.path if isinstance(path, str)]
        boot = f"import sys; sys.path[:] = {paths!r}; from verl.rewards.pool import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", boot],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._ready = False
        self._send((list(targets), limit))

    def _send(self, message: Any) -> None:
        self._connection.send_bytes(pickle.dumps(message))

    def await_ready(self) -> None:
        """Raises ``RewardError`` when the functions can't be imported there."""
        if self._ready:
            return
        if not self._connection.poll(START_LIMIT):
            raise RewardError(f"a scoring process could not import the rewards within {START_LIMIT:g} s")
        try:
            outcome: Outcome = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise RewardError(f"a scoring process could not start ({self.kill()})") from None
        if not outcome.ok:
            raise RewardError(f"a scoring process could not import the rewards: {outcome.error}\n{outcome.trace}")
        self._ready = True

    def run(self, number: int, calls: Sequence[Call], limit: float | None, emit: Emit) -> str | None:
        """Make the calls within ``limit`` seconds; ``None`` when all were answered, else why not."""
        deadline = None
        try:
            self._send((number, list(calls)))
            if limit is not None:
                deadline = time.monotonic() + limit
            for _ in calls:
                if not self._connection.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    return TIMED_OUT
                emit(*pickle.loads(self._connection.recv_bytes()))
        except (EOFError, ConnectionError):
            return f"the scoring process ended ({self.kill()})"
        return None

    def kill(self) -> str:
        """End the process and all it started; gives its exit status in words."""
        if self._process.returncode is None:  # not reaped: its number can't be another's yet
            with contextlib.suppress(ProcessLookupError):  # ended by itself, and nothing that it started is left
                os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        return f"signal {-status}" if status < 0 else f"exit status {status}"

    def discard(self) -> None:
        self.kill()
        self._connection.close()


class _Slot:
    """One place in the pool: a thread, and the process that it feeds, replaces when it must, and keeps warm."""

    def __init__(self, tasks: queue.SimpleQueue[_Task | None], targets: Sequence[Target], limit: float | None) -> None:
        self._tasks, self._targets, self._limit = tasks, targets, limit
        self._lock = threading.Lock()  # guards _process against close()
        self._closed = False
        self._process: _Process | None = None
        self.thread = threading.Thread(target=self._work, daemon=True, name="reward-pool")
        self.thread.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()  # the thread sees its end of the connection close

    def _current(self) -> _Process:
        with self._lock:
            if self._closed:
                raise RewardError("the rewards were closed while they scored")
            if self._process is None:
                self._process = _Process(self._targets, self._limit)
            return self._process

    def _replace(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.discard()
            self._process = None
        self._current()

    def _work(self) -> None:
        with contextlib.suppress(Exception):  # import early; what fails here fails again at the first task, and is told
            self._current()
        while (task := self._tasks.get()) is not None:
            if task.job.over:
                continue
            try:
                self._serve(task)
            except RewardError as error:
                task.job.abort(error)
            except Exception as error:  # the system gives no process, or a row holds what can't be sent
                task.job.abort(RewardError(f"a scoring process can't be used: {type(error).__name__}: {error}"))
        with self._lock:
            if self._process is not None:
                self._process.discard()

    def _serve(self, task: _Task) -> None:
        process = self._current()
        process.await_ready()
        limit = None if self._limit is None else self._limit + task.grace
        left = dict(task.calls)
        order = list(left)

        def emit(i: int, outcome: Outcome) -> None:
            task.job.put(order[i], outcome)
            del left[order[i]]

        problem = process.run(task.number, list(left.values()), limit, emit)
        if problem is None:
            return
        self._replace()
        if len(task.calls) > 1:  # which of them it was shows when each goes alone
            for item in left.items():
                self._tasks.put(_Task(task.job, task.number, [item], task.grace))
            return
        timed_out = problem == TIMED_OUT
        if not timed_out and not task.again:  # it need not have been the call: the system kills where memory runs out
            self._tasks.put(replace(task, again=True))
            return
        for i in left:
            task.job.put(i, Outcome(error=None if timed_out else problem, timed_out=timed_out))


class Pool:
    """``size`` scoring processes that all hold the same functions; they start with the pool and end with it."""

    def __init__(self, targets: Sequence[Target], limit: float | None, size: int) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._slots = [_Slot(self._tasks, targets, limit) for _ in range(size)]
        # runs on close(), when the pool is dropped, and at interpreter exit: whichever comes first
        self._finalizer = weakref.finalize(self, _close, self._tasks, self._slots)

    def submit(self, number: int, calls: Sequence[Call], *, together: bool, eager: bool) -> Job:
        """Queue calls of function ``number``; ``together``: several at a time in one process (async functions)."""
        job = Job(len(calls), eager)
        numbered = list(enumerate(calls))
        step = max(1, min(ASYNC_ROWS, -(-len(calls) // len(self._slots)))) if together else 1
        for start in range(0, len(numbered), step):
            self._tasks.put(_Task(job, number, numbered[start : start + step], GRACE if together else 0.0))
        return job

    def close(self) -> None:
        """End every process; batches still being scored fail. A second call does nothing."""
        self._finalizer()


def _close(tasks: queue.SimpleQueue[_Task | None], slots: Sequence[_Slot]) -> None:
    for slot in slots:
        slot.close()
    for _ in slots:
        tasks.put(None)
    for slot in slots:
        if slot.thread is not threading.current_thread():
            slot.thread.join(timeout=5)
