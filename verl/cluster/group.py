"""Worker groups: objects that live one per device, called by rank, whatever process or machine hosts them.

``Inline`` hosts one in this process; ``processes.Processes`` starts processes of this machine, ``ray.RayGroup`` actors
of a cluster. Nothing here knows what the objects do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import platform
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Protocol

from verl.config.errors import RequestError, RunError

CALLS = 16  # calls that one worker serves side by side; the objects themselves decide what has to wait


class WorkerLost(RunError):
    """A worker died or stopped answering. The group is of no more use; a new one may be started."""


@dataclass(frozen=True)
class Spec:
    """A worker to be started: its ``device`` (``"cpu"``, ``"cuda:1"``) and what it does, for logs and errors."""

    device: str
    role: str
    node: str | None = None  # the machine that must host it, by the cluster's name for it; None: any


@dataclass(frozen=True)
class Place:
    """Where a worker runs."""

    rank: int
    device: str
    role: str
    node: str
    pid: int

    def __str__(self) -> str:
        return f"worker {self.rank} ({self.role} on {self.device} of {self.node}, process {self.pid})"

    def mark(self, error: BaseException) -> None:
        """Say in ``error.place`` that it was raised here, unless it came from another place."""
        with contextlib.suppress(AttributeError):  # a class with slots
            error.place = getattr(error, "place", self)  # type: ignore[attr-defined]


def portable(error: BaseException, place: Place) -> Exception:
    """What was raised at ``place``, as any process can unpickle and raise it: marked, the traceback in a note.

    Class and message stay where the class is a module's own, is rebuilt from its ``args`` and ends no process or loop;
    else it becomes a ``RequestError`` if it was one, or a ``RunError``.
    """
    told: Exception | None = None
    with contextlib.suppress(Exception):
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            rebuilt = pickle.loads(pickle.dumps(error))
            told = rebuilt if (type(rebuilt), str(rebuilt)) == (type(error), str(error)) else None
    if told is None:
        kind = RequestError if isinstance(error, RequestError) else RunError
        told = kind(f"{type(error).__name__}: {error}")
    if isinstance(getattr(error, "place", None), Place):  # it came from a peer, with its traceback
        told.add_note(f"called by {place}")
    else:
        told.add_note(f"in {place}\n{''.join(traceback.format_exception(error)).rstrip()}")
    place.mark(told)
    return told


class Peer(Protocol):
    """Another worker of the group, as a worker sees it."""

    def call(self, method: str, *args: Any) -> Any:
        """The result of the method there; waits for it."""


@dataclass(frozen=True)
class Context:
    """What a worker's factory is told: who it is, and how to reach the others."""

    rank: int
    size: int
    device: str
    peer: Callable[[int], Peer]
    meet: str | None  # ``init_method`` for torch.distributed; None: this worker is alone


Factory = Callable[..., Any]
"""``factory(context, *args)`` makes the object; a function of a module, found again by its name."""


class WorkerGroup(Protocol):
    """``places`` by rank. A call that raises there raises the same here, its attribute ``place`` says where; one to a
    lost worker raises ``WorkerLost``, and then so do all that wait, whoever they wait for: work that spans workers
    would never end."""

    places: list[Place]

    async def call(self, rank: int, method: str, *args: Any) -> Any:
        """``method(*args)`` of that worker's object. Several calls may run side by side, each on a thread there."""

    def close(self) -> None:
        """End the workers and let go of everything; a second call does nothing."""


class Inline:
    """The one worker of a group of one, in this process. Arguments are passed as they are, not copied."""

    def __init__(self, factory: Factory, args: tuple[Any, ...], spec: Spec) -> None:
        self.object = factory(Context(0, 1, spec.device, self._no_peer, None), *args)
        self.places = [Place(0, spec.device, spec.role, platform.node(), os.getpid())]
        self._threads = ThreadPoolExecutor(CALLS, "verl-call")

    async def call(self, rank: int, method: str, *args: Any) -> Any:
        assert rank == 0
        loop, context = asyncio.get_running_loop(), copy_context()
        try:
            return await loop.run_in_executor(self._threads, lambda: context.run(getattr(self.object, method), *args))
        except Exception as error:
            self.places[0].mark(error)
            raise

    def close(self) -> None:
        if hasattr(self.object, "close"):
            self.object.close()
        self._threads.shutdown(wait=False, cancel_futures=True)  # a second Ctrl-C waits for nothing

    @staticmethod
    def _no_peer(rank: int) -> Peer:
        raise ValueError(f"worker {rank} doesn't exist: this one is alone")
