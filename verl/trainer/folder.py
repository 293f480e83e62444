"""A run's folder: whether it can be written to, whose it is now, and what an overwrite takes away."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import socket
import tempfile
from pathlib import Path
from typing import BinaryIO

from verl.checkpoint.parts import replace_file
from verl.config.errors import RequestError, writing

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
WRITTEN = (
    *("config.yaml", "metrics.jsonl", "samples.jsonl", "eval.jsonl", "bad_rows.jsonl"),
    *("tensorboard", "checkpoints", "logs"),
)
"""All that a run writes into its folder, beside `LOCK`."""


def writable(folder: Path) -> Path:
    """The run folder, or the nearest one above it that is there; ``RequestError`` where it can't be written to. Leaves
    nothing behind."""
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    try:
        Path(tempfile.mkdtemp(prefix=".verl-", dir=place)).rmdir()
    except OSError as error:
        raise RequestError(f"run_dir: can't write to {folder}: {error.strerror}, {place}") from error
    return place


def holds_run(folder: Path) -> bool:
    """Whether a run has written into ``folder``: a configuration alone may be its user's."""
    return (folder / "config.yaml").exists() and any((folder / name).exists() for name in WRITTEN[1:])


def clear(folder: Path) -> None:
    """Remove what a run wrote, and nothing else; what lies in ``logs`` is the next run's already."""
    for name in WRITTEN:
        old = folder / name
        if name != "logs" and old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        elif name != "logs":
            old.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """`replace_file`, where it would change something."""
    if path.exists() and path.read_text() == text:
        return
    replace_file(path, text.encode())


def quoted(path: Path) -> str:
    """For a command that is told to a person."""
    return shlex.quote(str(path))


class Claim:
    """While it lasts, no other process uses the run folder. The system ends it with the process, however that ends.

    ``RequestError`` where another one has it. Folders that are made for it go again with ``drop`` where nothing was
    written into them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made = [p for p in (folder, *folder.absolute().parents) if not p.exists()]
        self._file: BinaryIO | None = None
        with writing(folder, key="run_dir"):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._file = (folder / LOCK).open("a+b")
            except OSError:
                self.drop()
                raise
        try:
            if fcntl is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                self._file.seek(0)
                who = self._file.read(200).decode(errors="replace").strip() or "another process"
                self._file.close()
                first = "stop that one first"
                if who == _process():
                    who, first = "an earlier trainer of this process", "close() that one first"
                raise RequestError(f"run_dir: {folder} is in use by {who}: {first}, or name another run_dir") from None
            # a file system without locks: as if there were nobody else
        with contextlib.suppress(OSError):
            self._file.truncate(0)
            self._file.write(_process().encode())
            self._file.flush()

    def drop(self) -> None:
        """The folder is free; a second call does nothing."""
        if self._file is not None and not self._file.closed:
            if self.folder.is_dir() and not any(path.name != LOCK for path in self.folder.iterdir()):
                (self.folder / LOCK).unlink(missing_ok=True)
            self._file.close()
        for made in self._made:
            with contextlib.suppress(OSError):  # not empty: it is used
                made.rmdir()


def _process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
