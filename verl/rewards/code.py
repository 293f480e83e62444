"""The rule ``code``: does the program in a response pass the row's tests? Run by ``verl.rewards.sandbox``."""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from verl.rewards.sandbox import OUTPUT

if TYPE_CHECKING:
    from verl.rewards.base import RewardRow

log = logging.getLogger(__name__)
COLUMNS = ("tests", "test", "test_list", "answer")  # where tests are looked for, in this order
LAYERS = ("namespaces", "landlock", "seccomp", "audit")  # what confines a program, where the platform has it
_CHATTER = 1 << 20  # bytes that a program may send where only its tests' results belong
_SCRIPT = str(Path(__file__).with_name("sandbox.py"))


@dataclass(frozen=True)
class Asserts:
    """Python tests, each passed when it raises nothing; ``setup`` runs before them."""

    tests: list[str]
    setup: str = ""
    entry_point: str | None = None

    def __len__(self) -> int:
        return len(self.tests)


@dataclass(frozen=True)
class Cases:
    """What the program gets on standard input, and what it must print."""

    inputs: list[str]
    outputs: list[str]

    def __len__(self) -> int:
        return len(self.inputs)


def code(
    row: RewardRow, *, column: str | None = None, partial: bool = False, timeout: float = 10.0, memory_mb: int = 1024
) -> dict[str, float]:
    """1 where the response's program passes every test of the row; ``partial``: the share of tests passed.

    ``column``: where the tests are, default the first of ``COLUMNS`` that the row has. ``timeout``: seconds for all
    tests of a row together. ``memory_mb``: address space in MiB. Beside the score, ``passed_share`` and ``timed_out``.
    Raises ``ValueError`` for tests that can't be read.
    """
    tests = read_tests(row.fields, column)
    program = program_of(row.response)
    if isinstance(tests, Asserts):
        passed, timed_out = _run_asserts(program, tests, partial, timeout, memory_mb)
    else:
        passed, timed_out = _run_cases(program, tests, partial, timeout, memory_mb)
    share = passed / len(tests)
    score = share if partial else float(passed == len(tests))
    return {"score": score, "passed_share": share, "timed_out": float(timed_out)}


def check(options: dict[str, Any]) -> None:
    """Raises ``ValueError`` for options that can't work."""
    if options["timeout"] <= 0 or options["memory_mb"] < 64:
        raise ValueError("timeout must be above 0, memory_mb at least 64")


def program_of(response: str) -> str:
    """The last fenced block marked as Python, else the last unmarked one, else the whole response."""
    blocks: dict[str, str] = {}
    language: str | None = None  # of the block that the line is in
    lines: list[str] = []
    for line in [*response.split("\n"), "```"]:
        mark = line.strip()
        if language is None and mark.startswith("```"):
            language, lines = mark[3:].strip().lower(), []
        elif language is not None and mark == "```":
            blocks["python" if language in ("py", "python3") else language] = "\n".join(lines)
            language = None
        else:
            lines.append(line)
    return blocks.get("python", blocks.get("", response))


def read_tests(fields: dict[str, Any], column: str | None = None) -> Asserts | Cases:
    """The row's tests in one of their usual forms. Raises ``ValueError`` saying what is wrong with them."""
    found = [name for name in ([column] if column else COLUMNS) if fields.get(name) is not None]
    if not found:
        raise ValueError(f"the row has no tests: looked for {column or ', '.join(COLUMNS)}; it has {', '.join(fields)}")
    value = fields[found[0]]
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(case, dict) for case in value):
        value = {"inputs": [case.get("input") for case in value], "outputs": [case.get("output") for case in value]}
    if isinstance(value, dict):
        return _read_cases(value, found[0])
    setup = "\n".join([*(fields.get("test_imports") or []), fields.get("test_setup_code") or ""])
    entry_point = fields.get("entry_point")
    if isinstance(value, (list, tuple)) and value and all(isinstance(test, str) for test in value):
        tests = Asserts(list(value), setup, entry_point)
    elif isinstance(value, str) and value.strip():
        tests = Asserts(_split(value, entry_point), setup, entry_point)
    else:
        raise ValueError(
            f"column {found[0]!r} holds no tests that rule 'code' knows: assert statements as text or list, or "
            f"{{inputs: [...], outputs: [...]}}; it is a {type(value).__name__}"
        )
    _parse(tests.setup)
    for source in tests.tests:
        if not any(map(_acts, _parse(source).body)):
            raise ValueError(f"the row's tests run nothing (HumanEval's form needs an entry_point): {source[:120]!r}")
    return tests


