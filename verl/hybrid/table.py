"""What the two ends of the corridor tell each other when they meet: who holds and who wants which parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
    """The weights in order, the boxes of each rank, and the dtypes in which weights arrive (those of who wants them).

    Ranks that ``stream`` have no place for a weight before it comes: they want each whole and take it elsewhere.
    """

    weights: tuple[Weight, ...]
    held: Holdings
    wanted: Holdings
    dtypes: Mapping[str, torch.dtype]
    streaming: frozenset[int]

    @staticmethod
    def of(source: Parts, target: Parts, streams: bool = False, *, rank: int = 0, group: Any = None) -> Table:
        """All ranks of the process group call this together, each with its own parts; without one, this is all.

        Raises:
            RunError: a weight is wanted that nobody holds.
        """

        def told(parts: Parts) -> dict[str, list[tuple[str, Box]]]:
            return {
                name: [(str(p.tensor.dtype).removeprefix("torch."), p.box) for p in ps] for name, ps in parts.items()
            }

        mine = rank, told(source), told(target), streams
        everybody: list[Any] = [mine]
        if group is not None:
            everybody = [None] * dist.get_world_size(group)
            dist.all_gather_object(everybody, mine, group)
        held = {rank: parts for rank, parts, _, _ in everybody}
        wanted = {rank: parts for rank, _, parts, _ in everybody if parts}
        dtypes: dict[str, torch.dtype] = {}
        ends: dict[str, tuple[int, ...]] = {}
        for side in (held, wanted):
            for parts in side.values():
                for name, boxes in parts.items():
                    if side is wanted and name not in ends:
                        raise RunError(f"rollouts want {name}, which the trained model doesn't have")
                    for dtype, box in boxes:
                        stops = tuple(stop for _, stop in box)
                        ends[name] = tuple(max(pair) for pair in zip(ends.get(name, stops), stops, strict=True))
                        dtypes[name] = getattr(torch, dtype)
        weights = tuple(Weight(name, shape, dtypes[name].itemsize) for name, shape in ends.items())

        def boxes_in(parts: Mapping[str, Sequence[tuple[str, Box]]]) -> dict[str, list[Box]]:
            return {name: [box for _, box in found] for name, found in parts.items()}

        streaming = frozenset(rank for rank, _, _, streams in everybody if streams)
        everything = {weight.name: [whole(weight.shape)] for weight in weights}
        return Table(
            weights,
            {rank: boxes_in(parts) for rank, parts in held.items()},
            {rank: boxes_in(parts) for rank, parts in wanted.items()} | dict.fromkeys(streaming, everything),
            dtypes,
            streaming,
        )
