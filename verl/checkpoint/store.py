"""Checkpoints on disk: whole or not there, never read as code.

``root/step_N/`` holds one file per part (tensors as safetensors, the rest as JSON), copied files such as ``hf/``, and
``manifest.json`` with the size and CRC-32 of each. A save is written aside in a dot folder, synced, renamed, and only
then named by ``root/latest``; only after that are old checkpoints removed. At each moment one complete checkpoint is
there, at the price of disk space for one more than ``keep``.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from verl.checkpoint.tensorfile import TensorFile, read_tensors
from verl.config.errors import RequestError, RunError

Part = Mapping[str, Any] | list | str | int | float | bool | None
PICKLED = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"}
MANIFEST = "manifest.json"
_CHUNK = 16 * 2**20


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint folder whose files were checked against the manifest."""

    path: Path
    step: int
    files: Mapping[str, Mapping[str, int]]  # relative path: {"bytes": ..., "crc32": ...}

    @staticmethod
    def open(path: Path, *, checksums: bool = True) -> Checkpoint:
        """Read the manifest and check every file's size and, with ``checksums``, content.

        Raises `RequestError` if ``path`` is no checkpoint, and `RunError` naming the first damaged file.
        """
        manifest = path / MANIFEST
        if not manifest.is_file():
            pickled = sorted(p.name for p in path.glob("*") if p.suffix in PICKLED)
            why = (
                f"; {', '.join(pickled)}: pickled files can run code when loaded and are never read" if pickled else ""
            )
            raise RequestError(f"{path} is no complete checkpoint: it has no {MANIFEST}{why}")
        try:
            content = json.loads(manifest.read_text())
            checkpoint = Checkpoint(path, int(content["step"]), content["files"])
            expected = {name: (int(e["bytes"]), int(e["crc32"])) for name, e in checkpoint.files.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunError(f"{manifest} is damaged: {error!r}") from error
        for name, (size, crc) in expected.items():
            file = path / name
            _refuse_pickle(file)
            if not file.is_file():
                raise RunError(f"{file} is missing from the checkpoint")
            if file.stat().st_size != size:
                raise RunError(f"{file} is damaged: {file.stat().st_size} bytes, {size} were written")
            if checksums and _crc32(file) != crc:
                raise RunError(f"{file} is damaged: its content differs from what was written")
        return checkpoint

    def __contains__(self, part: str) -> bool:
        return f"{part}.safetensors" in self.files or f"{part}.json" in self.files

    def tensors(self, part: str) -> dict[str, Tensor]:
        """A tensor part, on the CPU; names that shared memory when saved share it again."""
        if f"{part}.safetensors" not in self.files and f"{part}.json" in self.files and self.json(part) == {}:
            return {}  # no tensors at all: an optimizer without state
        return read_tensors(self._file(f"{part}.safetensors"))

    def json(self, part: str) -> Any:
        """A JSON part."""
        path = self._file(f"{part}.json")
        try:
            return json.loads(path.read_bytes())
        except ValueError as error:
            raise RunError(f"{path} is damaged: {error}") from error

    def _file(self, name: str) -> Path:
        if name not in self.files:
            raise RunError(f"{self.path} holds no {name}; it has {sorted(self.files)}")
        return self.path / name


class CheckpointStore:
    """The checkpoints of one run; the newest ``keep`` stay. One writer at a time.

    ``open_file`` opens a file for writing; tests put a full disk there.
    """

    def __init__(self, root: Path, keep: int = 2, *, open_file: Callable[[Path], BinaryIO] | None = None) -> None:
        if keep < 1:
            raise RequestError(f"checkpoint.keep is {keep}; at least the last checkpoint must stay")
        self.root, self._keep = root, keep
        self._open_file = open_file or (lambda path: path.open("wb"))
        self._put_back()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending (every file is there in its full size)."""
        return sorted(step for step, complete in self._folders().items() if complete)

    def latest(self) -> int | None:
        """The step saved last, or ``None``; without a usable ``latest`` file, the highest complete step."""
        steps = self.steps()
        named = re.fullmatch(r"step_(\d+)\s*", _read_or_empty(self.root / "latest"))
        if named and int(named[1]) in steps:
            return int(named[1])
        return steps[-1] if steps else None

    def folder(self, step: int) -> Path:
        return self.root / f"step_{step}"

    def load(self, step: int | None = None) -> Checkpoint:
        """The checkpoint of ``step`` (default: the latest), every checksum verified.

        Raises `RequestError` if there is none, `RunError` naming the damaged file if there is one.
        """
        chosen = self.latest() if step is None else step
        if chosen is None or not self.folder(chosen).is_dir():
            what = "checkpoint" if step is None else f"step_{step}"
            raise RequestError(f"{self.root} holds no {what}; complete steps: {self.steps() or 'none'}")
        return Checkpoint.open(self.folder(chosen))

    def save(
        self,
        step: int,
        parts: Mapping[str, Part],
        files: Mapping[str, Path | Callable[[Path], None]] | None = None,
    ) -> Path:
        """Write ``step_N`` and give its folder back; a failed save leaves every earlier checkpoint as it was.

        A part whose values are all tensors becomes ``<part>.safetensors``, any other ``<part>.json``. ``files`` maps a
        relative path to a file or folder to copy, or to a function that is given an empty folder to fill
        (``{"hf": export.model_files(model, tokenizer)}``).
        Raises `RunError` naming the path, the bytes needed and the bytes free when the disk doesn't take it;
        ``TypeError`` for a part that mixes tensors with other things.
        """
        final, partial = self.folder(step), self.root / f".step_{step}.partial"
        encoded = {name: data for part, value in parts.items() for name, data in [_encode(part, value)]}
        needed = sum(data.size if isinstance(data, TensorFile) else len(data) for data in encoded.values())
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for leftover in self.root.glob(".step_*"):
                shutil.rmtree(leftover)
            partial.mkdir()
            for name, source in (files or {}).items():
                _place(source, partial / name)
            free = shutil.disk_usage(self.root).free
            if needed > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            entries = {
                path.relative_to(partial).as_posix(): self._synced(path)
                for path in sorted(partial.rglob("*"))
                if path.is_file()
            }
            for name, data in encoded.items():
                chunks = data.chunks() if isinstance(data, TensorFile) else [memoryview(data)]
                entries[name] = self._write(partial / name, chunks)
            manifest = json.dumps({"format": 1, "step": step, "files": entries}, indent=1).encode()
            self._write(partial / MANIFEST, [memoryview(manifest)])
            for folder in (*(p for p in partial.rglob("*") if p.is_dir()), partial):
                _sync_folder(folder)
            if final.exists():  # the same step again, after a resume from an earlier one
                final.rename(self.root / f".step_{step}.replaced")
            partial.rename(final)
            _sync_folder(self.root)
            self._name_latest(step)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)  # before the message says how much is free
            raise RunError(self._failure(final, needed, error)) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # there only after a failure; what stays can't be selected
            self._put_back()
        try:
            self._retain(step)
        except OSError as error:
            raise RunError(f"{final} is complete, but an older checkpoint can't be removed: {error}") from error
        return final

    def _put_back(self) -> None:
        """Undo the first rename of a save that replaces its own step, if it stopped before the second."""
        for old in self.root.glob(".step_*.replaced"):
            final = self.root / old.name[1:].removesuffix(".replaced")
            if not final.exists():
                old.rename(final)

    def _write(self, path: Path, chunks: Iterable[memoryview]) -> dict[str, int]:
        size = crc = 0
        with self._open_file(path) as file:
            for data in chunks:
                with data:  # released before the next tensor's bytes are made
                    for start in range(0, len(data), _CHUNK):
                        with data[start : start + _CHUNK] as piece:
                            file.write(piece)
                            size, crc = size + len(piece), zlib.crc32(piece, crc)
            file.flush()
            os.fsync(file.fileno())
        return {"bytes": size, "crc32": crc}

    def _synced(self, path: Path) -> dict[str, int]:
        """Force a copied file to the disk and describe it."""
        _refuse_pickle(path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return {"bytes": path.stat().st_size, "crc32": _crc32(path)}

    def _name_latest(self, step: int) -> None:
        aside = self.root / ".latest.partial"
        self._write(aside, [memoryview(f"step_{step}\n".encode())])
        aside.replace(self.root / "latest")
        _sync_folder(self.root)

    def _retain(self, saved: int) -> None:
        """Keep the newest ``keep`` complete checkpoints, whichever run wrote them.

        Damaged ones go first, then steps above ``saved``: they belong to a future that a resume gave up.
        """
        folders = self._folders()
        order = sorted(folders, key=lambda step: (folders[step], step <= saved, step), reverse=True)
        for step in order[self._keep :]:
            doomed = self.root / f".step_{step}.deleted"
            self.folder(step).rename(doomed)  # never half of a checkpoint under its name
            shutil.rmtree(doomed)
        for replaced in self.root.glob(".step_*.replaced"):
            shutil.rmtree(replaced)

    def _folders(self) -> dict[int, bool]:
        """Step: is it complete, of every folder that has a manifest."""
        found = {}
        for path in self.root.glob("step_*"):
            if re.fullmatch(r"step_\d+", path.name) and (path / MANIFEST).is_file():
                try:
                    Checkpoint.open(path, checksums=False)
                    found[int(path.name[5:])] = True
                except RunError:
                    found[int(path.name[5:])] = False
        return found

    def _failure(self, final: Path, needed: int, error: OSError) -> str:
        try:
            free = f"{shutil.disk_usage(self.root).free} bytes are free"
        except OSError:
            free = "the folder can't be reached"
        last = self.latest()
        return (
            f"can't write checkpoint {final}: {error.strerror or error}; {needed} bytes are needed, {free} there. "
            + (f"The last complete one is {self.folder(last)}" if last is not None else "There is no complete one")
        )


def _encode(part: str, value: Part) -> tuple[str, TensorFile | bytes]:
    """File name and content of a part."""
    if not re.fullmatch(r"\w+", part) or part == "manifest":
        raise ValueError(f"{part!r} can't name a part")
    if isinstance(value, Mapping) and value and all(isinstance(v, Tensor) for v in value.values()):
        return f"{part}.safetensors", TensorFile(value)
    try:
        return f"{part}.json", json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"part {part!r} is neither all tensors nor plain JSON: {error}") from error


def _place(source: Path | Callable[[Path], None], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(source, Path):
        target.mkdir()
        source(target)
    elif source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)


def _refuse_pickle(path: Path) -> None:
    if path.suffix in PICKLED:
        raise RunError(f"{path}: pickled files can run code when loaded; checkpoints neither hold nor read them")


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            crc = zlib.crc32(piece, crc)
    return crc


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_or_empty(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
