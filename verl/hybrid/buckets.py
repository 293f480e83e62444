"""A plan cut into buckets, and the bytes of one bucket between two ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from verl.hybrid.reshard import Move
from verl.layout import elements

ALIGNED = 16  # bytes; every message begins where any dtype may
LANES = 1024  # of a checksum


def buckets(moves: Sequence[Move], limit: int) -> list[list[Move]]:
    """The moves in order, in runs in which no rank sends or receives more than ``limit`` bytes; larger ones are cut
    along their longest dimension, as far as that goes."""
    done: list[list[Move]] = [[]]
    load: dict[tuple[str, int], int] = defaultdict(int)
    for move in (piece for whole in moves for piece in _cut(whole, limit)):
        ends = ("from", move.source), ("to", move.target)
        if done[-1] and any(load[end] + move.bytes > limit for end in ends):
            done.append([])
            load.clear()
        done[-1].append(move)
        for end in ends:
            load[end] += move.bytes
    return [bucket for bucket in done if bucket]


def _cut(move: Move, limit: int) -> Iterator[Move]:
    sizes = [stop - start for start, stop in move.box]
    if move.bytes <= limit or not sizes or max(sizes) == 1:
        yield move
        return
    dim = sizes.index(max(sizes))
    each = max(1, sizes[dim] * limit // move.bytes)
    start, stop = move.box[dim]
    item = move.bytes // elements(move.box)
    for at in range(start, stop, each):
        box = (*move.box[:dim], (at, min(at + each, stop)), *move.box[dim + 1 :])
        piece = Move(move.weight, box, move.source, move.target, elements(box) * item)
        yield from _cut(piece, limit)


def padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory, ``[bytes]`` of uint8."""
    return tensor.reshape(-1).view(torch.uint8)


def bits(tensor: Tensor) -> Tensor:
    """A tensor's values as integers of equal width, so that comparing them compares every bit."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().reshape(-1).view(kinds[tensor.element_size()])


def words(tensor: Tensor) -> Tensor | None:
    """A tensor's memory as ``[N, LANES]`` int64, where it has that form."""
    size = tensor.element_size()
    fits = tensor.is_contiguous() and tensor.numel() and tensor.numel() * size % (8 * LANES) == 0
    if fits and tensor.shape[-1] * size % 8 == tensor.storage_offset() * size % 8 == 0:
        return tensor.view(torch.int64).view(-1, LANES)
    return None


def lanes(tensor: Tensor) -> Tensor:
    """Sums of the tensor's words, each of the ``LANES`` along which they lie, ``[LANES]`` int64 on its device: one pass
    over its memory. Words are 8 bytes wide where these divide it."""
    if (rows := words(tensor)) is not None:
        return rows.sum(0)
    data = as_bytes(tensor.contiguous())
    if data.storage_offset() % 8:
        data = data.clone()
    flat = data.view(torch.uint8 if len(data) % 8 else torch.int64)
    even = len(flat) // LANES * LANES
    sums = flat[:even].view(-1, LANES).sum(0, dtype=torch.int64)
    if even < len(flat):
        sums[: len(flat) - even] += flat[even:]
    return sums


def totals(sums: Tensor) -> Tensor:
    """Checksums ``[N]`` of ``lanes [N, LANES]``: weighted sums, which one changed bit, or two values of different lanes
    in each other's place, change. Equal values have the same on any device."""
    return (sums * torch.arange(1, 2 * LANES, 2, device=sums.device)).sum(1)
