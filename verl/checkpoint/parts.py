"""What a checkpoint's folder holds, written by one process or by several: parts and copied files, with their sizes and
CRC-32s for the manifest."""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from verl.checkpoint.tensorfile import RESERVED, Pieces, TensorFile, TensorStream
from verl.config.errors import RunError

Part = Mapping[str, Any] | Pieces | Iterator[tuple[str, Tensor]] | list | str | int | float | bool | None
Source = Path | Callable[[Path], None]
Entry = dict[str, int]  # {"bytes": ..., "crc32": ...}
OpenFile = Callable[[Path], BinaryIO]
PICKLED = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"}
_CHUNK = 16 * 2**20


def aside(final: Path) -> Path:
    """Where the checkpoint ``.../step_N`` is written until it is whole."""
    return final.with_name(f".{final.name}.partial")


def write_parts(
    folder: Path,
    parts: Mapping[str, Part],
    files: Mapping[str, Source] | None = None,
    *,
    open_file: OpenFile | None = None,
) -> dict[str, Entry]:
    """Write parts and files into ``folder`` (of ``CheckpointStore.begin``), synced; give what ``commit`` wants to know.

    Needs no store: several processes that reach the folder, on other machines too, may each write parts of their own.

    A part whose values are all tensors, or an iterator of names and tensors, becomes ``<part>.safetensors``, any other
    ``<part>.json``. `Pieces` are one rank's part of the tensors ``PART``, under the name ``PART_N``, N the rank's
    number. No more than one tensor is copied at a time, and none that lies contiguous on the CPU; an iterator is asked
    for one after the other, part after part in the order given. Iterators are run to their ends whatever fails: other
    ranks may take part in making their tensors, and would wait for ever.

    ``files`` maps a relative path to a file or folder to copy, or to a function that is given an empty folder to fill.

    Raises `RunError` naming the path, the bytes needed and the bytes free when the disk doesn't take it or another
    writer gave the same name, and then removes what this call wrote; ``TypeError`` for a part that mixes tensors with
    other things. Before writing, the free space is compared with what this call needs; of iterators that isn't known.
    """
    mine: list[Path] = []
    needed = 0

    def opened(path: Path) -> BinaryIO:
        file = (open_file or _create)(path)
        mine.append(path)
        return file

    try:
        encoded = dict(_encode(part, value) for part, value in parts.items())
        needed = sum(_size(data) for data in encoded.values())
        entries: dict[str, Entry] = {}
        for name, source in (files or {}).items():
            target = folder / name
            if target.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
            mine.append(target)
            _place(source, target)
        if needed > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for path in sorted(path for placed in mine for path in _files(placed)):
            entries[path.relative_to(folder).as_posix()] = _synced(path)
        for name, data in encoded.items():
            if isinstance(data, TensorStream):
                entries[name] = _write_stream(folder / name, data, opened)
                needed += entries[name]["bytes"]
            else:
                chunks = data.chunks() if isinstance(data, TensorFile) else [memoryview(data)]
                entries[name] = write_file(folder / name, chunks, opened)
        return entries
    except Exception as error:
        for path in mine:  # before the message says how much is free
            _remove(path)
        for value in parts.values():
            if isinstance(value, Iterator):
                with contextlib.suppress(Exception):
                    collections.deque(value, maxlen=0)
        if isinstance(error, OSError):
            raise RunError(failure(folder, error, needed)) from error
        raise


def write_file(path: Path, chunks: Iterable[memoryview], open_file: OpenFile | None = None) -> Entry:
    """A new file of these bytes, synced."""
    with (open_file or _create)(path) as file:
        entry = _pour(file, chunks)
        file.flush()
        os.fsync(file.fileno())
    return entry


def replace_file(path: Path, data: bytes, open_file: OpenFile | None = None) -> None:
    """In place of what was there: at every moment the file is the old one or the new one."""
    new = path.with_name(f".{path.name}.partial")
    new.unlink(missing_ok=True)
    write_file(new, [memoryview(data)], open_file)
    new.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Force to the disk which files are there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def failure(folder: Path, error: OSError, needed: int | None = None) -> str:
    """What to say when a checkpoint that is written aside in ``folder`` can't be; ``needed`` in bytes."""
    final = folder.with_name(folder.name.removeprefix(".").removesuffix(".partial"))
    what = f"can't write checkpoint {final}: {error.strerror or error}"
    if isinstance(error, FileExistsError) and error.filename:
        what += f", {error.filename}"
    if needed is None:
        return what
    try:
        free = f"{shutil.disk_usage(folder if folder.exists() else folder.parent).free} bytes are free"
    except OSError:
        free = "the folder can't be reached"
    return f"{what}; {needed} bytes are needed, {free} there"


