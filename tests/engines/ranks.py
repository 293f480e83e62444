"""Runs a function on several ranks, each a process of its own, over gloo (or NCCL, with a GPU for each rank).

``run(4, f, x)`` calls ``f(x)`` in four processes that form one process group, and gives their results by rank. ``f`` is
named by module and name, so it must be a module's own function. The processes stay for the next call and end with this
one; a rank that raises or hangs ends them all. They are forked from one process that has the imports, which take
seconds; where a fork would lose what it needs (CUDA, frameworks of macOS) each imports by itself.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from tests.forks import FORKS

TIMEOUT = 100  # seconds of one call
_ranks: list[tuple[BaseProcess, connection.Connection]] = []


def run(n: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, backend: str = "gloo") -> list[Any]:
    """Results of ``function(*args)`` on each of ``n`` ranks. The first failure's traceback in a ``RuntimeError``."""
    started = []
    forks = sys.platform == "linux" and not torch.cuda.is_available()
    context: Any = FORKS if forks else get_context("spawn")
    while len(_ranks) < n:
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there,), daemon=True)
        process.start()
        there.close()
        _ranks.append((process, here))
        started.append(here)
    for pipe in started:  # imports take their time, which is no call's
        pipe.recv_bytes()
    with tempfile.TemporaryDirectory() as folder:
        for rank, (_, pipe) in enumerate(_ranks[:n]):
            call = function.__module__, function.__qualname__, pickle.dumps(args)
            pipe.send((*call, folder, rank, n, timeout, backend))
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(_ranks[:n])}
        results: list[Any] = [None] * n
        end = time.monotonic() + timeout
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                _close()
                raise RuntimeError(f"no answer from ranks {sorted(waiting.values())} of {n} within {timeout} s")
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    fine, results[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    fine, results[rank] = False, "its process died"
                if not fine:
                    _close()
                    raise RuntimeError(f"rank {rank} of {n}: {results[rank]}")
    return results


def _serve(pipe: connection.Connection) -> None:
    import torch.distributed as dist

    import verl.engines.fsdp  # noqa: F401 (where it isn't there yet)

    torch.set_num_threads(1)
    pipe.send_bytes(b"ready")
    while True:
        try:
            module, name, args, folder, rank, n, timeout, backend = pipe.recv()
        except EOFError:
            return
        try:
            if "nccl" in backend:
                torch.cuda.set_device(rank)
            meet, limit = f"file://{folder}/meet", timedelta(seconds=timeout)
            dist.init_process_group(backend, init_method=meet, rank=rank, world_size=n, timeout=limit)
            try:
                answer = True, getattr(importlib.import_module(module), name)(*pickle.loads(args))
            finally:
                dist.destroy_process_group()
        except Exception:
            answer = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))


@atexit.register
def _close() -> None:
    for process, pipe in _ranks:
        pipe.close()
        process.kill()
        process.join()
    _ranks.clear()


os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine whose host name resolves to nothing still has this