def _read_cases(value: dict[str, Any], column: str) -> Asserts | Cases:
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"column {column!r} needs as many outputs as inputs, at least one")
    if name := value.get("fn_name"):  # the tests call a function; JSON has no tuples
        called = f"(lambda r: list(r) if isinstance(r, tuple) else r)((Solution().{name} if __solution__ else {name})"
        setup = "__solution__ = 'Solution' in globals()"
        tests = [
            f"assert {called}(*{args!r})) in {_accepted(out)!r}" for args, out in zip(inputs, outputs, strict=True)
        ]
        return Asserts(tests, setup, name)
    return Cases(*([_text(entry) for entry in side] for side in (inputs, outputs)))


def _accepted(output: Any) -> tuple[Any, ...]:
    """Data sets of this form wrap some results in a list of one."""
    return (output, output[0]) if isinstance(output, list) and len(output) == 1 else (output,)


def _text(entry: Any) -> str:
    return "\n".join(map(str, entry)) if isinstance(entry, list) else str(entry)


def _split(source: str, entry_point: str | None) -> list[str]:
    """A test per assert statement, together with the statements before it; else one test."""
    statements = _parse(source).body
    tests: list[list[ast.stmt]] = [[]]
    for statement in statements:
        tests[-1].append(statement)
        if isinstance(statement, ast.Assert):
            tests.append([])
    last = tests.pop()
    if tests:
        tests[-1] += last
        return [ast.unparse(ast.Module(test, [])) for test in tests]
    defined = {s.name for s in statements if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef))}
    calls = (
        f"\ncheck({entry_point})" if entry_point and "check" in defined and not isinstance(last[-1], ast.Expr) else ""
    )
    return [source + calls]


def _parse(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the row's tests are no Python: {error}: {source[:120]!r}") from error


def _acts(statement: ast.stmt) -> bool:
    """Whether it can fail a program: definitions, constants and what only runs as a script can't."""
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.If):
        return "__name__" not in ast.unparse(statement.test)
    return not isinstance(
        statement,
        (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.Pass),
    )


def _imports(sources: Sequence[str]) -> list[str]:
    names = set()
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return sorted(names)


def _run_asserts(program: str, tests: Asserts, partial: bool, timeout: float, memory_mb: int) -> tuple[int, bool]:
    """How many tests passed, and whether time ran out. One process runs them all, in order."""
    deadline = time.monotonic() + timeout
    token = secrets.token_hex(16)
    job = {"tests": "asserts", "program": program, "imports": _imports([tests.setup, *tests.tests])}
    left = {f"{token} {i}" for i in range(len(tests))}
    with _Process(job, timeout, memory_mb, subprocess.DEVNULL, subprocess.DEVNULL) as process:
        try:
            for line in process.lines(deadline):
                if line == "ready":
                    process.send({"token": token, "partial": partial} | vars(tests), deadline)
                left.discard(line)
                if not left:
                    break
        except TimeoutError:
            return len(tests) - len(left), True
    return len(tests) - len(left), False


def _run_cases(program: str, tests: Cases, partial: bool, timeout: float, memory_mb: int) -> tuple[int, bool]:
    """As ``_run_asserts``, with a process per case; the output is judged here, out of the program's reach."""
    deadline = time.monotonic() + timeout
    passed = 0
    for given, expected in zip(tests.inputs, tests.outputs, strict=True):
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
            stdin.write(given.encode())
            stdin.seek(0)
            job = {"tests": "cases", "program": program}
            with _Process(job, deadline - time.monotonic(), memory_mb, stdin, stdout) as process:
                try:
                    for _ in process.lines(deadline):
                        pass
                except TimeoutError:
                    return passed, True
            stdout.seek(0)
            right = process.status == 0 and same_output(stdout.read(OUTPUT).decode(errors="replace"), expected)
        passed += right
        if not right and not partial:
            break
    return passed, False


