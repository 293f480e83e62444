"""A model's weights by name, shape and size, from its files' headers: nothing of them is read."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

from verl.config.errors import RequestError
from verl.hybrid.reshard import Weight

SIZES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "F8_E4M3": 1,
    "U8": 1,
    "I8": 1,
    "BOOL": 1,
}
CUT = {  # the dimension along which tensor parallelism cuts
    0: ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    1: ("o_proj", "down_proj"),
}


def weights_of(folder: Path, itemsize: int | None = None) -> list[Weight]:
    """Of a model's folder; ``itemsize``: bytes of a value where it is loaded in another dtype than it is filed in.

    Raises:
        RequestError: no safetensors files, or one that can't be read.
    """
    shapes: dict[str, tuple[tuple[int, ...], int]] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RequestError(f"{folder} holds no safetensors files")
    for file in files:
        try:
            with file.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                header = json.loads(opened.read(length))
        except (OSError, ValueError, struct.error) as error:
            raise RequestError(f"{file} can't be read: {error}") from error
        for name, entry in header.items():
            if name != "__metadata__":
                shapes[name] = tuple(entry["shape"]), SIZES[entry["dtype"]]
    return table(shapes, itemsize)


def table(shapes: Mapping[str, tuple[Iterable[int], int]], itemsize: int | None = None) -> list[Weight]:
    """Shapes and sizes by name, with the places of layers and what tensor parallelism cuts told from the names."""
    layers = 1 + max((layer for name in shapes if (layer := _layer(name)) is not None), default=0)
    found = []
    for name, (shape, size) in shapes.items():
        layer, sizes = _layer(name), tuple(shape)
        parts = name.split(".")
        cut = next((dim for dim, kinds in CUT.items() if len(sizes) > dim and set(kinds) & set(parts[-2:])), None)
        at = (layer / layers) if layer is not None else (0.0 if "embed" in name else 1 - 1e-9)
        found.append(Weight(name, sizes, itemsize or size, cut if len(sizes) > 1 or cut == 0 else None, at))
    return found


def _layer(name: str) -> int | None:
    found = re.search(r"(?:layers|h|blocks)\.(\d+)\.", name)
    return int(found.group(1)) if found else None
