"""Write a safetensors file tensor by tensor, so that a part on a GPU never exists a second time in host memory.

(The safetensors library gathers every tensor on the host first; reading stays with it.)
Format: https://huggingface.co/docs/safetensors: 8 bytes header length, JSON header, tensor bytes without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from verl.config.errors import RunError
from verl.layout import Part, meet

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIASES = "aliases"  # metadata key: JSON object, name -> name of the tensor that holds the same memory
_BOXES = "boxes"  # metadata key of a file of pieces: `Boxes`, as a JSON object


Boxes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]  # of pieces: the whole's shape, and their start in it
RESERVED = 4 * 2**20  # bytes kept free for the header of a `TensorStream`: enough for about 30,000 tensors


class TensorFile:
    """The bytes of ``tensors`` as a safetensors file: ``size`` is known at once, ``chunks()`` makes them one by one.

    Names of one and the same memory (tied embeddings) are written once and are one tensor again after `read_tensors`;
    partly overlapping views are written in full, each. Raises ``TypeError`` for a tensor with no values to write.
    ``boxes``: of tensors that are pieces, the whole's shape and where in it they begin.
    """

    def __init__(self, tensors: Mapping[str, Tensor], boxes: Boxes | None = None) -> None:
        first: dict[tuple, str] = {}
        aliases: dict[str, str] = {}
        self._tensors: dict[str, Tensor] = {}
        table = _Table()
        for name in sorted(tensors):
            tensor = plain(name, tensors[name])
            if tensor.numel() and first.setdefault(memory_of(tensor), name) != name:
                aliases[name] = first[memory_of(tensor)]
                continue
            table.add(name, tensor)
            self._tensors[name] = tensor
        self._head = table.head({_ALIASES: aliases} | ({} if boxes is None else {_BOXES: boxes}))
        self.size = len(self._head) + table.size

    def chunks(self) -> Iterator[memoryview]:
        """The file's bytes; at most one tensor's copy is alive."""
        yield memoryview(self._head)
        for tensor in self._tensors.values():
            if tensor.numel():
                yield _bytes(tensor)


class TensorStream:
    """The same for tensors that come one by one and may be gone after their turn, so that no two exist at once.

    ``chunks()`` gives the bytes behind the header; whoever writes them leaves `RESERVED` bytes in front free for
    ``head()``, which is known after the last. Every tensor is written in full: where two have the same memory, it may
    have been free in between.
    """

    def __init__(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.tensors = tensors
        self._table = _Table()

    def chunks(self) -> Iterator[memoryview]:
        """The tensors' bytes as they come. Raises ``TypeError`` as `TensorFile` does, ``ValueError`` for a second
        tensor of one name."""
        for name, given in self.tensors:
            tensor = plain(name, given)
            self._table.add(name, tensor)
            if tensor.numel():
                yield _bytes(tensor)

    def head(self) -> bytes:
        """The header, `RESERVED` bytes; more for very many tensors."""
        return self._table.head({_ALIASES: {}}, at_least=RESERVED)


class _Table:
    """What a header says of each tensor; ``size`` is the bytes of all."""

    def __init__(self) -> None:
        self._entries: dict[str, dict] = {}
        self.size = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if name in self._entries:
            raise ValueError(f"there are two tensors {name!r}")
        end = self.size + tensor.numel() * tensor.element_size()
        self._entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.size, end],
        }
        self.size = end

    def head(self, more: Mapping[str, Any], at_least: int = 0) -> bytes:
        """The length and the JSON table, ``at_least`` so many bytes together."""
        metadata = {"format": "pt"} | {key: json.dumps(value) for key, value in more.items()}
        text = json.dumps({"__metadata__": metadata, **self._entries}).encode().ljust(at_least - 8)
        text += b" " * (-len(text) % 8)  # tensor bytes start aligned
        return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Pieces:
    """One rank's part of a mapping of tensors: pieces, and where they belong."""

    tensors: Mapping[str, Tensor]
    boxes: Boxes


class Scattered:
    """A tensor in parts. An index, slices of the first dimensions or ``...``, puts together what it asks for alone."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = torch.Size(shape)
        self.parts: list[Part] = []

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].tensor.dtype

    def __getitem__(self, index: Any) -> Tensor:
        given = () if index is ... else index
        slices = [*given, *[slice(None)] * (len(self.shape) - len(given))]
        spans = [s.indices(n) for s, n in zip(slices, self.shape, strict=True)]
        box = tuple((start, max(start, stop)) for start, stop, _ in spans)
        for part in self.parts:
            if part.has(box):
                return part.at(box)
        whole = Part(torch.empty([stop - start for start, stop in box], dtype=self.dtype), box)
        for part in self.parts:
            if (both := meet(part.box, box)) is not None:
                whole.at(both).copy_(part.at(both))
        return whole.tensor


class Joined(Mapping[str, Tensor]):
    """The tensors of which files hold the pieces; each is put together when it is asked for.

    Raises `RunError` for a file that is none, and for a tensor whose pieces don't make a whole.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.parts: dict[str, Scattered] = {}
        paths = list(files)
        for path in paths:
            tensors, metadata = _read(path)
            for name, (shape, start) in json.loads(metadata.get(_BOXES, "{}")).items():
                box = tuple((at, at + n) for at, n in zip(start, tensors[name].shape, strict=True))
                self.parts.setdefault(name, Scattered(shape)).parts.append(Part(tensors[name], box))
        for name, scattered in self.parts.items():
            found, whole = sum(part.tensor.numel() for part in scattered.parts), scattered.shape.numel()
            if found != whole:
                where = paths[0].parent
                raise RunError(f"{where} is damaged: its files hold {found} of {name}'s {whole} values")

    def __getitem__(self, name: str) -> Tensor:
        return self.parts[name][...]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def plain(name: str, tensor: Tensor) -> Tensor:
    """``tensor`` without its graph. ``TypeError`` for one whose values aren't simply its memory, or of another dtype
    than files have."""
    tensor = tensor.detach()
    # a subclass (DTensor, a quantised weight) keeps its values elsewhere than at data_ptr
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in _DTYPES:
        raise TypeError(f"{name!r} can't be saved: {type(tensor).__name__}, {tensor.dtype}, {tensor.device}")
    return tensor


def memory_of(tensor: Tensor) -> tuple:
    """Equal for two living tensors that are one and the same memory, read in the same way."""
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, on the CPU. Raises `RunError` naming the file if it is none.

    The tensors are a private mapping of the file: this call reads the header alone, a tensor's pages come when it is
    read, and all readers on one machine share them. A page that somebody writes to becomes a copy of theirs.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors, under all their names, and metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise RunError(f"{path} is damaged or no safetensors file: {error}") from error
    for name, source in json.loads(metadata.get(_ALIASES, "{}")).items():
        tensors[name] = tensors[source]
    return tensors, metadata
