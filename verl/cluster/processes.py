"""A worker group of processes of this machine.

Each process has a socket to the controller and one to every other process, so nothing listens and nothing has a name.
A nursery forks them all.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
import platform
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from pathlib import Path
from typing import IO, Any

import cloudpickle

from verl.cluster.group import Factory, Place, Spec, WorkerLost
from verl.cluster.link import Link, Parts, Reply, outcome
from verl.cluster.nursery import Nursery, Ports
from verl.cluster.serve import START, Start
from verl.config.devices import cores
from verl.config.errors import RequestError

GRACE = 5.0  # seconds for the workers to end by themselves
_TICK = 0.1  # seconds between two looks at the processes


class Processes:
    """``WorkerGroup`` of ``len(specs)`` processes, forked from one that doesn't run the caller's script again.

    What the factory and its arguments take from the caller's script (or lambdas) travels by value. ``preload``: modules
    to import once for all workers; in vain where that starts threads or touches a GPU. ``logs``: the folder for
    ``worker_<rank>.log``, which get all that the processes print (these imports: ``worker_0.log``). A process that says
    nothing for ``heartbeat`` seconds counts as dead. Raises what a factory raised, ``RequestError`` for arguments that
    can't be sent, ``WorkerLost`` when a process dies or isn't ready within ``start_timeout`` seconds.
    """

    def __init__(
        self,
        factory: Factory,
        args: tuple[Any, ...],
        specs: Sequence[Spec],
        *,
        logs: Path | None,
        preload: Sequence[str] = (),
        heartbeat: float = 20.0,
        start_timeout: float = START,
    ) -> None:
        made = sendable(factory, args)
        self.places: list[Place] = []
        self._logs, self._heartbeat = logs, heartbeat
        self._nursery: Nursery | None = None
        self._links: list[Link] = []
        self._lock = threading.Lock()  # guards the two below
        self._lost: tuple[Place | None, str] | None = None  # who (``None``: not one of them), and how
        self._closing = False
        self._ended = threading.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="verl-workers-"))
        self._started: Future[list[Future[Reply]]] = Future()
        self._keeper = threading.Thread(target=self._keep, args=(made, specs, preload), daemon=True, name="verl-keeper")
        self._keeper.start()
        atexit.register(self.close)
        try:
            self._await_ready(self._started.result(), start_timeout)
        except BaseException:
            self.close()
            raise

    @property
    def traffic(self) -> int:
        """Bytes that the controller has sent to and received from the workers."""
        return sum(link.sent + link.received for link in self._links)

    async def call(self, rank: int, method: str, *args: Any) -> Any:
        try:
            return outcome(*await asyncio.wrap_future(self._links[rank].ask(method, *args)))
        except WorkerLost:
            # a worker may tell that its peer is gone before the peer's end is seen here, with its cause
            for _ in range(20):
                if self._lost is not None:
                    raise self._loss() from None
                await asyncio.sleep(0.05)
            raise

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._lost = self._lost or (None, "the workers were closed")
        atexit.unregister(self.close)
        wait([self._started])  # an interrupt may come while the keeper starts them
        for link in self._links:
            link.fail(self._loss)
            link.close()
        try:
            if self._nursery is not None:
                self._nursery.end(GRACE)
        finally:
            self._ended.set()
            self._keeper.join()
            for link in self._links:
                link.join()
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- the keeper's thread ----------------------------------------------------------------------------------------

    def _keep(self, made: bytes, specs: Sequence[Spec], preload: Sequence[str]) -> None:
        """Start the nursery and watch it to its end: a thread that starts a process on Linux takes it along when it
        ends itself (see ``serve``), so it has to be one that stays."""
        try:
            nursery, ready = self._launch(made, specs, preload)
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._nursery = nursery
        self._started.set_result(ready)
        before = time.monotonic()
        while not self._ended.is_set():
            nursery.listen(_TICK)
            now = time.monotonic()
            if now - before > 1 + _TICK:  # this process itself was held up, and couldn't hear
                for link in self._links:
                    link.heard = max(link.heard, now)
            before = now
            if nursery.pids and not self.places:
                self._meet(specs, nursery.pids)
            for place, link in zip(self.places, self._links, strict=False):
                if (status := nursery.status(place.rank)) is not None:
                    self._lose(place, _ending(status))
                elif self._lost is None and link.received and now - link.heard > self._heartbeat:
                    self._lose(place, f"has not answered for {self._heartbeat:g} s")
                    nursery.kill(place.rank)
            if nursery.ended is not None:
                self._lose(None, _ending(nursery.ended))
        nursery.close()

    def _launch(
        self, made: bytes, specs: Sequence[Spec], preload: Sequence[str]
    ) -> tuple[Nursery, list[Future[Reply]]]:
        n = len(specs)
        environment = {
            "OMP_NUM_THREADS": str(max(1, cores() // n)),
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",  # this machine's name may lead nowhere
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # CUDA, once touched, would be of no use after the fork
            **os.environ,
        }
        meet = f"file://{self._folder}/meet" if n > 1 else None
        ends: list[dict[int, socket.socket]] = [{} for _ in specs]  # by rank: its end of the socket to each peer
        ports, ready = [], []
        with contextlib.ExitStack() as stack:
            for a, b in itertools.combinations(range(n), 2):
                ends[a][b], ends[b][a] = map(stack.enter_context, socket.socketpair())
            for rank, spec in enumerate(specs):
                ours, theirs = socket.socketpair()
                stack.enter_context(theirs)
                self._links.append(Link(ours))
                ready.append(self._links[-1].ask("start", Start(rank, n, spec, meet, self._heartbeat, made)))
                log = stack.enter_context(self._open_log(rank))
                peers = {other: end.fileno() for other, end in ends[rank].items()}
                ports.append(Ports(theirs.fileno(), peers, log.fileno()))
            return Nursery(preload, ports, environment), ready

    def _open_log(self, rank: int) -> IO[bytes]:
        path = self._log(rank)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        return open(os.devnull if path is None else path, "ab")

    def _meet(self, specs: Sequence[Spec], pids: Sequence[int]) -> None:
        """The workers are there, so that links to them may be told of their ends."""
        for rank, (spec, pid) in enumerate(zip(specs, pids, strict=True)):
            self.places.append(Place(rank, spec.device, spec.role, platform.node(), pid))
        for place, link in zip(self.places, self._links, strict=True):
            link.open(_nobody_calls, partial(self._hung_up, place))

    # -- ends -------------------------------------------------------------------------------------------------------

    def _await_ready(self, ready: list[Future[Reply]], limit: float) -> None:
        end = time.monotonic() + limit
        waiting = set(ready)
        while waiting:
            done, waiting = wait(waiting, max(0.0, end - time.monotonic()), FIRST_COMPLETED)
            if not done:
                late = min(ready.index(future) for future in waiting)
                self._lose(self.places[late] if self.places else None, f"was not ready within {limit:g} s")
                raise self._loss()
            for future in done:
                outcome(*future.result())

    def _hung_up(self, place: Place) -> None:
        """The socket to it is closed. Then it has ended, ends, or is beyond help."""
        nursery = self._nursery
        if self._closing or nursery is None:
            return
        status = nursery.status(place.rank, 1.0)
        if status is None and nursery.ended is not None:  # the keeper tells of that
            return
        self._lose(place, "closed its connection" if status is None else _ending(status))
        nursery.kill(place.rank)

    def _lose(self, place: Place | None, how: str) -> None:
        """``None``: the nursery, and so all of them."""
        with self._lock:
            if self._lost is not None:
                return
            path = self._log(0 if place is None else place.rank)
            who = "the process that starts the workers" if place is None else str(place)
            self._lost = place, f"{who} {how}" + ("" if path is None else f"; its log: {path}")
        for link in self._links:
            link.fail(self._loss)

    def _loss(self) -> WorkerLost:
        place, text = self._lost or (None, "")
        error = WorkerLost(text)
        if place is not None:
            place.mark(error)
        return error

    def _log(self, rank: int) -> Path | None:
        return None if self._logs is None else Path(self._logs) / f"worker_{rank}.log"


def sendable(factory: Factory, args: tuple[Any, ...]) -> bytes:
    try:
        return cloudpickle.dumps((factory, args))
    except Exception as whole:
        for name, value in [("the factory", factory), *((f"argument {i}", arg) for i, arg in enumerate(args))]:
            try:
                cloudpickle.dumps(value)
            except Exception as error:
                what = getattr(value, "__qualname__", type(value).__name__)
                raise RequestError(
                    f"with several workers {name} ({what}) must be sent to other processes, which fails: {error}. "
                    "Functions and classes of an importable module can be sent; open files, locks and sockets can't."
                ) from error
        raise RequestError(f"the factory and its arguments can't be sent to other processes: {whole}") from whole


def _nobody_calls(number: int, parts: Parts) -> None:
    raise AssertionError("workers don't call the controller")


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    name = next((known.name for known in signal.Signals if known == -status), "unknown")
    hint = ", which the system does when memory runs out" if -status == signal.SIGKILL else ""
    return f"was killed by signal {-status} ({name}){hint}"
