"""What the two ends of the corridor tell each other when they meet: who holds and who wants which parts."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from verl.config.errors import RunError
from verl.hybrid.reshard import Box, Holdings, Weight, inside, meet, whole


@dataclass(frozen=True)
class Part:
    """A tensor of this rank, and which box of its weight it is."""

    tensor: Tensor
    box: Box

    def has(self, box: Box) -> bool:
        return meet(self.box, box) == box

    def at(self, box: Box) -> Tensor:
        """A view of ``box``, which lies inside."""
        return self.tensor[tuple(slice(start, stop) for start, stop in inside(box, self.box))]


Parts = Mapping[str, Sequence[Part]]  # by weight


@dataclass(frozen=True)
class Table:
    """The weights in order, the boxes of each rank, the dtypes in which weights arrive (those of who wants them), and
    the machine of each rank.

    Ranks that ``stream`` have no place for a weight before it comes: they want each whole and take it elsewhere.
    """

    weights: tuple[Weight, ...]
    held: Holdings
    wanted: Holdings
    dtypes: Mapping[str, torch.dtype]
    streaming: frozenset[int]
    nodes: Mapping[int, str]

    @staticmethod
    def of(source: Parts, target: Parts, streams: bool = False, *, rank: int = 0, group: Any = None) -> Table:
        """All ranks of the process group call this together, each with its own parts; without one, this is all.

        Raises:
            RunError: a weight is wanted that nobody holds, or held and wanted by none; the message counts and names
                them.
        """

        def told(parts: Parts) -> dict[str, list[tuple[str, Box]]]:
            return {
                name: [(str(p.tensor.dtype).removeprefix("torch."), p.box) for p in ps] for name, ps in parts.items()
            }

        mine = rank, told(source), told(target), streams, platform.node()
        everybody: list[Any] = [mine]
        if group is not None:
            everybody = [None] * dist.get_world_size(group)
            dist.all_gather_object(everybody, mine, group)
        held = {rank: parts for rank, parts, *_ in everybody}
        wanted = {rank: parts for rank, _, parts, *_ in everybody if parts}
        names = [list(dict.fromkeys(name for parts in side.values() for name in parts)) for side in (held, wanted)]
        if wanted:
            _check_names(*names)
        dtypes: dict[str, torch.dtype] = {}
        ends: dict[str, tuple[int, ...]] = {}
        for side in (held, wanted):
            for parts in side.values():
                for name, boxes in parts.items():
                    for dtype, box in boxes:
                        stops = tuple(stop for _, stop in box)
                        ends[name] = tuple(max(pair) for pair in zip(ends.get(name, stops), stops, strict=True))
                        dtypes[name] = getattr(torch, dtype)
        weights = tuple(Weight(name, shape, dtypes[name].itemsize) for name, shape in ends.items())

        def boxes_in(parts: Mapping[str, Sequence[tuple[str, Box]]]) -> dict[str, list[Box]]:
            return {name: [box for _, box in found] for name, found in parts.items()}

        streaming = frozenset(rank for rank, _, _, streams, _ in everybody if streams)
        everything = {weight.name: [whole(weight.shape)] for weight in weights}
        return Table(
            weights,
            {rank: boxes_in(parts) for rank, parts in held.items()},
            {rank: boxes_in(parts) for rank, parts in wanted.items()} | dict.fromkeys(streaming, everything),
            dtypes,
            streaming,
            {rank: node for rank, *_, node in everybody},
        )


def _check_names(held: list[str], wanted: list[str]) -> None:
    sides = ("held by what is trained", held, wanted), ("wanted by what generates", wanted, held)
    faults = [
        f"{len(lone)} of {len(mine)} weights {what} have no counterpart: "
        + ", ".join(lone[:4] + ["..."] * (len(lone) > 4))
        for what, mine, theirs in sides
        if (lone := [name for name in mine if name not in set(theirs)])
    ]
    if faults:
        raise RunError("; ".join(faults))


def parts_of(tensors: Mapping[str, Tensor]) -> dict[str, list[Part]]:
    """A rank's tensors as parts: of a ``DTensor`` what lies here, of any other the whole."""
    found: dict[str, list[Part]] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            found[name] = [Part(tensor.to_local(), tuple((at, at + n) for at, n in zip(start, shape, strict=True)))]
        else:
            found[name] = [Part(tensor, whole(tensor.shape))]
    return found
