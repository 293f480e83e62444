"""Write a safetensors file tensor by tensor, so that a part on a GPU never exists a second time in host memory.

(The safetensors library gathers every tensor on the host first; reading stays with it.)
Format: https://huggingface.co/docs/safetensors: 8 bytes header length, JSON header, tensor bytes without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from verl.config.errors import RunError

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


class TensorFile:
    """The bytes of ``tensors`` as a safetensors file: ``size`` is known at once, ``chunks()`` makes them one by one.

    Names of one and the same memory (tied embeddings) are written once and are one tensor again after `read_tensors`;
    partly overlapping views are written in full, each. Raises ``TypeError`` for a tensor with no values to write.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        first: dict[tuple, str] = {}
        aliases: dict[str, str] = {}
        self._tensors: dict[str, Tensor] = {}
        header: dict[str, dict] = {}
        offset = 0
        for name in sorted(tensors):
            tensor = tensors[name].detach()
            # a subclass (DTensor, a quantised weight) keeps its values elsewhere than at data_ptr
            plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_meta
            if not plain or tensor.dtype not in _DTYPES:
                raise TypeError(f"{name!r} can't be saved: {type(tensor).__name__}, {tensor.dtype}, {tensor.device}")
            memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel() and first.setdefault(memory, name) != name:
                aliases[name] = first[memory]
                continue
            end = offset + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            self._tensors[name], offset = tensor, end
        metadata = {"format": "pt", _ALIASES: json.dumps(aliases)}
        text = json.dumps({"__metadata__": metadata, **header}).encode()
        text += b" " * (-len(text) % 8)  # tensor bytes start aligned
        self._head = len(text).to_bytes(8, "little") + text
        self.size = len(self._head) + offset

    def chunks(self) -> Iterator[memoryview]:
        """The file's bytes; at most one tensor's copy is alive."""
        yield memoryview(self._head)
        for tensor in self._tensors.values():
            if tensor.numel():
                yield tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, on the CPU. Raises `RunError` naming the file if it is none."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise RunError(f"{path} is damaged or no safetensors file: {error}") from error
    for name, source in json.loads(metadata.get(_ALIASES, "{}")).items():
        tensors[name] = tensors[source]
    return tensors
