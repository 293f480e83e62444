"""Runs that kill themselves with SIGKILL at a chosen place. In a module of its own: the processes import it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forks import FORKS
from verl.checkpoint.store import CheckpointStore
from verl.config.load import load_config
from verl.runtime.controller import Controller
from verl.trainer.base import Run


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_start(run: Run) -> None:
    """Everything is loaded, no lap has begun."""
    run._train = die  # type: ignore[method-assign,assignment]


def in_lap(step: int) -> Callable[[Run], None]:
    """In the middle of a lap's updates; the checkpoint of the lap before is complete."""

    def arrange(run: Run) -> None:
        original = Controller._run

        async def stop(self: Controller, op: Any, walk: Any, **how: Any) -> None:
            if walk.step == step and op.name == "update":
                while run.store.latest() != step - 1:
                    await asyncio.sleep(0.005)
                die()
            await original(self, op, walk, **how)

        Controller._run = stop  # type: ignore[method-assign]

    return arrange


def in_save(step: int) -> Callable[[Run], None]:
    """As soon as tensors of the step's checkpoint are on the disk, with more to come: no manifest is there yet."""

    def arrange(run: Run) -> None:
        original = CheckpointStore.commit

        def watch() -> None:
            partial = run.store.root / f".step_{step}.partial"
            while not any(path.stat().st_size for path in partial.glob("*.safetensors")):
                time.sleep(0.001)
            die()

        def commit(self: CheckpointStore, number: int, entries: Any) -> Path:
            if number == step:
                die()  # the watcher was slower than the disk
            return original(self, number, entries)

        CheckpointStore.commit = commit  # type: ignore[method-assign]
        threading.Thread(target=watch, daemon=True).start()

    return arrange


def before_latest(step: int) -> Callable[[Run], None]:
    """The step's checkpoint is complete, but ``latest`` doesn't name it."""

    def arrange(run: Run) -> None:
        original = CheckpointStore._name_latest

        def stop(self: CheckpointStore, number: int) -> None:
            if number == step:
                die()
            original(self, number)

        CheckpointStore._name_latest = stop  # type: ignore[method-assign]

    return arrange


# where it dies, and which checkpoint is the latest then
PLACES: dict[str, tuple[Callable[[Run], None] | None, int | None]] = {
    "at the start": (at_start, None),
    "in an epoch": (in_lap(2), 1),
    "at an epoch's end": (in_lap(3), 2),
    "in a save": (in_save(3), 2),
    "at the last step": (before_latest(4), 3),
    "nowhere": (None, 4),
}


def go(keys: dict[str, Any], place: str, environment: dict[str, str] | None = None, bomb: bytes | None = None) -> None:
    """Train, from the latest checkpoint on where there is one. ``bomb``: sent to every port that the run opens."""
    os.environ.update(environment or {})
    with Run(load_config(None, **keys), console=False) as run:
        run.prepare(None if run.store.empty else run.store.load())
        arrange = PLACES[place][0]
        if arrange is not None:
            arrange(run)
        if bomb is not None:
            throw(bomb)
        run.train()


def throw(data: bytes) -> None:
    """Send pickled bytes, raw, framed and as an HTTP request, to all ports of this process and of its Ray cluster."""
    mark = f"RAY_AUTH_TOKEN={os.environ['RAY_AUTH_TOKEN']}".encode()
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    ports = listening([os.getpid(), *(pid for pid in pids if mark in _environment(pid))])
    assert len(ports) > 3, "a Ray cluster listens"
    post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data)
    for place in ports:
        for head in (b"", len(data).to_bytes(8, "big"), len(data).to_bytes(8, "little"), post):
            with contextlib.suppress(OSError), socket.create_connection(place, timeout=0.2) as link:
                link.sendall(head + data)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Where processes listen for TCP connections; all addresses of this machine are told as its loopback."""
    held = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    held.add(os.readlink(entry))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in held:
                address, port = words[1].split(":")
                where = socket.inet_ntoa(bytes.fromhex(address[-8:])[::-1])  # of version 6 the mapped one, or any
                found.add(("127.0.0.1" if where == "0.0.0.0" else where, int(port, 16)))
    return found


def child(keys: dict[str, Any], place: str, seconds: float = 150, bomb: bytes | None = None) -> int | None:
    """``go`` in a process of its own; its exit status, negative for a signal."""
    process = FORKS.Process(target=go, args=(keys, place, dict(os.environ), bomb))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode
