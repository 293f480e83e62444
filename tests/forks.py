"""Processes that start at once: forked from one that has imported everything (``tests/imports.py``).

``FORKS`` is the context for processes of the tests' own. With ``warm()``, workers of a run on several devices are
forked from there, too: their nursery goes through all but its start by ``subprocess`` and its imports.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import connection, context, forkserver, reduction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.cluster import nursery

ROOT = Path(__file__).parents[1]
MARK = "VERL_TEST_RUN"  # a file, named in the environment of all processes of a run, and held open by those forked


class _Process(context.ForkServerProcess):
    def start(self) -> None:
        serve()
        super().start()


class _Forks(context.ForkServerContext):
    Process = _Process


FORKS: Any = _Forks()


def serve() -> None:
    """The process to fork from, one for all, is there; it imports from the folder that it starts in."""
    FORKS.set_forkserver_preload(["tests.imports"])
    with contextlib.chdir(ROOT):
        forkserver.ensure_running()


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """Nurseries are forked. They end with the process that they are forked from, which ends with this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nursery, "_command", lambda *order: order)
        patch.setattr(nursery, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": _Forked}))
        yield


@contextlib.contextmanager
def cold(command: Any = nursery._command) -> Iterator[None]:
    """Nurseries are started as ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nursery, "_command", command)
        patch.setattr(nursery, "subprocess", subprocess)
        yield


class _Forked:
    """What a nursery asks of ``subprocess.Popen``."""

    def __init__(
        self, order: tuple[Any, ...], *, pass_fds: set[int], stdout: int, env: Mapping[str, str], **_: Any
    ) -> None:
        self._lock = threading.Lock()
        ends = {number: Descriptor(number) for number in pass_fds | {stdout}}
        self._process = FORKS.Process(target=_nurse, args=(order[1:], ends, stdout, dict(env), os.getcwd()))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        with self._lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.returncode) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("nursery", timeout or 0.0)
            connection.wait([self._process.sentinel], 0.05)
        return status

    def kill(self) -> None:
        self._process.kill()


class Descriptor:
    """A file descriptor of this process; in the process that it is sent to, that one's number for it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _here, (reduction.DupFd(self._number),)


def _here(sent: Any) -> int:
    return sent.detach()


def _nurse(
    order: tuple[int, Sequence[str], Sequence[tuple[Any, ...]]],
    ends: dict[int, int],
    log: int,
    environment: dict[str, str],
    folder: str,
) -> None:
    orders, preload, workers = order
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if MARK in environment:
        os.open(environment[MARK], os.O_RDONLY)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    for output in (1, 2):
        os.dup2(ends[log], output)
    theirs = [
        (ends[control], {rank: ends[end] for rank, end in peers.items()}, ends[out]) for control, peers, out in workers
    ]
    nursery.nurse(os.getppid(), ends[orders], preload, theirs)
