"""Workers as Ray actors: the contract, placement on two nodes with pretended GPUs, losses, and what is left behind.

All on one cluster of two nodes of this machine, ``first`` and ``second``.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from tests.cluster.contract import ALONE, CALLS_ONLY, TOGETHER, alive, outcomes
from tests.cluster.objects import Closing, worker
from tests.cluster.ray_starts import BARE, surroundings, why_not
from verl.cluster.group import Context, Spec, WorkerLost
from verl.cluster.ray import RayGroup
from verl.config.errors import RequestError


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    if reason := why_not():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        surroundings(patch)
        first = {"num_cpus": 1, "num_gpus": 2, "node_name": "first"}
        nodes = Cluster(initialize_head=True, head_node_args=first | BARE)
        second = {"num_cpus": 1, "num_gpus": 1, "node_name": "second"}
        nodes.add_node(**second | BARE, resources={"big": 1, "accelerator_type:A100": 1})
        patch.setenv("RAY_ADDRESS", nodes.address)
        ray.init(log_to_driver=False, logging_level="ERROR")
        try:
            yield
        finally:
            ray.shutdown()
            nodes.shutdown()


def group(
    factory: Callable[..., Any], args: tuple[Any, ...] = (), n: int = 1, *, specs: Any = None, **options: Any
) -> RayGroup:
    specs = specs or [Spec("cpu", f"role{rank}") for rank in range(n)]
    return RayGroup(factory, args, specs, **{"logs": None, **options})


@pytest.mark.parametrize("check", [check for check in ALONE + TOGETHER if check not in CALLS_ONLY])
def test_contract(check: Callable[..., None]) -> None:
    check(group)
    states = {entry["state"] for entry in placement_group_table().values()}
    assert states == {"REMOVED"}


class Lent:
    """A group that others use, too: who closes it leaves it as it is."""

    def __init__(self, workers: RayGroup) -> None:
        self.places, self.call = workers.places, workers.call

    def close(self) -> None:
        pass


def test_contract_of_calls() -> None:
    """By one group, as each worker takes Ray seconds to start."""
    with closing(group(worker, n=3)) as workers:
        for check in CALLS_ONLY:
            check(lambda *_: Lent(workers))


class Seen(Closing):
    """Tells where it is."""

    def seen(self) -> tuple[str | None, str | None, str, str | None]:
        print("printed")
        os.system("echo from below")
        node = ray.get_runtime_context().get_node_id()
        return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("OMP_NUM_THREADS"), node, self.context.meet


def seen(context: Context, folder: str) -> Seen:
    return Seen(context, folder)


def specs(*wanted: tuple[str, str | None]) -> list[Spec]:
    return [Spec(device, "actor" if "cuda" in device else "critic", node) for device, node in wanted]


# -- placement --------------------------------------------------------------------------------------------------------


def test_workers_land_on_their_nodes_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a node's name, by its labels, and wherever there is room; each with a GPU, a log and a farewell of its own."""
    ids = {node["NodeName"]: node["NodeID"] for node in ray.nodes()}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    wanted = specs(("cuda:0", None), ("cuda:1", None), ("cuda:0", "label:a100"), ("cpu", ids["second"][:12]))
    with closing(group(seen, (str(tmp_path),), specs=wanted, logs=tmp_path / "logs")) as workers:
        places = workers.places
        told = asyncio.run(outcomes(workers, *((rank, "seen") for rank in range(4))))
        devices = [who[2] for who in asyncio.run(outcomes(workers, *((rank, "who") for rank in range(4))))]
    assert [place.node for place in places] == ["first", "first", "second", "second"]
    assert sorted(place.device for place in places[:2]) == ["cuda:0", "cuda:1"]
    assert [place.device for place in places[2:]] == ["cuda:0", "cpu"]
    assert devices == ["cuda:0"] * 3 + ["cpu"]  # each sees one GPU
    assert [f"cuda:{visible}" for visible, *_ in told[:3]] == [place.device for place in places[:3]]
    assert [node for _, _, node, _ in told] == [ids[place.node] for place in places]
    assert all(omp == "3" and meet.startswith("tcp://127.0.0.1:") for _, omp, _, meet in told)
    for place in places:
        lines = (tmp_path / "logs" / f"worker_{place.rank}.log").read_text().splitlines()
        assert str(place) in lines[0] and lines[0].startswith("20")
        assert {"printed", "from below"} <= set(lines)
        assert (tmp_path / f"closed_{place.rank}").read_text() == "closed"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            specs(*[("cuda:0", None)] * 4),
            r"^device_map asks for 4 GPUs \(actor\), more than there are: node first \(.*\) has 2 GPUs, 1 CPU; "
            r"node second \(.*\) has 1 GPU, 1 CPU and the labels .*; "
            r"device_map: {actor: 0-2} or {actor: \[0\]} would fit$",
        ),
        (
            specs(("cuda:0", "second"), ("cuda:1", "second")),
            r"^device_map asks for 2 GPUs of second \(actor\), more than there are: node first",
        ),
        (
            specs(("cpu", None), ("cpu", "third")),
            r"^device_map asks for 1 CPU worker of third \(critic\), and the cluster has no such node: node first",
        ),
        (
            specs(("cuda:0", "label:h200")),
            r"^device_map asks for 1 GPU of label:h200 \(actor\), .* and the labels .*big",
        ),
    ],
)
def test_impossible_maps_are_refused_at_once(wanted: list[Spec], message: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RequestError, match=message):
        group(worker, specs=wanted)
    assert time.monotonic() - begin < 5  # a group that waits takes a minute


