"""What every worker group must do.

``start(factory, args, n)`` gives a group of ``n`` workers; each check closes the group that it starts. ``ALONE`` holds
the checks of any group, ``TOGETHER`` those of groups of several workers in processes of their own; those of
``CALLS_ONLY`` may be given one group of three workers after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.objects import Awkward, refuse, worker
from verl.cluster.group import CALLS, WorkerGroup, WorkerLost
from verl.config.errors import ConfigError, RequestError, RunError

Start = Callable[[Callable[..., Any], tuple[Any, ...], int], WorkerGroup]


def alive(pid: int) -> bool:
    """Whether the process exists, even if only as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def outcomes(group: WorkerGroup, *calls: tuple[Any, ...]) -> list[Any]:
    """Results or exceptions of calls made side by side."""
    return await asyncio.gather(*(group.call(*call) for call in calls), return_exceptions=True)


def check_arguments_and_results(start: Start) -> None:
    value = {"rows": [1, 2.5, None], "text": "ü" * 1000}
    with contextlib.closing(start(worker, (3, "x"), 1)) as group:
        assert asyncio.run(group.call(0, "echo", value, 7)) == (value, 7)
        assert asyncio.run(group.call(0, "given")) == (3, "x")
        rank, size, device, pid = asyncio.run(group.call(0, "who"))
        place = group.places[0]
        assert (rank, size, device, pid) == (0, 1, place.device, place.pid)


def check_exceptions_keep_kind_message_and_place(start: Start) -> None:
    kinds = [RequestError, ConfigError, RunError, ValueError, NotImplementedError, TimeoutError]
    with contextlib.closing(start(worker, (), 1)) as group:
        for kind in kinds:
            with pytest.raises(kind, match=r"(?m)^because of this$") as caught:
                asyncio.run(group.call(0, "fail", kind, "because of this"))
            assert type(caught.value) is kind
            assert caught.value.place == group.places[0]  # type: ignore[attr-defined]
        with pytest.raises(KeyError, match="'name'"):
            asyncio.run(group.call(0, "fail", KeyError, "name"))
        with pytest.raises((Awkward, RunError), match="1 and 2"):
            asyncio.run(group.call(0, "fail", Awkward, 1, 2))
        with pytest.raises(AttributeError, match="no_such_method"):
            asyncio.run(group.call(0, "no_such_method"))
        assert asyncio.run(group.call(0, "echo", 1)) == (1,)  # none of it did harm


def check_calls_run_side_by_side(start: Start) -> None:
    """As many as ``CALLS``: all but one wait for the last."""

    with contextlib.closing(start(worker, (), 1)) as group:
        calls = [(0, "hold")] * (CALLS - 1) + [(0, "release")]
        assert asyncio.run(outcomes(group, *calls)) == ["released"] * (CALLS - 1) + [None]


def check_any_event_loop_may_call(start: Start) -> None:
    """Loops of two threads call at the same time, and each call waits for one of the other loop."""
    with contextlib.closing(start(worker, (), 1)) as group:
        results: dict[int, list[Any]] = {}

        def run(i: int) -> None:
            results[i] = asyncio.run(outcomes(group, (0, "arrive", i), (0, "arrive", 10 + i)))

        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {0: [0, 10], 1: [1, 11]}


def check_a_cancelled_call_does_no_harm(start: Start) -> None:
    async def cancel() -> Any:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(group.call(0, "hold"), 0.2)
        await group.call(0, "release")
        return await group.call(0, "hold")

    with contextlib.closing(start(worker, (), 1)) as group:
        assert asyncio.run(cancel()) == "released"


def check_close_twice(start: Start) -> None:
    group = start(worker, (), 1)
    group.close()
    group.close()
    with pytest.raises(RuntimeError):
        asyncio.run(group.call(0, "who"))


def check_a_factory_that_raises(start: Start) -> None:
    with pytest.raises(RequestError, match=r"(?m)^no such model$"):
        start(refuse, (0, RequestError, "no such model"), 1).close()


def check_tensors_go_and_come(start: Start) -> None:
    import torch

    tensors = [
        torch.arange(6).view(2, 3),
        torch.arange(300_000, dtype=torch.float32),
        torch.arange(12.0).view(3, 4).t(),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.nn.Parameter(torch.ones(2)),
    ]
    with contextlib.closing(start(worker, (), 1)) as group:
        back = asyncio.run(group.call(0, "echo", *tensors))
    for sent, got in zip(tensors, back, strict=True):
        assert (type(got), got.dtype, got.shape) == (type(sent), sent.dtype, sent.shape)
        assert got.requires_grad == sent.requires_grad
        assert torch.equal(got, sent)


def check_each_worker_is_its_own(start: Start) -> None:
    with contextlib.closing(start(worker, (), 3)) as group:
        seen = asyncio.run(outcomes(group, *((rank, "who") for rank in range(3))))
        assert [s[0] for s in seen] == [p.rank for p in group.places] == [0, 1, 2]
        assert [s[3] for s in seen] == [p.pid for p in group.places]
        assert len({s[3] for s in seen} | {os.getpid()}) == 4


