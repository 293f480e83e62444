"""Workers that are actors of a Ray cluster, started here or joined."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from verl.cluster.group import CALLS, Context, Factory, Peer, Place, Spec, WorkerLost, portable
from verl.cluster.link import ERROR, RESULT, Parts, Reply, dumps, loads
from verl.cluster.nodes import asked_for, existing, may_host, on_gpu
from verl.cluster.processes import sendable
from verl.cluster.serve import START, log_to_stderr, make
from verl.config.devices import cores
from verl.config.errors import RequestError

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as lacking:
    raise RequestError(
        "cluster.backend ray needs the package ray, which isn't installed: pip install 'verl[ray]'"
    ) from lacking

log = logging.getLogger(__name__)
FAREWELL = 3.0  # seconds for the objects' ``close()``, and again for the end of the processes
CPUS = 0.001  # per worker: Ray counts CPUs and binds nobody to them, so that a machine hosts as many as are asked for
_GIVEN = 120.0  # seconds for the cluster to reserve the devices and start processes on them
_BEAT = 0.5  # seconds between two looks at the workers
_MANY = 100_000  # calls: more than there ever are

_left = threading.Event()  # a lost group of ours left Ray running, for the next one; else Ray ends with the process


class RayGroup:
    """``WorkerGroup`` of actors, one per spec, each with a GPU of its own where its spec says ``cuda``.

    ``address``: of the cluster to join (``auto``: this machine's); by default ``RAY_ADDRESS``, else a local cluster is
    started, which ends with the group. Ray since 2.60 guards that one by a token, kept in ``~/.ray`` unless
    ``RAY_AUTH_TOKEN`` has one. A spec's node is a node's name, address, host name or the start of its id, or
    ``label:NAME``: any node with a custom resource or an accelerator of that name. ``logs``: the folder, on each
    machine, for ``worker_<rank>.log``, which get all that the processes print.

    Raises what a factory raised; ``RequestError`` for arguments that can't be sent, and for nodes or GPUs that the
    cluster lacks or doesn't give in two minutes; ``WorkerLost`` for a process that isn't ready within ``start_timeout``
    seconds. One that says nothing for ``heartbeat`` seconds counts as dead.
    """

    def __init__(
        self,
        factory: Factory,
        args: tuple[Any, ...],
        specs: Sequence[Spec],
        *,
        logs: Path | None,
        address: str | None = None,
        heartbeat: float = 20.0,
        start_timeout: float = START,
    ) -> None:
        made = sendable(factory, args)
        self.places: list[Place] = []
        self.traffic = 0  # bytes that the controller has sent to and received from the workers
        self._logs, self._heartbeat = logs and Path(logs).absolute(), heartbeat
        self._actors: list[Any] = []
        self._hosts: list[str] = []  # each worker's machine, by address
        self._spaces: list[str] = []  # where its process number means something
        self._bundles: Any = None  # what Ray has reserved
        self._lock = threading.Lock()  # guards the three below
        self._waiting: set[asyncio.Future[Reply]] = set()
        self._lost: tuple[Place | None, str] | None = None  # who is lost, and what happened; closing is a loss of all
        self._closing = False
        self._ended = threading.Event()
        self._ours = _connect(address)
        atexit.register(self.close)
        try:
            port = self._place(specs, min(start_timeout, _GIVEN))
            self._start(made, port, start_timeout)
            threading.Thread(target=self._watch, daemon=True, name="verl-ray-watch").start()
        except BaseException:
            self.close()
            raise

    async def call(self, rank: int, method: str, *args: Any) -> Any:
        parts = _movable(dumps((method, args)))
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._lost is not None:
                raise self._loss()
            self._waiting.add(answer)
        try:
            future = self._actors[rank].call.remote(parts).future()
            future.add_done_callback(lambda done: self._arrived(rank, answer, done))
            reply = await answer
        finally:
            with self._lock:
                self._waiting.discard(answer)
        self.traffic += _size(parts) + _size(reply[1])
        return _outcome(*reply)

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing, whole = True, self._lost is None
        self._ended.set()
        self._fail(None, "the workers were closed")
        atexit.unregister(self.close)
        if not ray.is_initialized():
            return
        ending = [actor.close.remote() for actor in self._actors]
        if ending:
            ray.wait(ending, num_returns=len(ending), timeout=FAREWELL if whole else 1.0)
        for actor in self._actors:
            ray.kill(actor)
        near = [place.pid for place, space in zip(self.places, self._spaces, strict=True) if space == _space()]
        end = time.monotonic() + FAREWELL
        while (left := [pid for pid in near if _exists(pid)]) and time.monotonic() < end:
            time.sleep(0.01)
            if time.monotonic() > end - FAREWELL / 2:  # Ray asks a process to end, which one that stands still won't
                for pid in left:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
        if self._bundles is not None:
            remove_placement_group(self._bundles)
        if self._ours and whole:
            ray.shutdown()
        elif self._ours:  # for the next one: Ray leaves two files open each time it ends
            _left.set()

    # -- start --------------------------------------------------------------------------------------------------------

    def _place(self, specs: Sequence[Spec], limit: float) -> int:
        """Reserve the devices of all, then start a process on each. Returns a free port of the first one's machine."""
        end = time.monotonic() + limit
        nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeName"])
        allowed = may_host(specs, nodes)
        gpus = [int(on_gpu(spec)) for spec in specs]
        self._bundles = placement_group(
            [{"CPU": CPUS, "GPU": 1} if gpu else {"CPU": CPUS} for gpu in gpus],
            bundle_label_selector=[{"ray.io/node-id": f"in({','.join(ids)})"} if ids else {} for ids in allowed],
        )
        if not self._bundles.wait(limit):
            free = ray.available_resources()
            raise RequestError(
                f"the cluster hasn't given {asked_for(specs)} within {limit:g} s: {free.get('GPU', 0):g} of its GPUs "
                f"and {free.get('CPU', 0):g} of its CPUs are free; {existing(nodes)}"
            )
        actor = ray.remote(_Worker)
        for rank, (spec, gpu) in enumerate(zip(specs, gpus, strict=True)):
            bundle = PlacementGroupSchedulingStrategy(self._bundles, placement_group_bundle_index=rank)
            options = actor.options(
                num_cpus=CPUS,
                num_gpus=gpu,
                scheduling_strategy=bundle,
                max_concurrency=_MANY,
                max_restarts=0,
                max_task_retries=0,
            )
            self._actors.append(options.remote(rank, spec, self._log(rank)))
        try:
            found = ray.get([a.where.remote() for a in self._actors], timeout=max(1.0, end - time.monotonic()))
        except GetTimeoutError:
            raise WorkerLost(f"Ray hasn't started the processes of {asked_for(specs)} within {limit:g} s") from None
        except RayError as error:
            raise WorkerLost(f"Ray couldn't start the processes of {asked_for(specs)}: {error}") from error
        self.places, self._hosts, self._spaces, ports = map(list, zip(*found, strict=True))
        return ports[0]

    def _start(self, made: bytes, port: int, limit: float) -> None:
        """Have the factory make the objects; the first failure ends it for all. A worker that imports and loads may be
        silent for long: here only ``limit`` seconds count."""
        end = time.monotonic() + limit
        host = self._hosts[0] if len(set(self._hosts)) > 1 else "127.0.0.1"
        meet = f"tcp://{host}:{port}" if len(self._hosts) > 1 else None
        threads = os.environ.get("OMP_NUM_THREADS")
        waiting = {
            actor.start.remote(self._actors, self.places, meet, self._hosts.count(here), threads, made): rank
            for rank, (actor, here) in enumerate(zip(self._actors, self._hosts, strict=True))
        }
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=_BEAT)
            for ref in done:
                rank = waiting.pop(ref)
                try:
                    reply = ray.get(ref)
                except RayError as error:
                    self._lose(rank, _cause(error))
                else:
                    _outcome(*reply)
            if self._lost is None and waiting and time.monotonic() > end:
                self._lose(min(waiting.values()), f"was not ready within {limit:g} s")
            if self._lost is not None:
                raise self._loss()

    # -- losses -------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Ask each worker for a sign of life, again and again. Looks are counted, not seconds: a controller that was
        itself held up blames nobody."""
        asked = [actor.ping.remote() for actor in self._actors]
        silent = [0] * len(asked)
        while not self._ended.wait(_BEAT):
            for rank, actor in enumerate(self._actors):
                try:
                    if ray.wait(asked[rank : rank + 1], timeout=0)[0]:
                        ray.get(asked[rank])
                        asked[rank], silent[rank] = actor.ping.remote(), 0
                except Exception as error:  # also where Ray itself is gone
                    return self._lose(rank, _cause(error))
                silent[rank] += 1
                if silent[rank] * _BEAT > self._heartbeat:
                    return self._lose(rank, f"has not answered for {self._heartbeat:g} s")
        return None

    def _arrived(self, rank: int, answer: asyncio.Future[Reply], done: Any) -> None:
        if error := done.exception():
            self._lose(rank, _cause(error))
        else:
            _settle(answer, done.result())

    def _lose(self, rank: int, how: str) -> None:
        path = self._log(rank)
        self._fail(self.places[rank], f"{self.places[rank]} {how}" + ("" if path is None else f"; its log: {path}"))

    def _fail(self, place: Place | None, text: str) -> None:
        with self._lock:
            self._lost = self._lost or (place, text)
            waiting = list(self._waiting)
        for answer in waiting:
            _settle(answer, self._loss())

    def _loss(self) -> WorkerLost:
        place, text = self._lost or (None, "")
        return _lost(text, place)

    def _log(self, rank: int) -> Path | None:
        return self._logs and self._logs / f"worker_{rank}.log"


class _Worker:
    """The actor. Each call has a thread, the controller's ``CALLS`` at once, peers' as many as there are: they may come
    while all others wait for peers. The loop itself stays free for ``ping``."""

    def __init__(self, rank: int, spec: Spec, path: Path | None) -> None:
        context = ray.get_runtime_context()
        node = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        self._host, self._device, device = node["NodeManagerAddress"], spec.device, spec.device
        if on_gpu(spec):
            device = f"cuda:{context.get_accelerator_ids()['GPU'][0]}"  # the number that the machine gives it
            one = os.environ.get("CUDA_VISIBLE_DEVICES", ",").count(",") == 0
            self._device = "cuda:0" if one else device
        self._place = Place(rank, device, spec.role, node["NodeName"], os.getpid())
        self._object: Any = None
        self._calls, self._asks = (ThreadPoolExecutor(n, "verl-call") for n in (CALLS, _MANY))
        if path is not None:
            try:
                _write_to(path)
            except OSError as error:  # on another machine
                log.warning("no log at %s: %s", path, error)
        log.info("%s starts", self._place)

    async def ping(self) -> None:
        """A sign of life."""

    async def where(self) -> tuple[Place, str, str, int]:
        with socket.socket() as free:
            free.bind(("", 0))
            return self._place, self._host, _space(), free.getsockname()[1]

    async def start(
        self, actors: list[Any], places: list[Place], meet: str | None, near: int, threads: str | None, made: bytes
    ) -> Reply:
        """``near``: how many workers this machine has; ``threads``: for torch, as the controller's environment says."""
        # Ray itself has set 1 by now, as for any actor with less than two CPUs; torch comes later
        os.environ["OMP_NUM_THREADS"] = threads or str(max(1, cores() // near))
        if near == len(places):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

        def peer(rank: int) -> Peer:
            if not 0 <= rank < len(actors):
                raise ValueError(f"worker {rank} doesn't exist: there are {len(actors)}")
            return _Peer(actors[rank], places[rank])

        def begin() -> None:
            self._object = make(made, Context(self._place.rank, len(places), self._device, peer, meet))

        return await self._answer(self._asks, begin)

    async def call(self, parts: Parts) -> Reply:
        return await self._answer(self._calls, lambda: self._method(parts))

    async def ask(self, parts: Parts) -> Reply:
        return await self._answer(self._asks, lambda: self._method(parts))

    async def close(self) -> None:
        if hasattr(self._object, "close"):
            await asyncio.get_running_loop().run_in_executor(self._asks, self._object.close)
        log.info("%s ends", self._place)

    def _method(self, parts: Parts) -> Any:
        method, args = _loads(parts)
        return getattr(self._object, method)(*args)

    async def _answer(self, threads: ThreadPoolExecutor, work: Callable[[], Any]) -> Reply:
        def run() -> Reply:
            try:
                return RESULT, _movable(dumps(work()))
            except BaseException as error:
                return ERROR, _movable(dumps(portable(error, self._place)))

        return await asyncio.get_running_loop().run_in_executor(threads, run)


class _Peer:
    """What it sends and gets goes through Ray's object store, from worker to worker."""

    def __init__(self, actor: Any, place: Place) -> None:
        self._actor, self._place = actor, place

    def call(self, method: str, *args: Any) -> Any:
        try:
            reply = self._actor.ask.remote(_movable(dumps((method, args)))).future().result()
        except RayError as error:
            raise _lost(f"{self._place} {_cause(error)}", self._place) from None
        return _outcome(*reply)


def _movable(parts: Parts) -> Parts:
    """With arrays for buffers: Ray moves those as they are."""
    return [bytes(parts[0]), *(np.frombuffer(part, np.uint8) for part in parts[1:])]


def _loads(parts: Parts) -> Any:
    """Buffers are copied: those of the object store can't be written to."""
    return loads([parts[0], *map(bytearray, parts[1:])])


def _outcome(kind: int, parts: Parts) -> Any:
    value = _loads(parts)
    if kind == ERROR:
        raise value
    return value


def _size(parts: Parts) -> int:
    return sum(len(part) for part in parts)


def _settle(answer: asyncio.Future[Reply], outcome: Reply | WorkerLost) -> None:
    """From any thread."""

    def settle() -> None:
        if answer.done():  # cancelled, or lost
            return
        if isinstance(outcome, WorkerLost):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    with contextlib.suppress(RuntimeError):  # its loop has ended
        answer.get_loop().call_soon_threadsafe(settle)


def _lost(text: str, place: Place | None) -> WorkerLost:
    error = WorkerLost(text)
    if place is not None:
        place.mark(error)
    return error


def _cause(error: BaseException) -> str:
    """Ray tells first of its own numbers, and last of what might be."""
    found = re.search(r"exit detail: (.+?)(?= Some common| There are some|$)", str(error))
    return f"is gone (killed, out of memory or crashed): {found[1]}" if found else f"is gone: {error}"


def _space() -> str:
    """This machine, or the container of it: here process numbers are the same processes."""
    return f"{ray.util.get_node_ip_address()} {os.readlink('/proc/self/ns/pid')}"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _write_to(path: Path) -> None:
    """All that this process prints or logs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    log_to_stderr()


def _connect(address: str | None) -> bool:
    """Make sure that Ray runs. Returns whether it was started, or joined, here or by a group that was lost."""
    if ray.is_initialized():
        ours = _left.is_set()
        _left.clear()
        return ours
    _left.clear()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    host, _, port = address.rpartition(":")
    if "://" in address:
        raise RequestError(
            f"the Ray address {address!r} is a client's: start the run on a node of the cluster, with auto or HOST:PORT"
        )
    stop = signal.getsignal(signal.SIGTERM)  # Ray sets its own
    try:
        if host:  # Ray itself would try for many minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of what Ray plans
            ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        what = "start Ray on this machine" if address == "local" else f"join the Ray cluster at {address!r}"
        raise RequestError(f"can't {what}: {error}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, stop)
    return True