def test_devices_that_others_hold_are_waited_for() -> None:
    taken = specs(("cuda:0", "second"))
    message = r"hasn't given 1 GPU of second \(actor\) within 1 s: 2 of its GPUs"
    with closing(group(worker, specs=taken)), pytest.raises(RequestError, match=message):
        group(worker, specs=taken, start_timeout=1.0)
    with closing(group(worker, specs=taken)) as again:
        assert again.places[0].node == "second"


# -- losses and ends --------------------------------------------------------------------------------------------------


def test_a_worker_that_stands_still_is_lost(tmp_path: Path) -> None:
    with closing(group(worker, n=2, heartbeat=2.0, logs=tmp_path)) as workers:
        pid = workers.places[1].pid
        os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(WorkerLost, match=rf"process {pid}\) has not answered for 2 s; its log: .*worker_1.log$"):
            asyncio.run(workers.call(0, "hold"))
        assert 1.5 < time.monotonic() - begin < 10
    assert not alive(pid)


def silent(context: Context, seconds: int) -> object:
    """Imports and loads like this, holding Python's lock, so that no other thread answers."""
    ctypes.PyDLL(None).sleep(seconds)
    return worker(context)


def test_a_start_may_be_silent_for_long() -> None:
    with closing(group(silent, (4,), heartbeat=1.0)) as workers:
        assert asyncio.run(workers.call(0, "echo", 1)) == (1,)
    with pytest.raises(WorkerLost, match="within 2 s"):
        group(silent, (9,), heartbeat=1.0, start_timeout=2.0)


def test_an_argument_that_cannot_be_sent_starts_nothing() -> None:
    with pytest.raises(RequestError, match=r"argument 0 \(lock\).*cannot pickle"):
        group(worker, (threading.Lock(),))


def test_calls_are_counted_in_bytes() -> None:
    with closing(group(worker)) as workers:
        asyncio.run(workers.call(0, "echo", bytes(1_000_000)))
        assert 2_000_000 < workers.traffic < 2_001_000


def script(body: str, **environment: str) -> subprocess.Popen[str]:
    head = """
    import asyncio, os, signal, time
    from tests.cluster.objects import worker
    from verl.cluster.group import Spec
    from verl.cluster.ray import RayGroup
    def begin(**options): return RayGroup(worker, (), [Spec("cpu", "actor"), Spec("cpu", "critic")], **options)
    """
    code = textwrap.dedent(head) + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", code], env=os.environ | environment, stdout=-1, stderr=-1, text=True)


def gone(pids: list[int]) -> bool:
    end = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_workers_end_with_a_controller_that_is_killed() -> None:
    body = """
    group = begin(logs=None)  # in the cluster of RAY_ADDRESS
    print([place.pid for place in group.places], flush=True)
    time.sleep(60)
    """
    with script(body) as process:
        assert process.stdout is not None
        pids = eval(process.stdout.readline())
        assert all(map(alive, pids))
        process.kill()
    assert gone(pids)


def test_a_cluster_of_its_own_ends_with_the_group(tmp_path: Path) -> None:
    """It says nothing, leaves SIGTERM to the caller, and ends although the script forgets to close it."""
    body = f"""
    group = begin(logs=None)
    assert asyncio.run(group.call(1, "relay", 0, "echo", 5)) == (5,)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    import ray
    session = ray._private.worker._global_node.get_session_dir_path()
    os.system(f"pgrep -f {{session}} > {tmp_path}/pids")
    print(*(place.pid for place in group.places))
    """
    with script(body, RAY_ADDRESS="", HOME=str(tmp_path)) as process:
        output, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (0, "")
    servers = (tmp_path / "pids").read_text().split()
    assert len(servers) >= 2 and gone([int(pid) for pid in (*output.split(), *servers)])


@pytest.mark.parametrize(
    ("address", "message"),
    [("127.0.0.1:1", r"^can't join the Ray cluster at '127.0.0.1:1': .*refused"), ("ray://head:10001", "HOST:PORT")],
)
def test_no_cluster_at_an_address(address: str, message: str) -> None:
    body = f"""
    begin(logs=None, address={address!r})
    """
    with script(body) as process:
        _, errors = process.communicate(timeout=60)
    last = errors.splitlines()[-1]
    assert last.startswith("verl.config.errors.RequestError: ")
    assert re.search(message, last.partition(": ")[2])


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "verl.cluster.ray")
    with pytest.raises(RequestError, match=r"needs the package ray.*pip install 'verl\[ray\]'"):
        importlib.import_module("verl.cluster.ray")


def test_a_lost_group_leaves_its_cluster_to_the_next() -> None:
    """Each end of Ray would leave files open in this process; the group that ends well ends it."""
    body = """
    import contextlib
    import ray
    from verl.cluster.group import WorkerLost
    def lose(group):
        os.kill(group.places[1].pid, signal.SIGKILL)
        with contextlib.suppress(WorkerLost):
            asyncio.run(group.call(1, "hold"))
        group.close()
        return len(os.listdir("/proc/self/fd"))
    first = lose(begin(logs=None))
    session = ray._private.worker._global_node.get_session_dir_path()
    lose(begin(logs=None))
    print(lose(begin(logs=None)) <= first + 1, session == ray._private.worker._global_node.get_session_dir_path())
    begin(logs=None).close()
    print(ray.is_initialized())
    """
    with script(body, RAY_ADDRESS="") as process:
        output, errors = process.communicate(timeout=200)
    told = [line for line in output.splitlines() if "raylet" not in line]  # Ray says that a worker died
    assert (told, errors) == (["True True", "False"], "")
