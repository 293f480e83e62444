"""The groups of this machine: what both do, and how processes start, are lost, and end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.contract import ALONE, TOGETHER, alive, outcomes
from tests.cluster.objects import Closing, Worker, refuse, worker
from verl.cluster.group import Inline, Spec, WorkerLost
from verl.cluster.processes import Processes
from verl.cluster.serve import told_when_slow
from verl.config.errors import RequestError

ROOT = Path(__file__).parents[2]


def specs(n: int) -> list[Spec]:
    return [Spec("cpu", f"role{rank}") for rank in range(n)]


def processes(factory: Callable[..., Any], args: tuple[Any, ...] = (), n: int = 1, **options: Any) -> Processes:
    return Processes(factory, args, specs(n), **{"logs": None, **options})


def inline(factory: Callable[..., Any], args: tuple[Any, ...], n: int) -> Inline:
    return Inline(factory, args, specs(n)[0])


@pytest.mark.parametrize("start", [inline, processes])
@pytest.mark.parametrize("check", ALONE)
def test_alone(check: Callable[..., None], start: Callable[..., Any]) -> None:
    check(start)


@pytest.mark.parametrize("check", TOGETHER)
def test_together(check: Callable[..., None]) -> None:
    check(processes)


def gone(pid: int, within: float = 20.0) -> bool:
    """Whether the process ends in time. One that isn't our child is reaped by another."""
    end = time.monotonic() + within
    while alive(pid) and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def script(folder: Path, body: str) -> subprocess.Popen[str]:
    """A user's script without a guard around its main part; workers' calls are made by ``ask``."""
    path = folder / "script.py"
    head = """
    import asyncio, os, signal, sys, threading
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell's children ignore it
    from tests.cluster.objects import worker
    from verl.cluster.group import Spec
    from verl.cluster.processes import Processes
    print("runs")
    def ask(*call): return asyncio.run(group.call(*call))
    """
    path.write_text(textwrap.dedent(head) + textwrap.dedent(body))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    return subprocess.Popen([sys.executable, str(path)], cwd=folder, env=environment, stdout=-1, text=True)


# -- start ------------------------------------------------------------------------------------------------------------


def test_a_worker_is_up_soon_and_without_torch() -> None:
    begin = time.monotonic()
    with closing(processes(worker)) as group:
        seconds = time.monotonic() - begin
        modules = asyncio.run(group.call(0, "modules"))
    assert "verl.cluster.serve" in modules and not {"torch", "ray", "numpy", "cloudpickle"} & set(modules)
    assert seconds < 3


def test_what_the_callers_script_defines_travels_without_running_it_again(tmp_path: Path) -> None:
    """Also a lambda, and a factory of the script itself."""
    body = """
    FACTOR = 3
    class Mine:
        def __init__(self, context, reward, other): self.both = reward, other
        def score(self, x): return [f(x) for f in self.both]
    def reward(x): return FACTOR * x
    group = Processes(Mine, (reward, lambda x: -x), [Spec("cpu", "actor")] * 2, logs=None)
    print(ask(0, "score", 5), ask(1, "score", 6))
    group.close()
    """
    process = script(tmp_path, body)
    assert process.communicate(timeout=60)[0].splitlines() == ["runs", "[15, -5] [18, -6]"]
    assert process.returncode == 0


def test_an_argument_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(RequestError, match=r"argument 1 \(lock\).*cannot pickle.*importable module"):
        processes(worker, (1, threading.Lock()))


def test_a_worker_that_is_not_ready_in_time_is_named() -> None:
    with pytest.raises(WorkerLost, match=r"(?m)^worker \d \(role\d on cpu of .*\) was not ready within 3 s"):
        processes(refuse, (5, ValueError, ""), 2, start_timeout=3.0)


def test_a_slow_start_tells_where_it_stands(capfd: pytest.CaptureFixture[str]) -> None:
    with told_when_slow(0.1):
        time.sleep(0.25)
    told = capfd.readouterr().err
    assert told.count("test_a_slow_start_tells_where_it_stands") == 2
    time.sleep(0.15)
    assert capfd.readouterr().err == ""


