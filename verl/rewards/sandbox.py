"""The inside of the rule ``code``: a bare interpreter that gives up what it can, then runs one untrusted program.

Started as a script by ``verl.rewards.code`` with the number of an open socket; needs only the standard library.
Messages are lines of JSON. In: the job, and once the program's own code ran, its tests with a token. Out: the
layers in force, ``ready``, and the token with the number of each test that passed.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import errno
import importlib
import json
import os
import platform
import resource
import signal
import struct
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

OUTPUT = 16 << 20  # bytes that one file may grow to, standard output included

_CLONE_NEWNET, _CLONE_NEWUSER, _CLONE_NEWIPC, _CLONE_THREAD = 0x40000000, 0x10000000, 0x08000000, 0x10000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38

# system call -> its number on x86_64 and on aarch64 (None: there is none), refused with EPERM
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # network; a pair of connected sockets stays, event loops are built on it
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "sendmsg": (46, 211), "bind": (49, 200),
    "listen": (50, 201), "accept4": (288, 242), "sendmmsg": (307, 269), "io_uring_setup": (425, 425),
    # processes: none is started, none is touched, and this one stays where its parent can kill it
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "kill": (62, 129),
    "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "setpgid": (109, 154), "setsid": (112, 157),
    "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "ioprio_set": (251, 30),
    # memory beside the address space's limit
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "mq_open": (240, 180),
    # kernel surface that no program needs
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
_READ = 0b1101  # Landlock's bits: execute, read files, list directories
_FILE = 0b1100_0000_0000_0111  # all rights that a file can have
_SPECIAL = 0b1010_0100_0000  # make devices and sockets

_AUDITED = ("socket.", "ctypes.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.kill", "pty.")
_WRITES = {
    "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate",
    "os.utime",
}  # fmt: skip


def limit(seconds: float, memory_mb: int) -> None:
    """Hard resource limits; one that the platform lacks is skipped."""
    cpu = int(seconds) + 1
    wanted = [("CPU", cpu), ("AS", memory_mb << 20), ("FSIZE", OUTPUT), ("CORE", 0), ("NOFILE", 64), ("MSGQUEUE", 0)]
    for name, value in wanted:
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def confine(folder: str, wanted: Sequence[str]) -> list[str]:
    """Put those of the ``wanted`` layers in force that this platform has, for ever; gives their names."""
    done = []
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if "namespaces" in wanted and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC) == 0:
            # the new count of processes starts at 0, so the limit doesn't depend on what else the user runs
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NPROC, (64, 64))
            done.append("namespaces")
        nothing = struct.pack("6I", *[0] * 6)
        libc.capset(struct.pack("Ii", 0x20080522, 0), nothing)  # version 3, this thread
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of rights would reset it
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
            layers: dict[str, Callable[[], bool]] = {
                "landlock": lambda: _landlock(libc, folder),
                "seccomp": lambda: _seccomp(libc),
            }
            done += [name for name, enforce in layers.items() if name in wanted and enforce()]
    if "audit" in wanted and "seccomp" not in done:
        import _posixsubprocess

        _posixsubprocess.fork_exec = _refuse  # type: ignore[assignment]  # it tells no hook
        sys.addaudithook(_auditor(folder))
        done.append("audit")
    return done


def _landlock(libc: Any, folder: str) -> bool:
    """Files: Python and the system's libraries can be read, ``folder`` written, nothing else opened."""
    create, add_rule, restrict = 444, 445, 446  # the same on every architecture
    version = libc.syscall(create, None, 0, 1)
    if version < 1:
        return False
    bits = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)  # rights that this version knows
    everything = (1 << bits) - 1
    # TCP bind and connect since version 4; abstract Unix sockets and signals to others since 6
    attributes = struct.pack("QQQ", everything, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    ruleset = libc.syscall(create, attributes, 24 if version >= 6 else 16 if version >= 4 else 8, 0)
    if ruleset < 0:
        return False
    rules = dict.fromkeys((*_LIBRARIES, f"{sys.base_prefix}/lib", *sys.path, "/dev/urandom", "/dev/random"), _READ)
    rules |= {"/dev/null": _FILE, "/dev/zero": _FILE, folder: everything & ~_SPECIAL}
    for path, rights in rules.items():
        with contextlib.suppress(OSError):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights &= everything if os.path.isdir(path) else everything & _FILE
            libc.syscall(add_rule, ruleset, 1, struct.pack("=Qi", rights, place), 0)
            os.close(place)
    applied = libc.syscall(restrict, ruleset, 0) == 0
    os.close(ruleset)
    return applied


def _seccomp(libc: Any) -> bool:
    """System calls: those of ``_REFUSED`` fail, here and in every thread, by whatever code they are made."""
    if platform.machine() not in _ARCHITECTURES or struct.calcsize("P") != 8:
        return False
    column, architecture = _ARCHITECTURES[platform.machine()]
    load, equal, some, at_least, give = 0x20, 0x15, 0x45, 0x35, 0x06
    allow, kill = (give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x80000000)
    refuse, unknown = (give, 0, 0, 0x50000 | errno.EPERM), (give, 0, 0, 0x50000 | errno.ENOSYS)

    def argument(i: int, high: bool = False) -> tuple[int, int, int, int]:
        return (load, 0, 0, 16 + 8 * i + 4 * high)

    # instructions (code, skip if true, skip if false, value); 0x40000000: the x32 numbers of x86_64
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), kill, (load, 0, 0, 0), (at_least, 0, 1, 1 << 30), refuse]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            program += [(equal, 0, 1, number), refuse]
    conditional = {
        (56, 220): [argument(0), (some, 1, 0, _CLONE_THREAD), refuse, allow],  # clone: threads only
        (435, 435): [unknown],  # clone3 hides its flags in memory: glibc falls back to clone
        (157, 167): [argument(0), (equal, 0, 1, _PR_SET_PDEATHSIG), refuse, allow],  # prctl
        (302, 261): [argument(0), (equal, 1, 0, 0), refuse, allow],  # prlimit64: of this process only
        # fcntl and ioctl: no SIGIO to another process
        (72, 25): [argument(1), (equal, 1, 0, 8), (equal, 0, 1, 15), refuse, allow],
        (16, 29): [argument(1), (equal, 1, 0, 0x8901), (equal, 0, 1, 0x8902), refuse, allow],
        (53, 199): [argument(0), (equal, 1, 0, 1), refuse, allow],  # socketpair: Unix sockets only
        (44, 206): [argument(4), (equal, 0, 2, 0), argument(4, True), (equal, 1, 0, 0), refuse, allow],  # sendto: peer
    }
    for pair, body in conditional.items():
        program += [(equal, 0, len(body), pair[column]), *body]
    program.append(allow)
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    held = ctypes.create_string_buffer(code, len(code))
    return libc.prctl(_PR_SET_SECCOMP, 2, struct.pack("HP", len(program), ctypes.addressof(held)), 0, 0) == 0


