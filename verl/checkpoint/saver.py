"""Saving beside training: copies that training can't change, and one thread that writes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import Tensor

from verl.checkpoint.tensorfile import Tensors, memory_of, plain

log = logging.getLogger(__name__)


def snapshot(tensors: Tensors) -> dict[str, Tensor]:
    """Contiguous copies on the CPU; when this returns, the originals may change.

    Names of one memory in a mapping are one copy. Of an iterator's tensors, which may be gone after their turn, each is
    copied. From a GPU into pinned memory, which torch keeps for the next snapshot. Raises ``TypeError`` for a tensor
    that can't be saved.
    """
    copies: dict[str, Tensor] = {}
    known: dict[tuple, Tensor] = {}
    lasting = isinstance(tensors, Mapping)
    devices = set()
    for name, given in tensors.items() if isinstance(tensors, Mapping) else tensors:
        tensor = plain(name, given)
        memory = memory_of(tensor)
        if not (lasting and memory in known):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            known[memory] = copy.copy_(tensor, non_blocking=tensor.is_cuda)
            devices |= {tensor.device} if tensor.is_cuda else set()
        copies[name] = known[memory]
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies


class Saver:
    """Runs one save at a time on a thread of its own.

    A failure is logged when it happens and raised by the next ``start`` or ``wait``, once. The process doesn't end
    normally before a save that runs has ended.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "verl-save")
        self._running: Future[Path] | None = None

    @property
    def busy(self) -> bool:
        """Whether a save runs."""
        return self._running is not None and not self._running.done()

    def start(self, work: Callable[[], Path]) -> Path | None:
        """Run ``work``, which gives the checkpoint's folder. First waits for the one before, as ``wait``: if that
        failed, raises what it raised and starts nothing."""
        before = self.wait()
        self._running = self._thread.submit(_logged, work)
        return before

    def wait(self) -> Path | None:
        """Wait for the save that runs: its folder, or raises what it raised. ``None`` if none was started since the
        last ``wait``."""
        if self._running is None:
            return None
        wait([self._running])  # an interrupt here loses nothing
        done, self._running = self._running, None
        return done.result()


def _logged(work: Callable[[], Path]) -> Path:
    try:
        return work()
    except BaseException as error:
        log.error("saving failed: %s", error)
        raise
