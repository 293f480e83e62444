"""A nursery: one process that imports modules once and forks the workers, which then have them already.

Workers are its children, so it is what tells of their ends, and what kills them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from verl.cluster.imports import quick_imports
from verl.cluster.serve import adopt, serve, stay_with


@dataclass(frozen=True)
class Ports:
    """File descriptors that a worker gets: sockets to the controller and, by rank, to its peers, and its log."""

    control: int
    peers: dict[int, int]
    log: int

    @property
    def all(self) -> set[int]:
        return {self.control, *self.peers.values(), self.log}


class Nursery:
    """The controller's side. The thread that makes it takes it along when it ends, and all workers (see ``serve``)."""

    def __init__(self, preload: Sequence[str], workers: Sequence[Ports], environment: Mapping[str, str]) -> None:
        self.pids: list[int] = []  # of the workers by rank, once all are forked
        self._statuses: dict[int, int] = {}  # by process
        self._news = threading.Condition()
        self._orders, theirs = Pipe()
        try:
            self._process = subprocess.Popen(
                _command(os.getpid(), theirs.fileno(), preload, [astuple(ports) for ports in workers]),
                pass_fds=set().union({theirs.fileno()}, *(ports.all for ports in workers)),
                stdin=subprocess.DEVNULL,
                stdout=workers[0].log,
                stderr=workers[0].log,
                env=environment,
                start_new_session=True,  # Ctrl-C passes it by
            )
        finally:
            theirs.close()

    @property
    def ended(self) -> int | None:
        """Its exit status. Its workers have ended, too, or do it now."""
        return self._process.returncode

    def listen(self, seconds: float) -> None:
        """Take one piece of news if it comes in that time; only one thread may do this."""
        if self.ended is not None:
            time.sleep(seconds)
            return
        try:
            if not self._orders.poll(seconds):
                return
            news: list[int] | tuple[int, int] = self._orders.recv()
        except (EOFError, OSError):
            self._clear()
            news = self.pids
        with self._news:
            if isinstance(news, tuple):
                self._statuses.update([news])
            else:
                self.pids = news
            self._news.notify_all()

    def status(self, rank: int, timeout: float = 0.0) -> int | None:
        """A worker's exit status, if it is told in that time."""
        with self._news:
            self._news.wait_for(lambda: self.pids[rank] in self._statuses or self.ended is not None, timeout)
            return self._statuses.get(self.pids[rank])

    def kill(self, rank: int) -> None:
        """Kill a worker and what it started."""
        with contextlib.suppress(OSError):
            self._orders.send(self.pids[rank])

    def end(self, grace: float) -> None:
        """Wait for all workers to end. After ``grace`` seconds, or an interrupt, kill them and what they started."""
        try:
            self._wait(grace)
        finally:
            for rank in range(len(self.pids)):
                self.kill(rank)
            if not self._wait(1.0):
                self._process.kill()
                self._clear()

    def close(self) -> None:
        """Let go of it once nobody listens any more."""
        self._orders.close()

    def _wait(self, seconds: float) -> bool:
        """Whether it ends in that time, which it does after its last worker. One that still imports won't."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds if self.pids else 0)
        return self.ended is not None

    def _clear(self) -> None:
        """It ends without having told of all workers; what is left of their sessions ends, too."""
        self._process.wait()
        for pid in set(self.pids) - set(self._statuses):
            _kill_session(pid)


def _command(parent: int, orders: int, preload: Sequence[str], workers: Sequence[tuple[Any, ...]]) -> list[str]:
    paths = [path for path in sys.path if isinstance(path, str)]
    life = f"nurse({parent}, {orders}, {list(preload)}, {list(workers)})"
    boot = f"import sys; sys.path[:] = {paths!r}; from verl.cluster.nursery import nurse; {life}"
    return [sys.executable, "-u", "-c", boot]


def nurse(parent: int, orders: int, preload: Sequence[str], workers: Sequence[tuple[Any, ...]]) -> None:
    """The nursery's whole life. ``workers``: the fields of each one's ``Ports``."""
    stay_with(parent)
    adopt()
    with quick_imports():
        for name in preload if sys.platform == "linux" else ():  # frameworks of macOS don't survive a fork
            with contextlib.suppress(Exception):  # a worker that needs it imports it, and tells what is wrong
                importlib.import_module(name)
    if preload and not _forkable():
        command = _command(parent, orders, [], workers)
        os.execv(command[0], command)
    everything = {orders}.union(*(Ports(*ports).all for ports in workers))
    pids = [_fork(Ports(*ports), everything) for ports in workers]
    for descriptor in everything - {orders}:
        os.close(descriptor)
    controller = Connection(orders)
    controller.send(pids)
    left = set(pids)
    threading.Thread(target=_obey, args=(controller, left), daemon=True).start()
    while left:
        pid, status = os.waitpid(-1, 0)
        if pid in left:
            _kill_session(pid)
            left.remove(pid)
            _kill_orphans(left)
            with contextlib.suppress(OSError):
                controller.send((pid, os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _forkable() -> bool:
    """Whether a fork can use all that is here: imports may have started threads, which it lacks, or CUDA."""
    torch = sys.modules.get("torch")
    if threading.active_count() > 1:
        return False
    if torch is None:
        return True
    pid = os.fork()
    if pid == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    return os.waitpid(pid, 0)[1] == 0


def _fork(ports: Ports, everything: set[int]) -> int:
    """The new process's id; doesn't return there."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()  # what it starts can be killed with it
        for output in (1, 2):
            os.dup2(ports.log, output)
        for descriptor in everything - {ports.control, *ports.peers.values()}:
            os.close(descriptor)
        if "numpy.random" in sys.modules:  # Python's generator is seeded anew by itself; torch's has a fixed seed
            sys.modules["numpy.random"].seed()
        serve(parent, ports.control, ports.peers)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _obey(controller: Connection, left: set[int]) -> None:
    """Kill whom the controller names, and all once it is gone."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            pid = controller.recv()
            if pid in left:
                _kill_session(pid)
    for pid in list(left):
        _kill_session(pid)


def _kill_orphans(workers: set[int]) -> None:
    """What ended workers started in sessions of its own; its parent is this process now (Linux)."""
    while orphans := _children(os.getpid()) - workers:
        for pid in orphans:
            _kill_session(pid)  # a leader with all that it started
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children(parent: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == parent:
                found.add(int(stat.parent.name))
    return found


def _kill_session(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left (macOS: but zombies)
        os.killpg(pid, signal.SIGKILL)
