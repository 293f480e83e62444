"""What the two ends of the corridor tell each other when they meet: who holds and who wants which parts."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from verl.config.errors import RunError
from verl.hybrid.reshard import Holdings, Weight
from verl.layout import Box, Part, whole

Parts = Mapping[str, Sequence[Part]]  # by weight


class Kept(dict[str, list[Part]]):
    """Parts that stay where they are while this is the same object."""


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


@torch.no_grad()
def parts_of(tensors: Mapping[str, Tensor]) -> dict[str, list[Part]]:
    """A rank's tensors as parts: of a ``DTensor`` what lies here, of any other the whole."""
    found: dict[str, list[Part]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            box = _box(tensor.shape, tensor.device_mesh, tensor.placements)
            found[name] = [Part(tensor.to_local().detach(), box)]
        else:
            found[name] = [Part(tensor.detach(), whole(tensor.shape))]
    return found


def parts_in(pieces: Iterable[tuple[str, Tensor, Box]]) -> Parts:
    """A rank's parts from names, tensors and boxes; a weight may have several."""
    found: dict[str, list[Part]] = {}
    for name, tensor, box in pieces:
        found.setdefault(name, []).append(Part(tensor, box))
    return Kept(found)


@functools.lru_cache(4096)
def _box(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Box:
    """What of a distributed tensor lies here."""
    sizes, start = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple((at, at + n) for at, n in zip(start, sizes, strict=True))


class Standing:
    """The parts of a module that stays where it is: found once, and again should its parameters have moved.

    Finding them takes longer than sending them. ``tensors``: the module's own, not copies, by name.
    """

    def __init__(self, module: nn.Module, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        self._parameters, self._tensors = list(module.parameters()), tensors
        self._found = Kept()
        self._at: list[int] = []

    @torch.no_grad()
    def parts(self) -> Parts:
        at = [(p.to_local() if isinstance(p, DTensor) else p).data_ptr() for p in self._parameters]
        if at != self._at:
            self._found, self._at = Kept(parts_of(self._tensors())), at
        return self._found
