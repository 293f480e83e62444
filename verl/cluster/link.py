"""Calls over a socket between two processes: both ends may call, several calls at a time, tensors without copies."""

from __future__ import annotations

import contextlib
import io
import itertools
import mmap
import pickle
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

from verl.cluster.group import WorkerLost

if TYPE_CHECKING:
    import torch

CALL, RESULT, ERROR, BEAT = range(4)
_HEAD = struct.Struct("<BQI")  # kind, number of the call, count of parts, whose sizes follow
_SMALL = 4096  # bytes; a buffer below that travels inside its pickle
_LARGE = 2**22  # bytes; a buffer from that on is received into huge pages

Parts = list[Any]
"""A pickle and the buffers that it refers to, each of them bytes-like."""
Reply = tuple[int, Parts]
"""``RESULT`` or ``ERROR``, and the value or exception."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if (kind.__module__, kind.__name__) != ("torch", "Tensor"):
            return NotImplemented
        import torch

        plain = value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized
        if not plain or value.requires_grad or value.is_complex():
            return NotImplemented
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(data), value.dtype, tuple(value.shape))


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.frombuffer(data, dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)


def dumps(value: Any) -> Parts:
    """Buffers of CPU tensors and arrays aren't copied: nobody may write to them until they are sent."""
    file, buffers = io.BytesIO(), []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= _SMALL:
            buffers.append(raw)
        return raw.nbytes < _SMALL

    _Pickler(file, protocol=5, buffer_callback=keep).dump(value)
    return [file.getvalue(), *buffers]


def loads(parts: Parts) -> Any:
    return pickle.loads(parts[0], buffers=parts[1:])


def _room(size: int) -> bytearray | mmap.mmap:
    """Memory to receive into. The first touch of each small page takes longer than filling it (measured: 3 times)."""
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return bytearray(size)
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        room.madvise(mmap.MADV_HUGEPAGE)
    return room


def outcome(kind: int, parts: Parts) -> Any:
    """What a reply holds: returned or raised."""
    value = loads(parts)
    if kind == ERROR:
        raise value
    return value


class Link:
    """One end. Messages leave in the order of ``ask`` and ``post``, which never wait for the other end."""

    def __init__(self, end: socket.socket) -> None:
        end.set_inheritable(False)
        self.sent = self.received = 0  # bytes
        self.heard = time.monotonic()  # when anything last came
        self._socket = end
        self._outbox: queue.SimpleQueue[tuple[int, int, Parts] | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards the two below
        self._waiting: dict[int, Future[Reply]] = {}
        self._failure: Callable[[], WorkerLost] | None = None
        self._threads: list[threading.Thread] = []

    def open(self, answer: Callable[[int, Parts], None], ended: Callable[[], None]) -> None:
        """Begin to send and to read. A call from the other end goes to ``answer(number, parts)``, which mustn't wait;
        ``ended()`` is called once there is no other end any more. Both are called on the reading thread."""
        for run in (self._write, lambda: self._read(answer, ended)):
            self._threads.append(threading.Thread(target=run, daemon=True, name="verl-link"))
            self._threads[-1].start()

    def ask(self, method: str, *args: Any) -> Future[Reply]:
        """Raises what ``fail`` was told, and the error of an argument that can't be pickled."""
        parts = dumps((method, args))
        future: Future[Reply] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure()
            number = next(self._numbers)
            self._waiting[number] = future
        self.post(CALL, number, parts)
        return future

    def post(self, kind: int, number: int, parts: Parts) -> None:
        self._outbox.put((kind, number, parts))

    def fail(self, failure: Callable[[], WorkerLost]) -> None:
        """All calls that wait and all later ones raise that, each an exception of its own. The first one stays."""
        with self._lock:
            self._failure = failure if self._failure is None else self._failure
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            with contextlib.suppress(InvalidStateError):  # cancelled
                future.set_exception(failure())

    def receive(self) -> tuple[int, int, Parts]:
        """Kind, number and parts of the next message. Raises ``EOFError`` or ``OSError`` where there is none."""
        kind, number, count = _HEAD.unpack(self._take(_HEAD.size))
        sizes = struct.unpack(f"<{count}Q", self._take(8 * count))
        return kind, number, [self._take(size) for size in sizes]

    def close(self) -> None:
        """The other end sees this one go. ``join`` then lets go of the socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._outbox.put(None)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(timeout=5)
        self._socket.close()

    def _take(self, size: int) -> bytearray | mmap.mmap:
        taken = _room(size)
        rest = memoryview(taken)
        while rest:
            count = self._socket.recv_into(rest)
            if count == 0:
                raise EOFError
            self.received += count
            self.heard = time.monotonic()
            rest = rest[count:]
        return taken

    def _read(self, answer: Callable[[int, Parts], None], ended: Callable[[], None]) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._deliver(*self.receive(), answer)
        ended()

    def _deliver(self, kind: int, number: int, parts: Parts, answer: Callable[[int, Parts], None]) -> None:
        if kind == CALL:
            answer(number, parts)
        elif kind != BEAT:
            with self._lock:
                future = self._waiting.pop(number, None)
            with contextlib.suppress(InvalidStateError):  # cancelled
                if future is not None:
                    future.set_result((kind, parts))

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the other end is gone, which reading shows
            while (message := self._outbox.get()) is not None:
                self._send(*message)
                del message  # its tensors may go before the next one comes

    def _send(self, kind: int, number: int, parts: Parts) -> None:
        sizes = [len(part) for part in parts]
        head = _HEAD.pack(kind, number, len(parts)) + struct.pack(f"<{len(parts)}Q", *sizes)
        self.sent += len(head) + sum(sizes)  # by the time of an answer it is counted
        self._socket.sendall(b"".join([head, *parts[:1]]))
        for part in parts[1:]:
            self._socket.sendall(part)