def same_output(ours: str, theirs: str) -> bool:
    """Equal line by line, white space aside; numbers with a fraction within 1e-6 of their size."""
    first, second = ([line.split() for line in text.strip().splitlines()] for text in (ours, theirs))
    if [len(line) for line in first] != [len(line) for line in second]:
        return False
    return all(map(_same_word, chain(*first), chain(*second)))


def _same_word(a: str, b: str) -> bool:
    if a == b:
        return True
    if "." not in a + b:
        return False
    try:
        return math.isclose(float(a), float(b), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False


class _Process:
    """One sandboxed process in a folder of its own; both are gone when the block ends."""

    status: int | None = None  # exit status, known after the block

    def __init__(
        self, job: dict[str, Any], timeout: float, memory_mb: int, stdin: IO[bytes] | int, stdout: IO[bytes] | int
    ) -> None:
        self._folder = os.path.realpath(tempfile.mkdtemp(prefix="verl-code-"))
        self._socket, theirs = socket.socketpair()
        self._read = 0
        # a library path is no secret, and some interpreters don't start without it
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if name in os.environ}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-X", "utf8", _SCRIPT, str(theirs.fileno())],
                cwd=self._folder,
                env={"HOME": self._folder, "TMPDIR": self._folder, **kept},
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except BaseException:
            self._socket.close()
            _remove(self._folder)
            raise
        finally:
            theirs.close()
        self._job = {**job, "timeout": max(timeout, 0.0), "memory_mb": memory_mb, "layers": LAYERS}

    def __enter__(self) -> _Process:
        return self

    def send(self, message: dict[str, Any], deadline: float) -> None:
        self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
        with contextlib.suppress(ConnectionError):  # it ended, which reading shows
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def lines(self, deadline: float) -> Iterator[str]:
        """Give it the job; what it sends until it ends. Raises ``TimeoutError`` past the deadline."""
        self.send(self._job, deadline)
        buffer, told = b"", False
        while self._read < _CHATTER:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                received = self._socket.recv(1 << 16)
            except ConnectionError:  # it ended before it read what it was sent
                received = b""
            if not received and told:
                return
            if not received:
                raise RuntimeError(f"the sandbox did not start; memory_mb {self._job['memory_mb']} may be too little")
            self._read += len(received)
            *lines, buffer = (buffer + received).split(b"\n")
            for line in lines:
                if told:
                    yield line.decode(errors="replace")
                else:
                    _tell(tuple(json.loads(line)))  # sent before the program begins
                told = True

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it is not reaped: the number is still its own
            os.killpg(self._process.pid, signal.SIGKILL)
        self.status = self._process.wait()
        self._socket.close()
        _remove(self._folder)


def _remove(folder: str) -> None:
    def open_up(_: object, path: str, __: object) -> None:
        for place in (path, os.path.dirname(path)):
            if place.startswith(folder) and os.path.isdir(place) and not os.path.islink(place):
                os.chmod(place, 0o700)

    for _ in range(100):  # a program may have closed folders inside folders
        shutil.rmtree(folder, onerror=open_up)
        if not os.path.lexists(folder):
            return


@lru_cache
def _tell(layers: tuple[str, ...]) -> None:
    if "seccomp" not in layers and "namespaces" not in layers:
        log.warning(
            "reward rule 'code': this platform can't confine programs, only Python itself refuses sockets, processes "
            "and writing elsewhere; run it where nothing is at stake (docs/rewards.md)"
        )
    elif "landlock" not in layers:
        log.warning("reward rule 'code': no Landlock in this kernel: programs can read and write this user's files")
