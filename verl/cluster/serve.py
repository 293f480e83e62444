"""A worker process: makes its object and serves calls to it until the other end of its socket is gone."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import pickle
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from verl.cluster.group import CALLS, Context, Peer, Place, Spec, WorkerLost, portable
from verl.cluster.imports import quick_imports
from verl.cluster.link import BEAT, ERROR, RESULT, Link, Parts, dumps, loads, outcome

log = logging.getLogger(__name__)
FAREWELL = 3.0  # seconds for the object's ``close()``
START = 600.0  # seconds for a worker to be ready: its imports may come from a network's disk
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Start:
    """The first message to a worker process. ``made`` is the pickled factory and its arguments."""

    rank: int
    size: int
    spec: Spec
    meet: str | None
    heartbeat: float  # seconds of silence that count as death
    made: bytes


def stay_with(parent: int) -> None:
    """This process ends with its parent, leaves stops to it, and says where it was when it crashes."""
    if sys.platform == "linux":  # the parent may die while C code here lets no thread of ours see it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    stops = signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)
    for stop in stops:  # a handler isn't inherited by other programs, SIG_IGN is
        signal.signal(stop, lambda *_: None)
    faulthandler.enable()


def adopt() -> None:
    """What this process's descendants leave behind becomes its own children (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def log_to_stderr() -> None:
    """What a worker logs and warns of goes where it prints: into its own file."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.captureWarnings(True)
    logging.getLogger("verl").setLevel(logging.INFO)
    for name in ("verl", "py.warnings"):
        logging.getLogger(name).addHandler(handler)


@contextlib.contextmanager
def told_when_slow(seconds: float = 60.0) -> Iterator[None]:
    """Whenever it has taken this long again, the process's log gets what each thread is doing."""
    faulthandler.dump_traceback_later(seconds, repeat=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def make(made: bytes, context: Context) -> Any:
    """The object of a pickled factory and its arguments, which bring most of a worker's imports along."""
    with told_when_slow(), quick_imports():
        factory, args = pickle.loads(made)
        return factory(context, *args)


def serve(parent: int, control: int, peers: dict[int, int]) -> None:
    """The process's whole life. ``control`` and ``peers`` (by rank) are file descriptors of sockets."""
    stay_with(parent)
    log_to_stderr()
    link = Link(socket.socket(fileno=control))
    _, number, parts = link.receive()
    _Worker(loads(parts)[1][0], link, {rank: Link(socket.socket(fileno=fd)) for rank, fd in peers.items()}).live(number)


class _Worker:
    def __init__(self, start: Start, control: Link, peers: dict[int, Link]) -> None:
        spec = start.spec
        self._start, self._control, self._peers = start, control, peers
        self._place = Place(start.rank, spec.device, spec.role, platform.node(), os.getpid())
        self._object: Any = None
        self._made = threading.Event()
        log.info("%s starts", self._place)

    def live(self, number: int) -> None:
        """Make the object, which is the answer to call ``number``, and serve."""
        start = self._start
        self._control.open(self._answering(self._control, ThreadPoolExecutor(CALLS, "verl-call")), self._end)
        threading.Thread(target=self._beat, daemon=True).start()
        # peers ask while all CALLS threads may wait for them, so that each of their calls has a thread
        threads = ThreadPoolExecutor(sys.maxsize, "verl-peer")
        for rank, link in self._peers.items():
            lost = lambda rank=rank: WorkerLost(f"worker {rank} is gone")  # noqa: E731
            link.open(self._answering(link, threads), lambda link=link, lost=lost: link.fail(lost))  # type: ignore[misc]
        try:
            context = Context(start.rank, start.size, start.spec.device, self._peer, start.meet)
            self._object = make(start.made, context)
            self._made.set()
            self._control.post(RESULT, number, dumps(None))
        except BaseException as error:
            log.exception("the worker can't be made")
            self._control.post(ERROR, number, dumps(portable(error, self._place)))
        while True:  # _end ends it
            threading.Event().wait()

    def call(self, method: str, *args: Any) -> Any:
        """A call of this worker's own object, as of a peer's."""
        self._made.wait()
        return getattr(self._object, method)(*args)

    def _peer(self, rank: int) -> Peer:
        if rank == self._start.rank:
            return self
        if rank not in self._peers:
            raise ValueError(f"worker {rank} doesn't exist: there are {self._start.size}")
        return _Peer(self._peers[rank])

    def _answering(self, link: Link, threads: Executor) -> Callable[[int, Parts], None]:
        def answer(number: int, parts: Parts) -> None:
            try:
                method, args = loads(parts)
                kind, parts = RESULT, dumps(self.call(method, *args))
            except BaseException as error:
                kind, parts = ERROR, dumps(portable(error, self._place))
            link.post(kind, number, parts)

        def begin(number: int, parts: Parts) -> None:
            threads.submit(answer, number, parts)

        return begin

    def _beat(self) -> None:
        while True:
            self._control.post(BEAT, 0, [])
            time.sleep(self._start.heartbeat / 4)

    def _end(self) -> None:
        """Nobody is left to serve."""
        close = getattr(self._object, "close", None)
        if close is not None:
            thread = threading.Thread(target=close, daemon=True)
            thread.start()
            thread.join(FAREWELL)
        with contextlib.suppress(Exception):
            log.info("%s ends", self._place)
        os._exit(0)


class _Peer:
    def __init__(self, link: Link) -> None:
        self._link = link

    def call(self, method: str, *args: Any) -> Any:
        return outcome(*self._link.ask(method, *args).result())
