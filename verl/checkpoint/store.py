"""Checkpoints on disk: whole or not there, never read as code.

``root/step_N/`` holds one file per part (tensors as safetensors, the rest as JSON), copied files such as ``hf/``, and
``manifest.json`` with the size and CRC-32 of each. A save is written aside in a dot folder, synced, renamed, and only
then named by ``root/latest``; only after that are old checkpoints removed. At each moment one complete checkpoint is
there, at the price of disk space for one more than ``keep``.

One process calls ``begin``, each that holds parts calls ``parts.write_parts``, and the first calls ``commit`` with the
entries of all; ``save`` does these three where there is one process.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from verl.checkpoint.parts import (
    PICKLED,
    Entry,
    OpenFile,
    Part,
    Source,
    aside,
    crc32,
    failure,
    refuse_pickle,
    replace_file,
    sync_folder,
    write_file,
    write_parts,
)
from verl.checkpoint.tensorfile import Joined, Scattered, read_tensors
from verl.config.errors import RequestError, RunError

MANIFEST = "manifest.json"


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
            refuse_pickle(file)
            if not file.is_file():
                raise RunError(f"{file} is missing from the checkpoint")
            if file.stat().st_size != size:
                raise RunError(f"{file} is damaged: {file.stat().st_size} bytes, {size} were written")
            if checksums and crc32(file) != crc:
                raise RunError(f"{file} is damaged: its content differs from what was written")
        return checkpoint

    def __contains__(self, part: str) -> bool:
        return f"{part}.safetensors" in self.files or f"{part}.json" in self.files or bool(self._ranks(part))

    def _ranks(self, part: str) -> list[Path]:
        """Files of a part that several ranks wrote."""
        return sorted(self.path / name for name in self.files if re.fullmatch(rf"{part}_\d+\.safetensors", name))

    def tensors(self, part: str) -> Mapping[str, Tensor]:
        """A tensor part, on the CPU; names that shared memory when saved share it again.

        Costs no memory of this process's own: the file is mapped (`read_tensors`). Of pieces that several ranks wrote,
        a tensor is put together when it is asked for. Removed checkpoints give their disk space back once no such
        tensor is left.
        """
        if files := self._ranks(part):
            return Joined(files)
        if f"{part}.safetensors" not in self.files and f"{part}.json" in self.files and self.json(part) == {}:
            return {}  # no tensors at all: an optimizer without state
        return read_tensors(self._file(f"{part}.safetensors"))

    def parts(self, part: str) -> Mapping[str, Tensor | Scattered]:
        """The same, but what pieces of a tensor hold is put together, and read, when an index asks for it."""
        tensors = self.tensors(part)
        return tensors.parts if isinstance(tensors, Joined) else tensors

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

    def __init__(self, root: Path, keep: int = 2, *, open_file: OpenFile | None = None) -> None:
        if keep < 1:
            raise RequestError(f"checkpoint.keep is {keep}; at least the last checkpoint must stay")
        self.root, self._keep = root, keep
        self._open_file = open_file
        self._put_back()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending (every file is there in its full size)."""
        return sorted(step for step, fault in self._folders().items() if not fault)

    @property
    def empty(self) -> bool:
        """Whether no save was ever published here, not even one that is damaged now."""
        return not any(re.fullmatch(r"step_\d+", path.name) for path in self.root.glob("step_*"))

    def latest(self) -> int | None:
        """The step saved last, or ``None``; without a usable ``latest`` file, the highest complete step."""
        steps, named = self.steps(), self._named()
        return named if named in steps else steps[-1] if steps else None

    def skipped(self) -> list[str]:
        """What is wrong with each checkpoint that ``latest()`` passes over because it is damaged, the newest first."""
        named, latest = self._named(), self.latest()
        if named is not None and named == latest:
            return []
        faults = {step: fault for step, fault in self._folders().items() if fault}
        if named is not None and named not in faults and self.folder(named).is_dir():
            faults[named] = f"{self.folder(named) / MANIFEST} is missing"
        passed = [step for step in faults if step == named or latest is None or step > latest]
        return [faults[step] for step in sorted(passed, reverse=True)]

    def folder(self, step: int) -> Path:
        return self.root / f"step_{step}"

    def load(self, step: int | None = None) -> Checkpoint:
        """The checkpoint of ``step`` (default: the latest), every checksum verified.

        Raises `RequestError` if there is none, `RunError` naming the damaged file if there is one. Newer ones that were
        passed over are told by ``skipped``.
        """
        chosen = self.latest() if step is None else step
        if chosen is None or not self.folder(chosen).is_dir():
            what = "checkpoint" if step is None else f"step_{step}"
            told = [f"complete steps: {self.steps() or 'none'}", *(self.skipped() if step is None else [])]
            raise RequestError(f"{self.root} holds no {what}; {'; '.join(told)}")
        return Checkpoint.open(self.folder(chosen))

    def save(self, step: int, parts: Mapping[str, Part], files: Mapping[str, Source] | None = None) -> Path:
        """Write ``step_N`` and give its folder back; a failed save leaves every earlier checkpoint as it was.

        Parts, files (``{"hf": export.model_files(model, tokenizer)}``) and errors are those of `write_parts`.
        """
        folder = self.begin(step)
        try:
            entries = write_parts(folder, parts, files, open_file=self._open_file)
        except BaseException as error:
            self.abandon(step)
            if isinstance(error, RunError):
                raise RunError(f"{error}. {self.standing()}") from error
            raise
        return self.commit(step, entries)

    def begin(self, step: int) -> Path:
        """An empty folder to write ``step_N`` in, aside; leftovers of saves that were stopped are removed."""
        folder = aside(self.folder(step))
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for leftover in self.root.glob(".step_*"):
                shutil.rmtree(leftover)
            folder.mkdir()
        except OSError as error:
            raise RunError(f"{failure(folder, error)}. {self.standing()}") from error
        return folder

    def commit(self, step: int, entries: Mapping[str, Entry]) -> Path:
        """Publish what was written since ``begin`` as ``step_N``, give its folder back, remove old checkpoints.

        ``entries`` are those of every writer. Raises `RunError`, and abandons the step, if they and the folder's files
        differ in names or sizes or the disk doesn't take it.
        """
        final, folder = self.folder(step), aside(self.folder(step))
        manifest = json.dumps({"format": 1, "step": step, "files": dict(entries)}, indent=1).encode()
        needed = len(manifest) + sum(entry["bytes"] for entry in entries.values())
        try:
            self._check(step, entries)
            write_file(folder / MANIFEST, [memoryview(manifest)], self._open_file)
            for inner in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
                sync_folder(inner)
            if final.exists():  # the same step again, after a resume from an earlier one
                final.rename(self.root / f".step_{step}.replaced")
            folder.rename(final)
            sync_folder(self.root)
            self._name_latest(step)
        except BaseException as error:
            self.abandon(step)  # before the message says how much is free
            if isinstance(error, OSError):
                raise RunError(f"{failure(folder, error, needed)}. {self.standing()}") from error
            raise
        try:
            self._retain(step)
        except OSError as error:
            raise RunError(f"{final} is complete, but an older checkpoint can't be removed: {error}") from error
        return final

    def abandon(self, step: int) -> None:
        """Remove what was written of ``step_N`` since ``begin``, after a failure elsewhere; no writer may still be at
        work. What can't be removed is never selected, and the next ``begin`` tries again."""
        shutil.rmtree(aside(self.folder(step)), ignore_errors=True)
        self._put_back()

    def standing(self) -> str:
        """A sentence for messages of failed saves: which checkpoint there still is."""
        last = self.latest()
        return f"The last complete one is {self.folder(last)}" if last is not None else "There is no complete one"

    def _check(self, step: int, entries: Mapping[str, Entry]) -> None:
        """``RunError`` unless ``step_N``, still aside, has the files of ``entries`` in their sizes and no others."""
        folder = aside(self.folder(step))
        found = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
        missing = entries.keys() - found.keys()
        faults = [f"{name} isn't there (do all workers share this file system?)" for name in missing]
        faults += [f"{name} was written by nobody who said so" for name in found.keys() - entries.keys()]
        faults += [
            f"{name} has {found[name]} bytes, {entries[name]['bytes']} were written"
            for name in entries.keys() & found.keys()
            if found[name] != entries[name]["bytes"]
        ]
        if faults:
            shown = "; ".join(sorted(faults)[:8])
            raise RunError(f"can't write checkpoint {self.folder(step)}: {shown}. {self.standing()}")

    def _put_back(self) -> None:
        """Undo the first rename of a save that replaces its own step, if it stopped before the second."""
        for old in self.root.glob(".step_*.replaced"):
            final = self.root / old.name[1:].removesuffix(".replaced")
            if not final.exists():
                old.rename(final)

    def _name_latest(self, step: int) -> None:
        replace_file(self.root / "latest", f"step_{step}\n".encode(), self._open_file)

    def _retain(self, saved: int) -> None:
        """Keep the newest ``keep`` complete checkpoints, whichever run wrote them.

        Damaged ones go first, then steps above ``saved``: they belong to a future that a resume gave up.
        """
        folders = self._folders()
        order = sorted(folders, key=lambda step: (not folders[step], step <= saved, step), reverse=True)
        for step in order[self._keep :]:
            doomed = self.root / f".step_{step}.deleted"
            self.folder(step).rename(doomed)  # never half of a checkpoint under its name
            shutil.rmtree(doomed)
        for replaced in self.root.glob(".step_*.replaced"):
            shutil.rmtree(replaced)

    def _named(self) -> int | None:
        """The step that ``root/latest`` names."""
        named = re.fullmatch(r"step_(\d+)\s*", _read_or_empty(self.root / "latest"))
        return int(named[1]) if named else None

    def _folders(self) -> dict[int, str]:
        """Step: what is damaged, empty where all is there, of every folder that has a manifest."""
        found = {}
        for path in self.root.glob("step_*"):
            if re.fullmatch(r"step_\d+", path.name) and (path / MANIFEST).is_file():
                try:
                    Checkpoint.open(path, checksums=False)
                    found[int(path.name[5:])] = ""
                except RunError as error:
                    found[int(path.name[5:])] = str(error)
        return found


def _read_or_empty(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