def test_a_worker_that_dies_at_its_start(tmp_path: Path) -> None:
    def die(context: Any) -> None:
        os.write(2, b"last words\n")
        os._exit(3)

    with pytest.raises(WorkerLost, match=r"worker 0 .* ended with exit status 3; its log: .*worker_0.log$"):
        processes(die, logs=tmp_path)
    assert (tmp_path / "worker_0.log").read_text().endswith("last words\n")


def test_the_number_of_threads_shares_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(context: Any) -> Worker:
        return Worker(context, os.environ["OMP_NUM_THREADS"])

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    with closing(processes(threads, n=2)) as group:
        assert asyncio.run(group.call(1, "given")) == (str(max(1, cores // 2)),)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with closing(processes(threads)) as group:
        assert asyncio.run(group.call(0, "given")) == ("7",)


# -- while it runs ----------------------------------------------------------------------------------------------------


class Chatty(Worker):
    def speak(self) -> None:
        import logging
        import warnings

        print("printed")
        os.system("echo from below")
        logging.getLogger("verl.some.module").info("logged")
        warnings.warn("warned", stacklevel=1)


def test_the_log_holds_all_that_a_worker_says(tmp_path: Path) -> None:
    with closing(processes(Chatty, n=2, logs=tmp_path / "logs")) as group:
        asyncio.run(group.call(1, "speak"))
        place = group.places[1]
    lines = (tmp_path / "logs" / "worker_1.log").read_text().splitlines()
    assert lines[0][:2] == "20" and f"INFO verl.cluster.serve: {place} starts" in lines[0]
    assert lines[1:3] == ["printed", "from below"]
    assert lines[3].endswith("INFO verl.some.module: logged") and "WARNING py.warnings" in lines[4]
    assert "printed" not in (tmp_path / "logs" / "worker_0.log").read_text()


def test_interrupts_pass_the_workers_by() -> None:
    with closing(processes(worker)) as group:
        for stop in signal.SIGINT, signal.SIGTERM:
            os.kill(group.places[0].pid, stop)
        time.sleep(0.1)
        assert asyncio.run(group.call(0, "echo", 1)) == (1,)


def test_traffic_counts_the_controllers_bytes_only() -> None:
    with closing(processes(worker, n=2)) as group:
        before = group.traffic
        asyncio.run(group.call(0, "relay", 1, "echo", 1))
        small = group.traffic - before
        asyncio.run(group.call(0, "echo", b"x" * 100_000))
        assert 0 < small < 300
        assert 200_000 < group.traffic - before - small < 201_000


def test_a_result_that_is_sent_is_let_go() -> None:
    class Keeping(Worker):
        def make(self) -> Any:
            import weakref

            import torch

            made = torch.zeros(1000, 1000)
            self.made = weakref.ref(made)
            return made

        def kept(self) -> bool:
            time.sleep(0.1)
            return self.made() is not None

    with closing(processes(Keeping)) as group:
        assert asyncio.run(group.call(0, "make")).shape == (1000, 1000)
        assert not asyncio.run(group.call(0, "kept"))


# -- losses -----------------------------------------------------------------------------------------------------------


class Dying(Worker):
    def exit(self, status: int) -> None:
        os._exit(status)

    def exit_with_a_child_left(self, path: str, apart: bool) -> None:
        """The child has all that was open here, the sockets too; ``apart``: and a session of its own."""
        child = os.fork()
        if child == 0:
            if apart:
                os.setsid()
            time.sleep(30)
        Path(path).write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)

    def spin(self) -> None:
        """Nothing else runs in this process any more: a regular expression lets nobody in."""
        import re

        re.match(r"(a+)+$", "a" * 60 + "b")


def check_loss(group: Processes, how: str, *call: Any) -> None:
    """The call is lost soon, and so is a later one of the other worker."""
    begin = time.monotonic()
    for rank in 0, 1:
        with pytest.raises(WorkerLost, match=rf"(?m)^worker 1 \(role1 .*\) {how}; its log: .*worker_1.log$"):
            asyncio.run(group.call(rank, *call))
    assert time.monotonic() - begin < 10


def test_the_exit_status_of_a_lost_worker(tmp_path: Path) -> None:
    with closing(processes(Dying, n=2, logs=tmp_path)) as group:
        check_loss(group, "ended with exit status 4", "relay", 1, "exit", 4)


@pytest.mark.parametrize("apart", [False, True])
def test_the_signal_that_killed_a_worker_also_where_a_child_of_it_lives_on(apart: bool, tmp_path: Path) -> None:
    """Which is then killed."""
    with closing(processes(Dying, n=2, logs=tmp_path)) as group:
        how = r"was killed by signal 9 \(SIGKILL\), which the system does when memory runs out"
        check_loss(group, how, "relay", 1, "exit_with_a_child_left", str(tmp_path / "child"), apart)
        assert gone(int((tmp_path / "child").read_text()))


@pytest.mark.parametrize("way", ["stopped", "spinning"])
def test_a_silent_worker_is_lost(way: str) -> None:
    async def silence() -> list[Any]:
        if way == "stopped":
            os.kill(group.places[1].pid, signal.SIGSTOP)
        return await outcomes(group, (0, "hold"), (1, "spin"), (0, "relay", 1, "hold"))

    with closing(processes(Dying, n=2, heartbeat=2.0)) as group:
        asyncio.run(asyncio.sleep(2.5))  # heartbeats keep it alive
        assert asyncio.run(group.call(1, "echo", 1)) == (1,)
        begin = time.monotonic()
        for error in asyncio.run(silence()):
            assert isinstance(error, WorkerLost) and f"{group.places[1]} has not answered for 2 s" in str(error)
        assert 1 < time.monotonic() - begin < 20
        begin = time.monotonic()
    assert time.monotonic() - begin < 10  # nobody waits for it at the end
    assert not any(alive(place.pid) for place in group.places)


def test_a_controller_that_was_held_up_loses_nobody(tmp_path: Path) -> None:
    body = """
    import subprocess
    group = Processes(worker, (), [Spec("cpu", "actor")], logs=None, heartbeat=1.0)
    me = os.getpid()
    stop = subprocess.Popen(["sh", "-c", f"kill -STOP {me}; sleep 2; kill -CONT {me}"])
    print(ask(0, "echo", 1), stop.wait())
    asyncio.run(asyncio.sleep(0.5))
    print(ask(0, "echo", 2))
    """
    assert script(tmp_path, body).communicate(timeout=60)[0].splitlines() == ["runs", "(1,) 0", "(2,)"]


# -- the nursery ------------------------------------------------------------------------------------------------------


def preloading(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, n: int = 2, name: str = "heavy") -> Processes:
    """Workers that have imported a module ``name``, which notes each time that its ``body`` has run."""
    folder.mkdir(exist_ok=True)
    note = f"open({str(folder / 'imported')!r}, 'a').write('once ')"
    (folder / f"{name}.py").write_text(f"{textwrap.dedent(body)}\n{note}\n")
    monkeypatch.syspath_prepend(str(folder))
    return processes(Dying, (), n, preload=[name], logs=folder / "logs")


def test_modules_are_imported_once_for_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(preloading(tmp_path, monkeypatch, "print('imports')", 3)) as group:
        for modules in asyncio.run(outcomes(group, *((rank, "modules") for rank in range(3)))):
            assert "heavy" in modules
    assert (tmp_path / "imported").read_text() == "once "
    first, *others = [(tmp_path / "logs" / f"worker_{rank}.log").read_text() for rank in range(3)]
    assert first.startswith("imports\n") and not any("imports" in log for log in others)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("heavy", "import threading, time\nthreading.Thread(target=time.sleep, args=(30,), daemon=True).start()"),
        ("torch", "class cuda:\n    _is_in_bad_fork = staticmethod(lambda: True)"),
    ],
)
def test_imports_whose_effects_no_fork_has_are_left_to_the_workers(
    name: str, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(preloading(tmp_path, monkeypatch, body, name=name)) as group:
        assert all(name not in modules for modules in asyncio.run(outcomes(group, (0, "modules"), (1, "modules"))))
    assert (tmp_path / "imported").read_text() == "once "


def test_an_import_that_fails_is_the_factorys_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def factory(context: Any) -> None:
        import broken  # type: ignore[import-not-found]  # noqa: F401

    (tmp_path / "broken.py").write_text("raise NotImplementedError('no such card')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with closing(processes(worker, preload=["broken", "missing"])) as group:
        assert asyncio.run(group.call(0, "echo", 1)) == (1,)
    with pytest.raises(NotImplementedError, match="no such card") as caught:
        processes(factory, preload=["broken", "missing"])
    assert "broken.py" in caught.value.__notes__[0]


def test_workers_draw_different_random_numbers() -> None:
    class Drawing(Worker):
        def draw(self) -> tuple[float, float]:
            import random

            import numpy as np

            return random.random(), np.random.random()

    with closing(processes(Drawing, n=2, preload=["random", "numpy.random"])) as group:
        (a, b), (c, d) = asyncio.run(outcomes(group, (0, "draw"), (1, "draw")))
        assert len({a, b, c, d}) == 4


def test_the_host_leaves_no_thread_before_the_fork() -> None:
    """Of Python or of a library; OpenBLAS starts some, which it can do without."""
    code = (
        "import verl.runtime.host, os, threading; print(len(os.listdir('/proc/self/task')), threading.active_count())"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).split() == ["1", "1"]


def nursery(group: Processes) -> int:
    """The parent of all workers, which isn't this process."""
    parents = {int(Path(f"/proc/{p.pid}/stat").read_text().rpartition(")")[2].split()[1]) for p in group.places}
    assert len(parents) == 1 and os.getpid() not in parents
    return parents.pop()


def test_the_death_of_the_nursery_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def kill() -> list[Any]:
        calls = asyncio.ensure_future(outcomes(group, (0, "hold"), (1, "relay", 0, "hold")))
        await outcomes(group, (0, "who"), (1, "who"))
        os.kill(nursery(group), signal.SIGKILL)
        return await calls

    with closing(preloading(tmp_path, monkeypatch, "")) as group:
        begin = time.monotonic()
        for error in asyncio.run(kill()):
            assert isinstance(error, WorkerLost)
            assert str(error).startswith("the process that starts the workers was killed by signal 9 (SIGKILL)")
        assert time.monotonic() - begin < 10
        assert all(gone(place.pid) for place in group.places)


def test_the_death_of_the_nursery_before_there_are_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.monotonic()
    with pytest.raises(WorkerLost, match=r"that starts the workers ended with exit status 3; its log: .*worker_0.log$"):
        preloading(tmp_path, monkeypatch, "import os\nos.write(2, b'last words')\nos._exit(3)")
    assert (tmp_path / "logs" / "worker_0.log").read_text() == "last words"
    assert time.monotonic() - begin < 20


def test_interrupts_pass_the_nursery_by() -> None:
    with closing(processes(worker)) as group:
        for stop in signal.SIGINT, signal.SIGTERM:
            os.kill(nursery(group), stop)
        time.sleep(0.1)
        assert asyncio.run(group.call(0, "echo", 1)) == (1,)


@pytest.mark.parametrize("when", ["importing", "working"])
def test_a_killed_controller_leaves_nobody(when: str, tmp_path: Path) -> None:
    """Neither the nursery nor the workers that it forked, nor one that still imports."""
    (tmp_path / "heavy.py").write_text("import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(1)\n")
    body = """
    import time
    from pathlib import Path
    def kill():
        while not (WORKING and "starts" in text() or not WORKING and text()): time.sleep(0.02)
        os.kill(os.getpid(), 9)
    def text(): return "".join(log.read_text() for log in Path("logs").glob("worker_1.log" if WORKING else "*"))
    threading.Thread(target=kill).start()
    Processes(worker, (), [Spec("cpu", "actor")] * 2, logs=Path("logs"), preload=["heavy"])
    time.sleep(30)
    """
    process = script(tmp_path, f"WORKING = {when == 'working'}\n" + textwrap.dedent(body))
    assert process.wait(60) == -9
    logs = [log.read_text() for log in sorted((tmp_path / "logs").iterdir())]
    pids = [int(logs[0].split()[0])]
    pids += [int(log.partition("process ")[2].partition(")")[0]) for log in logs if "process " in log]
    assert len(pids) > 1 if when == "working" else len(pids) == 1
    assert all(gone(pid) for pid in pids)


def test_an_interrupt_while_modules_are_imported(tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text("import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(30)\n")
    body = """
    import signal, time
    from pathlib import Path
    def interrupt():
        while not any(log.read_text() for log in Path("logs").glob("*")): time.sleep(0.02)
        Path("at").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    Processes(worker, (), [Spec("cpu", "actor")] * 2, logs=Path("logs"), preload=["heavy"])
    """
    process = script(tmp_path, body)
    assert process.wait(60) == -signal.SIGINT
    assert time.time() - float((tmp_path / "at").read_text()) < 10  # the module would sleep for 30
    assert not alive(int((tmp_path / "logs" / "worker_0.log").read_text()))


# -- ends -------------------------------------------------------------------------------------------------------------


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread, file, socket, process or folder; objects were closed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    (tmp_path / "closed").mkdir()
    group = processes(Closing, (str(tmp_path / "closed"),), 3)
    assert len(list(tmp_path.iterdir())) == 2
    assert (tmp_path / "closed").stat().st_mode & 0o777 != next(tmp_path.glob("verl-*")).stat().st_mode & 0o777 == 0o700
    asyncio.run(group.call(0, "relay", 1, "who"))
    begin = time.monotonic()
    group.close()
    assert time.monotonic() - begin < 10
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
    assert [path.name for path in tmp_path.iterdir()] == ["closed"]
    assert sorted(path.name for path in (tmp_path / "closed").iterdir()) == ["closed_0", "closed_1", "closed_2"]
    assert not any(alive(place.pid) for place in group.places)


def test_an_object_that_will_not_close_is_not_waited_for() -> None:
    class Stuck(Worker):
        def close(self) -> None:
            threading.Event().wait()

    group = processes(Stuck)
    begin = time.monotonic()
    group.close()
    assert 2 < time.monotonic() - begin < 20
    assert not alive(group.places[0].pid)


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(3)", "os.kill(os.getpid(), 9)", "spin"])
def test_workers_end_with_their_controller(end: str, tmp_path: Path) -> None:
    """However it ends, and also where the worker lets none of its own threads run, or its starting thread is gone."""
    busy = """
    import re
    threading.Thread(target=ask, args=(0, "spin"), daemon=True).start()
    import time; time.sleep(0.5); os.kill(os.getpid(), 9)
    """
    body = """
    from tests.cluster.test_groups import Dying
    made = []
    start = lambda: made.append(Processes(Dying, (), [Spec("cpu", "actor")], logs=None))
    thread = threading.Thread(target=start); thread.start(); thread.join()
    group = made[0]
    assert ask(0, "echo", 1) == (1,)
    print(group.places[0].pid, flush=True)
    """
    process = script(tmp_path, textwrap.dedent(body) + textwrap.dedent(busy if end == "spin" else end))
    pid = int(process.communicate(timeout=60)[0].split()[1])
    assert process.returncode == {"pass": 0, "raise SystemExit(3)": 3}.get(end, -9)
    assert gone(pid)


def test_an_interrupt_while_the_workers_start(tmp_path: Path) -> None:
    body = """
    import signal, time
    from pathlib import Path
    from tests.cluster.objects import refuse
    def interrupt():
        while sum(log.stat().st_size > 0 for log in Path("logs").glob("*")) < 2: time.sleep(0.02)
        Path("at").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    Processes(refuse, (5, ValueError, ""), [Spec("cpu", "actor")] * 2, logs=Path("logs"))
    """
    process = script(tmp_path, body)
    assert process.wait(60) == -signal.SIGINT
    assert time.time() - float((tmp_path / "at").read_text()) < 10  # the factories would wait for 30
    logs = [log.read_text() for log in (tmp_path / "logs").iterdir()]
    pids = [int(log.partition("process ")[2].partition(")")[0]) for log in logs]
    assert len(pids) == 2 and not any(alive(pid) for pid in pids)