def _auditor(folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    """For platforms without the layers above: refuses in Python what Python itself is asked to do."""
    inside, join, real, writing = folder + os.sep, os.path.join, os.path.realpath, os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def outside(path: Any) -> bool:
        return not isinstance(path, int) and not (real(join(folder, os.fsdecode(path))) + os.sep).startswith(inside)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(_AUDITED):
            raise PermissionError(event)
        if event == "open" and args[2] & writing and args[0] != os.devnull and outside(args[0]):
            raise PermissionError(event)
        if event in _WRITES and any(outside(path) for path in args[:2] if isinstance(path, (str, bytes, os.PathLike))):
            raise PermissionError(event)

    return audit


def _refuse(*_: Any) -> None:
    raise PermissionError("no processes")


class _Guard(ast.NodeTransformer):
    """Compared values pass through ``_honest`` first."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        node.left, *node.comparators = map(_checked, (node.left, *node.comparators))
        return node


def _checked(side: ast.expr) -> ast.expr:
    if isinstance(side, ast.Constant):
        return side
    return ast.Call(ast.Name("__honest__", ast.Load()), [side], [])


def _honest(value: Any) -> Any:
    """The value, unless it claims to equal what nothing equals."""
    try:
        boundless = bool(value == object())
    except Exception:
        return value
    if boundless:
        raise AssertionError("a value that equals everything")
    return value


def _guarded(source: str) -> types.CodeType:
    return compile(ast.fix_missing_locations(_Guard().visit(ast.parse(source))), "tests", "exec")


def judge(program: str, imports: Sequence[str], send: Callable[[str], None], read: Callable[[], dict]) -> None:
    """Run the program, then its tests; tell each that passes.

    The tests don't see what the program made of ``builtins`` and of the modules that they import: those are put
    back, and a global that shadows a builtin is left out unless it is the function under test.
    """
    for name in imports:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    loaded = [module for module in sys.modules.values() if isinstance(module, types.ModuleType)]
    modules = [(vars(module), dict(vars(module))) for module in loaded]
    module = types.ModuleType("program")
    sys.modules["program"] = sys.modules["__main__"] = module
    exec(compile(program, "program", "exec"), vars(module))
    for now, before in modules:
        now.update(before)
    send("ready")
    job = read()
    shadowed = set(vars(builtins)) - {job["entry_point"]}
    names = {name: value for name, value in vars(module).items() if name not in shadowed}
    names |= {"__builtins__": dict(vars(builtins)), "__name__": "program", "__honest__": _honest}
    exec(_guarded(job["setup"]), names)
    for i, test in enumerate(job["tests"]):
        try:
            exec(_guarded(test), names)
        except BaseException:
            if job["partial"]:
                continue
            return
        send(f"{job['token']} {i}")


def main() -> None:
    handle = int(sys.argv[1])
    os.set_inheritable(handle, False)
    incoming = open(handle, "rb", closefd=False)  # noqa: SIM115 - open as long as the process is

    def read() -> dict:
        return json.loads(incoming.readline())

    def send(message: str, write: Callable[[int, bytes], int] = os.write) -> None:
        write(handle, f"{message}\n".encode())

    job = read()
    folder = os.getcwd()
    limit(job["timeout"], job["memory_mb"])
    send(json.dumps(confine(folder, job["layers"])))
    if job["tests"] == "asserts":
        judge(job["program"], job["imports"], send, read)
        os._exit(0)  # no thread or exit handler of the program is waited for
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv[:] = ["program.py"]
    exec(compile(job["program"], "program.py", "exec"), vars(module))


if __name__ == "__main__":
    main()