def refuse_pickle(path: Path) -> None:
    """``RunError`` for a file whose name says that loading it would run code."""
    if path.suffix in PICKLED:
        raise RunError(f"{path}: pickled files can run code when loaded; checkpoints neither hold nor read them")


def crc32(path: Path) -> int:
    """The checksum of a file's content."""
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            crc = zlib.crc32(piece, crc)
    return crc


def joined_crc32(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two pieces one after the other, of which the second has so many bytes.

    A CRC is a polynomial over GF(2) modulo a fixed one, the highest power in the lowest bit; bytes behind the first
    piece multiply its CRC by x to the power of their bits.
    """
    power, factor = 1 << 31, 1 << 23  # 1 and x^8
    while second_bytes:
        if second_bytes & 1:
            power = _times(power, factor)
        factor = _times(factor, factor)
        second_bytes >>= 1
    return _times(first, power) ^ second


def _times(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product


def _encode(part: str, value: Part) -> tuple[str, TensorFile | TensorStream | bytes]:
    """File name and content of a part."""
    if not re.fullmatch(r"\w+", part) or part == "manifest":
        raise ValueError(f"{part!r} can't name a part")
    if isinstance(value, Iterator):
        return f"{part}.safetensors", TensorStream(value)
    if isinstance(value, Pieces):
        return f"{part}.safetensors", TensorFile(value.tensors, value.boxes)
    if isinstance(value, Mapping) and value and all(isinstance(v, Tensor) for v in value.values()):
        return f"{part}.safetensors", TensorFile(value)
    try:
        return f"{part}.json", json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"part {part!r} is neither all tensors nor plain JSON: {error}") from error


def _size(data: TensorFile | TensorStream | bytes) -> int:
    """Bytes that are known to be needed."""
    if isinstance(data, TensorStream):
        return 0
    return data.size if isinstance(data, TensorFile) else len(data)


def _create(path: Path) -> BinaryIO:
    return path.open("xb")


def _pour(file: BinaryIO, chunks: Iterable[memoryview]) -> Entry:
    size = crc = 0
    for data in chunks:
        with data:  # released before the next tensor's bytes are made
            for start in range(0, len(data), _CHUNK):
                with data[start : start + _CHUNK] as piece:
                    file.write(piece)
                    size, crc = size + len(piece), zlib.crc32(piece, crc)
    return {"bytes": size, "crc32": crc}


def _write_stream(path: Path, stream: TensorStream, open_file: OpenFile) -> Entry:
    """As `write_file`; the header takes its place in front of the tensors after the last of them."""
    with open_file(path) as file:
        file.write(bytes(RESERVED))
        entry = _pour(file, stream.chunks())
    head = stream.head()
    if len(head) == RESERVED:
        with path.open("r+b") as file:
            file.write(head)
            file.flush()
            os.fsync(file.fileno())
    else:
        tensors = path.rename(path.with_name(f".{path.name}.tensors"))
        try:
            with open_file(path) as file, tensors.open("rb") as source:
                file.write(head)
                source.seek(RESERVED)
                shutil.copyfileobj(source, file, _CHUNK)
                file.flush()
                os.fsync(file.fileno())
        finally:
            tensors.unlink()
    size = entry["bytes"]
    return {"bytes": len(head) + size, "crc32": joined_crc32(zlib.crc32(head), entry["crc32"], size)}


def _place(source: Source, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(source, Path):
        target.mkdir()
        source(target)
    elif source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)


def _files(placed: Path) -> Iterable[Path]:
    return [placed] if placed.is_file() else [path for path in placed.rglob("*") if path.is_file()]


def _synced(path: Path) -> Entry:
    """Force a copied file to the disk and describe it."""
    refuse_pickle(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "crc32": crc32(path)}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
