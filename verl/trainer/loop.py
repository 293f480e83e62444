"""An event loop for callers that have none, or one already."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from verl.runtime.host import cancel_others

T = TypeVar("T")


class Loop:
    """Runs in ``wait``, in the caller's thread. Where that one is in an event loop already, as in a notebook, this one
    moves to a thread of its own, for good."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None

    def wait(self, work: Awaitable[T]) -> T:
        """What ``work`` gives; what was begun beside it goes on meanwhile."""

        async def done() -> T:
            return await work

        if self._thread is None and asyncio._get_running_loop() is None:
            return self._loop.run_until_complete(done())
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name="verl-run", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(done(), self._loop).result()

    def soon(self, call: Callable[[], Any]) -> None:
        """``call`` from within the loop, as soon as it runs; also from a signal's handler."""
        self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """Cancel what still runs, after a failure for instance, and end."""
        self.wait(cancel_others())
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