def check_errors_say_where(start: Start) -> None:
    """First line of a note, and the traceback below it; a peer's error comes with the peer's place."""
    with contextlib.closing(start(worker, (), 2)) as group:
        for call in (1, "fail", RunError, "it broke"), (0, "relay", 1, "fail", RunError, "it broke"):
            with pytest.raises(RunError, match=r"(?m)^it broke$") as caught:
                asyncio.run(group.call(*call))
            assert caught.value.place == group.places[1]  # type: ignore[attr-defined]
            notes = [note for note in caught.value.__notes__ if note.startswith(f"in {group.places[1]}")]
            assert len(notes) == 1 and "objects.py" in notes[0] and "raise kind" in notes[0]
        with pytest.raises(RunError, match=r"(?m)^Awkward: 1 and 2$"):
            asyncio.run(group.call(1, "fail", Awkward, 1, 2))
        for kind in SystemExit, KeyboardInterrupt, StopIteration:
            with pytest.raises(RunError, match=f"(?m)^{kind.__name__}: 3$"):
                asyncio.run(group.call(1, "fail", kind, 3))


def check_what_cannot_be_sent(start: Start) -> None:
    with contextlib.closing(start(worker, (), 1)) as group:
        with pytest.raises(TypeError, match="pickle"):
            asyncio.run(group.call(0, "lock"))
        with pytest.raises(TypeError, match="pickle"):
            asyncio.run(group.call(0, "echo", threading.Lock()))
        assert asyncio.run(group.call(0, "echo", 1)) == (1,)


def check_peers_call_one_another(start: Start) -> None:
    with contextlib.closing(start(worker, (), 3)) as group:
        chain = (0, "relay", 1, "relay", 0, "relay", 2, "relay", 1, "who")  # 0 and 1 are asked while they wait
        assert asyncio.run(group.call(*chain))[0] == 1
        assert asyncio.run(group.call(1, "relay", 1, "who"))[0] == 1
        assert asyncio.run(group.call(0, "relay_together", 2)) == [0, 1, 2, 3]


def check_workers_that_all_wait_for_each_other(start: Start) -> None:
    """Every thread for calls is taken on both sides by calls that ask the other side: peers are served all the same."""
    with contextlib.closing(start(worker, (), 2)) as group:
        calls = [(rank, "relay", 1 - rank, "relay", rank, "echo", i) for i in range(2 * CALLS) for rank in (0, 1)]
        assert asyncio.run(outcomes(group, *calls)) == [(i,) for i in range(2 * CALLS) for _ in (0, 1)]


def check_large_tensors_between_peers(start: Start) -> None:
    with contextlib.closing(start(worker, (), 2)) as group:
        calls = [(rank, "pull", 1 - rank, 2**21, dtype) for rank in (0, 1) for dtype in ("int64", "bfloat16")]
        assert asyncio.run(outcomes(group, *calls)) == [True] * 4


def check_a_torch_world(start: Start) -> None:
    with contextlib.closing(start(worker, (), 2)) as group:
        assert asyncio.run(outcomes(group, (0, "world"), (1, "world"))) == [[1.0, 2.0]] * 2


def check_a_killed_worker_ends_every_call(start: Start, within: float = 10.0) -> None:
    async def kill() -> tuple[list[Any], float]:
        waiting = asyncio.ensure_future(outcomes(group, (0, "hold"), (1, "hold"), (0, "relay", 1, "hold")))
        await outcomes(group, (0, "who"), (1, "who"), (0, "relay", 1, "who"))
        os.kill(group.places[1].pid, signal.SIGKILL)
        begin = time.monotonic()
        return await waiting, time.monotonic() - begin

    with contextlib.closing(start(worker, (), 2)) as group:
        errors, seconds = asyncio.run(kill())
        errors += asyncio.run(outcomes(group, (0, "who"), (1, "who")))
        for error in errors:
            assert type(error) is WorkerLost and str(group.places[1]) in str(error)
            assert error.place == group.places[1]  # type: ignore[attr-defined]
        assert seconds < within
    assert not any(alive(place.pid) for place in group.places)


def check_close_ends_the_processes(start: Start) -> None:
    """Also those in the middle of a call, which raises."""

    async def close() -> Any:
        waiting = asyncio.ensure_future(outcomes(group, (0, "hold"), (1, "relay", 0, "hold")))
        await outcomes(group, (0, "who"), (1, "who"))
        await asyncio.to_thread(group.close)
        return await waiting

    group = start(worker, (), 2)
    assert [type(error) for error in asyncio.run(close())] == [WorkerLost, WorkerLost]
    assert not any(alive(place.pid) for place in group.places)


def check_a_factory_that_raises_among_others(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"(?m)^no such device$"):
        start(refuse, (1, ConfigError, "no such device"), 2).close()


ALONE = [
    check_arguments_and_results,
    check_exceptions_keep_kind_message_and_place,
    check_calls_run_side_by_side,
    check_any_event_loop_may_call,
    check_a_cancelled_call_does_no_harm,
    check_close_twice,
    check_a_factory_that_raises,
    check_tensors_go_and_come,
]
_CALLS = [
    check_each_worker_is_its_own,
    check_errors_say_where,
    check_what_cannot_be_sent,
    check_peers_call_one_another,
    check_workers_that_all_wait_for_each_other,
    check_large_tensors_between_peers,
]
TOGETHER = [
    *_CALLS,
    check_a_torch_world,
    check_a_killed_worker_ends_every_call,
    check_close_ends_the_processes,
    check_a_factory_that_raises_among_others,
]
CALLS_ONLY = [check_exceptions_keep_kind_message_and_place, check_tensors_go_and_come, *_CALLS]
