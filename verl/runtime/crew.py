"""The controller's side of the hosts: whom to call for a role, one lock per device, a timeline of what ran where."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.cluster.group import WorkerGroup, WorkerLost
from verl.config.errors import RequestError, RunError
from verl.data.feeds import Stopped
from verl.dataflow.placement import Placement
from verl.runtime.host import Host, LocatedError, gather
from verl.runtime.load import Workers

ROLES = {"reward": "reward_model"}  # roles that are named otherwise than their node


@dataclass(frozen=True)
class Span:
    """Something that ran on a host; seconds since the epoch."""

    name: str
    rank: int
    step: int
    start: float
    end: float


class Crew:
    """All hosts of a run."""

    def __init__(self, group: WorkerGroup, placement: Placement, timeline: Path | None = None) -> None:
        self.group, self.placement = group, placement
        self._locks = [asyncio.Lock() for _ in placement.devices]
        self._timeline = timeline
        if timeline is not None:
            timeline.write_text("[\n]")

    @property
    def ranks(self) -> Sequence[int]:
        return range(len(self.placement.devices))

    @property
    def alone(self) -> bool:
        """Whether the one host is all there is."""
        return len(self.placement.devices) == 1

    @property
    def device(self) -> str:
        """Of the one host that is all there is."""
        return self.group.places[0].device

    @property
    def workers(self) -> Workers:
        """Of a run that has one host in this process."""
        host: Any = getattr(self.group, "object", None)
        if not isinstance(host, Host) or host.workers is None:
            raise RuntimeError("the workers are in other processes")
        return host.workers

    def of(self, role: str) -> tuple[int, ...]:
        """The ranks of a role; those of a role without devices of its own that were found for it."""
        return self.placement.ranks(ROLES.get(role, role))

    @contextlib.asynccontextmanager
    async def hold(self, ranks: Sequence[int]) -> AsyncIterator[None]:
        """The devices for oneself: work on them takes turns, and what spans several begins on all of them together."""
        async with contextlib.AsyncExitStack() as stack:
            for rank in sorted(set(ranks)):
                await stack.enter_async_context(self._locks[rank])
            yield

    async def each(self, method: str, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """``method`` on several hosts at once, each with its own arguments; results by rank.

        The first failure is raised; where a lost host was its cause, that is.
        """
        try:
            found = await gather([self.group.call(rank, method, *args) for rank, args in calls.items()])
        except (WorkerLost, RequestError, Stopped):
            raise
        except Exception:
            if not self.alone:
                await self._raise_lost()
            raise
        return dict(zip(calls, found, strict=True))

    async def _raise_lost(self) -> None:
        """``WorkerLost`` if a host is: the others' broken connections are told first, but aren't the reason."""
        await asyncio.sleep(0.5)
        for rank in self.ranks:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.group.call(rank, "ping"), 5)

    async def one(self, rank: int, name: str, step: int, method: str, *args: Any) -> Any:
        """``method`` on one host, as ``name`` of ``step`` in the timeline."""
        start = time.time()
        try:
            (result,) = (await self.each(method, {rank: args})).values()
        except WorkerLost as error:
            raise WorkerLost(f"{name}: {error}") from error
        self.record(Span(name, rank, step, start, time.time()))
        return result

    async def everywhere(self, method: str, *args: Any) -> dict[int, Any]:
        return await self.each(method, {rank: args for rank in self.ranks})

    def close(self) -> None:
        self.group.close()

    def record(self, span: Span) -> None:
        """One more line of ``timeline.json`` (Chrome's trace format: microseconds; a row per device)."""
        if self._timeline is None:
            return
        place = self.group.places[span.rank]
        event = {
            "name": span.name, "ph": "X", "pid": span.rank, "tid": place.device, "args": {"step": span.step},
            "ts": round(span.start * 1e6), "dur": round((span.end - span.start) * 1e6),
        }  # fmt: skip
        with self._timeline.open("r+b") as file:  # complete JSON at every moment
            size = file.seek(-2, 2)
            file.write(((",\n" if size > 1 else "\n") + json.dumps(event) + "\n]").encode())


def retrieved(task: asyncio.Task[Any]) -> None:
    """A failure that nobody waits for any more is no news."""
    if not task.cancelled():
        task.exception()


@contextlib.contextmanager
def located(step: int, during: str) -> Iterator[None]:
    """Failures name the step. Hosts say which op it was and where; of a lost one that is said here."""
    try:
        yield
    except (RequestError, Stopped):
        raise
    except WorkerLost as error:
        raise WorkerLost(f"step {step}, {during}: {error}") from error
    except LocatedError as error:
        raise RunError(f"step {step}, {error}") from error
    except Exception as error:
        raise RunError(f"step {step}, {during}: {error or type(error).__name__}") from error
