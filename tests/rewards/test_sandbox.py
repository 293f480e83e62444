"""What a program in the sandbox can and can't do, with all layers in force and with each alone."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.rewards.test_code import DOUBLE, judge, prints
from verl.rewards import code as rule

KERNEL = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
WAYS_IN = [(), ("namespaces",), ("landlock",), ("seccomp",), ("audit",), rule.LAYERS]


@cache
def in_force() -> tuple[str, ...]:
    """The layers that this machine has."""
    seen: list[tuple[str, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rule, "_tell", seen.append)
        judge(DOUBLE)
    return seen[0]


def use(layers: tuple[str, ...], patch: pytest.MonkeyPatch) -> None:
    """Leave ``layers`` alone in force."""
    if layers != rule.LAYERS and set(layers) - {"audit", *in_force()}:
        pytest.skip(f"this machine has no {layers}")
    patch.setattr(rule, "LAYERS", layers)


def tried(statements: str) -> str:
    lines = "\n".join(f"    {line}" for line in statements.splitlines())
    return f"try:\n{lines}\n    print('done')\nexcept BaseException as error:\n    print(error)\n"


def test_memory_output_and_files_are_limited() -> None:
    start = time.perf_counter()
    assert judge("x = bytearray(1 << 30)\n" + DOUBLE, memory_mb=256) == 0.0
    assert judge("x = []\nwhile True: x.append(bytearray(1 << 20))", memory_mb=256) == 0.0
    assert judge("x = bytearray(1 << 27)\n" + DOUBLE, memory_mb=256) == judge(DOUBLE, memory_mb=64) == 1.0
    assert prints("while True: print('x' * 100000)") == "(died)"
    assert "too large" in prints(tried("open('f', 'wb').write(bytes(1 << 25))"))
    assert prints(tried("import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))")) != "done"
    assert time.perf_counter() - start < 20


ORDINARY = {
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(4) as pool: print(sum(pool.map(int, '123')))"
    ),
    "asyncio": (
        "import asyncio\nasync def f(): return await asyncio.get_running_loop().run_in_executor(None, int, '6')\n"
        "print(asyncio.run(f()))"
    ),
    "its folder": (
        "import os, tempfile\nos.mkdir('d'); open('d/f', 'w').write('6'); os.rename('d/f', 'g')\n"
        "tempfile.TemporaryFile(); tempfile.NamedTemporaryFile(); print(open('g').read())"
    ),
    "dataclass": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass A:\n  n: int = 6\nprint(A().n)"
    ),
    "libraries": (
        "import bisect, decimal, fractions, hashlib, heapq, itertools, random, statistics, uuid, zlib\n"
        "print(uuid.uuid4().version + 2)"
    ),
    "exit": "import sys\nprint(6)\nsys.exit()",
    "recursion": "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(5000) // 833)",
    "text": "print('\u00fc 6'.split()[1])",
}


@pytest.mark.parametrize("layers", WAYS_IN[1:], ids=str)
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_run_everywhere(name: str, layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if layers == ("audit",) and name == "asyncio":
        pytest.skip("the Python fence refuses its socket pair")
    use(layers, monkeypatch)
    assert prints(ORDINARY[name], timeout=60.0) == "6"


FILES = {
    "read /etc/passwd": "open('/etc/passwd').read()",
    "read the source": f"open({__file__!r}).read()",
    "list /": "import os; os.listdir('/')",
    "the parent's environment": f"open('/proc/{os.getpid()}/environ').read()",
    "the parent's memory": f"open('/proc/{os.getpid()}/mem', 'rb').read(1)",
    "write beside": "open('../beside', 'w')",
    "write in /tmp": "open('/tmp/verl-beside', 'w')",
    "write in /dev/shm": "open('/dev/shm/verl-beside', 'w')",
    "link out": "import os; os.symlink('/etc', 'etc'); open('etc/passwd').read()",
    "remove": "import os; os.remove({left!r})",
    "chdir": "import os; os.chdir('/'); open('etc/passwd')",
}
FORBIDDEN = FILES | {
    "fork": "import os; os.fork()",
    "clone": "import ctypes\nif ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0) < 0: raise OSError(1)",
    "clone3": "import ctypes\nif ctypes.CDLL(None).syscall(435, 0, 0) < 0: raise OSError(1)",
    "x32": "import ctypes\nif ctypes.CDLL(None).syscall(0x40000029, 2, 1, 0) < 0: raise OSError(1)",
    "spawn": "import subprocess; subprocess.run(['/bin/true'], check=True)",
    "system": "import os\nif os.system('true'): raise OSError(1)",
    "posix_spawn": "import os; os.posix_spawn('/bin/true', ['true'], {{}})",
    "processes": "import multiprocessing as m; m.Process(target=int).start()",
    "exec": "import os; os.execv('/bin/echo', ['echo', 'done'])",
    "kill the parent": "import os; os.kill(os.getppid(), 0)",
    "limit the parent": f"import resource; resource.prlimit({os.getpid()}, resource.RLIMIT_CPU, (1, 1))",
    "SIGIO to the parent": f"import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, {os.getpid()})",
    "leave the session": "import os; os.setsid()",
    "leave the group": "import os; os.setpgid(0, 0)",
    "hidden memory": "import os; os.memfd_create('x')",
    "a new namespace": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) < 0: raise OSError(1)",
    "outlive": "import ctypes\nif ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) < 0: raise OSError(1)",
}


@KERNEL
@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_a_program_cannot_do(name: str, tmp_path: Path) -> None:
    if "landlock" not in in_force() and name in FILES:
        pytest.skip("this machine has no Landlock")
    left = tmp_path / "left"
    left.write_text("here")
    statements = FORBIDDEN[name].format(left=str(left)) if "{" in FORBIDDEN[name] else FORBIDDEN[name]
    said = prints(tried(statements), timeout=30.0)
    assert said != "done" and said != "(died)", said
    assert left.exists() and not Path("/tmp/verl-beside").exists() and not Path("/dev/shm/verl-beside").exists()


@KERNEL
def test_bombs_go_off_inside() -> None:
    assert prints("import os\nwhile True:\n  try: os.fork()\n  except OSError: break\nprint('over')") == "over"
    threads = (
        "import _thread, os, time\nn = 0\nspare = bytearray(1 << 24)\n_thread.stack_size(1 << 15)\n"
        "try:\n  while n < 20000: _thread.start_new_thread(time.sleep, (99,)); n += 1\n"
        "except (RuntimeError, MemoryError): del spare\nos.write(1, str(n).encode()); os._exit(0)"
    )
    assert int(prints(threads, memory_mb=256)) < 8000


@pytest.mark.parametrize("layers", [rule.LAYERS, ("audit",)], ids=str)
def test_no_secret_is_inherited(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2")
    use(layers, monkeypatch)
    assert prints("import os; print(sorted(os.environ))") in ("['HOME', 'TMPDIR']", "['HOME', 'LC_CTYPE', 'TMPDIR']")
    open_files = "import os\nfor fd in range(3, 64):\n  try: os.fstat(fd); print(fd)\n  except OSError: pass"
    assert len(prints(open_files).split()) == 1  # the channel


WAYS_OUT = {
    "socket": "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
    "http": "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/', timeout=1)",
    "_socket": "import _socket; _socket.socket().connect(('127.0.0.1', {port}))",
    "C": (
        "import ctypes, struct\nc = ctypes.CDLL(None)\ns = c.socket(2, 1, 0)\n"
        "a = struct.pack('=H', 2) + struct.pack('!H', {port}) + bytes([127, 0, 0, 1]) + bytes(8)\n"
        "if s < 0 or c.connect(s, a, 16) < 0: raise OSError('refused')"
    ),
    "a program": "import subprocess; subprocess.run([__import__('sys').executable, '-c', 'import socket; "
    'socket.create_connection(("127.0.0.1", {port}), 1)\'], check=True)',
}


@pytest.fixture
def server() -> Iterator[tuple[int, list[Any]]]:
    """A listening port of this machine and the connections that reached it."""
    seen: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            try:
                while True:
                    connection, _ = listening.accept()
                    seen.append(connection)
                    connection.close()
            except OSError:
                return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listening.getsockname()[1], seen
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@KERNEL
@pytest.mark.parametrize("layers", WAYS_IN, ids=str)
@pytest.mark.parametrize("way", WAYS_OUT)
def test_no_connection_gets_out(
    way: str, layers: Any, server: tuple[int, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, seen = server
    use(layers, monkeypatch)
    said = prints(tried(WAYS_OUT[way].format(port=port)))
    time.sleep(0.05)
    assert bool(seen) == (layers == ()), said  # without any layer it arrives: what the others are worth
    if layers and way != "http":
        assert said != "done"


@KERNEL
@pytest.mark.parametrize("layers", [("namespaces",), ("seccomp",), ("audit",)], ids=str)
def test_no_datagram_gets_out(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use(layers, monkeypatch)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(0.1)
        port = receiver.getsockname()[1]
        prints(tried(f"import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', {port}))"))
        with pytest.raises(TimeoutError):
            receiver.recv(1)


@KERNEL
def test_local_sockets_are_out_of_reach_too(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        receiver.settimeout(0.1)
        pair = "import socket; a, b = socket.socketpair(type=2); "
        for send in (f"a.sendto(b'x', {path!r})", f"a.connect({path!r})", f"a.sendmsg([b'x'], [], 0, {path!r})"):
            assert prints(tried(pair + send)) != "done"
        assert prints(tried(pair + "a.send(b'x'); assert b.recv(1) == b'x'")) == "done"
        with pytest.raises(TimeoutError):
            receiver.recv(1)
