"""Copies that training can't change, so that they can be written while it goes on."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from verl.checkpoint.tensorfile import memory_of, plain

log = logging.getLogger(__name__)
CHUNK = 256 * 2**20  # bytes to be pinned at once; the GPU's work starts about 15 ms late meanwhile
ALIGNED = 512  # bytes: a copy begins at a multiple
THREADS = 8  # one gets about 2.5 GB/s of new memory from the system


def snapshot(tensors: Mapping[str, Tensor], room: Room | None = None) -> dict[str, Tensor]:
    """Contiguous copies on the CPU; when this returns, the originals may change.

    Names of one memory are one copy. ``room``: where the copies lie until it is used again. Raises ``TypeError`` for a
    tensor that can't be saved.
    """
    copies: dict[str, Tensor] = {}
    known: dict[tuple, Tensor] = {}
    devices = set()
    for name, given in tensors.items():
        tensor = plain(name, given)
        memory = memory_of(tensor)
        if memory not in known:
            copy = None if room is None else room.place(name, tensor)
            if copy is None:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            known[memory] = copy.copy_(tensor, non_blocking=tensor.is_cuda)
            devices |= {tensor.device} if tensor.is_cuda else set()
        copies[name] = known[memory]
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies


class Room:
    """Host memory for copies of tensors with these names and ``sizes`` in bytes; for one snapshot at a time.

    Pinned for ``device`` if that is a GPU, which copies into no other memory at full speed. To get 20 GB of it takes
    seconds and stops the GPU's work unless the pages are there already, so threads touch them first and pin them chunk
    by chunk; ``place`` waits for them.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        self._places: dict[str, tuple[int, int, int]] = {}  # the chunk, the first byte in it, bytes
        chunks: list[int] = []
        for name, nbytes in sizes.items():
            size = -(-nbytes // ALIGNED) * ALIGNED
            if size and (not chunks or chunks[-1] + size > CHUNK):
                chunks.append(0)
            if size:
                self._places[name] = len(chunks) - 1, chunks[-1], nbytes
                chunks[-1] += size
        threads = ThreadPoolExecutor(THREADS, thread_name_prefix="verl-room")
        self._chunks = [threads.submit(_Chunk, size, device) for size in chunks]
        threads.shutdown(wait=False)

    def place(self, name: str, tensor: Tensor) -> Tensor | None:
        """Memory of the shape and dtype of ``tensor``; ``None`` if there is none for it."""
        number, start, size = self._places.get(name, (0, 0, -1))
        if size != tensor.nbytes or self._chunks[number].exception() is not None:  # the system gave none
            return None
        return self._chunks[number].result().bytes[start : start + size].view(tensor.dtype).view(tensor.shape)

    def close(self) -> None:
        """No copy is read any more; a second call does nothing."""
        chunks, self._chunks, self._places = self._chunks, [], {}
        for chunk in chunks:
            if not chunk.cancel() and chunk.exception() is None:
                chunk.result().unpin()


class _Chunk:
    told = False  # once is enough

    def __init__(self, size: int, device: torch.device) -> None:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # 3 times as fast to get; a fork would move pinned pages
            with contextlib.suppress(AttributeError, OSError):  # not every system knows them
                memory.madvise(getattr(mmap, advice))
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        ctypes.memset(self.bytes.data_ptr(), 0, size)
        self._runtime: Any = None  # CUDA's, of what is pinned
        if device.type == "cuda":
            with torch.cuda.device(device):  # a thread begins on the first
                runtime = torch.cuda.cudart()
                done = runtime.cudaHostRegister(self.bytes.data_ptr(), size, 0) == runtime.cudaError.success
            self._runtime = runtime if done else None
            if not done and not _Chunk.told:
                _Chunk.told = True
                log.warning("host memory could not be pinned: saves hold training longer")

    def unpin(self) -> None:
        if self._runtime is not None:
            self._runtime.cudaHostUnregister(self.bytes.data_ptr())
            self._runtime = None
