"""Ranks and their places: data, tensor, context and pipeline parallel; boxes, which are parts of tensors. Numbers only;
no process is touched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from verl.config.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

Axis = Literal["pp", "dp", "cp", "tp"]
Box = tuple[tuple[int, int], ...]  # of a tensor: a half-open range of indices along each dimension


def elements(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, n) for n in shape)


def meet(a: Box, b: Box) -> Box | None:
    """What lies in both; ``None`` if that is nothing."""
    both = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


@dataclass(frozen=True)
class Part:
    """A tensor, and which box of a larger one it is."""

    tensor: Tensor
    box: Box

    def __post_init__(self) -> None:
        if (shape := tuple(stop - start for start, stop in self.box)) != self.tensor.shape:
            raise ValueError(f"a part of shape {tuple(self.tensor.shape)} can't be the box {self.box} of shape {shape}")

    def has(self, box: Box) -> bool:
        return all(a <= start and stop <= b for (a, b), (start, stop) in zip(self.box, box, strict=True))

    def at(self, box: Box) -> Tensor:
        """A view of ``box``, which lies inside."""
        view = self.tensor
        for dim, ((start, stop), (a, b)) in enumerate(zip(box, self.box, strict=True)):
            if (start, stop) != (a, b):
                view = view.narrow(dim, start - a, stop - start)
        return view


class Piece(NamedTuple):
    """A box of a tensor: its part from ``start`` on along each dimension; ``shape`` is the whole's."""

    name: str
    tensor: Any
    shape: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where a rank stands on each axis, from 0."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """How many ranks lie along each axis; together they are ``pp * dp * cp * tp`` ranks.

    Neighbouring ranks differ in ``tp`` first (it talks in every layer, so it wants the fastest links), then ``cp``,
    ``dp`` and ``pp`` (which talks least and may cross machines). With ``dp=2, tp=2`` ranks 0 and 1 compute the same
    rows together, and ranks 0 and 2 hold the same part of each matrix.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, size in self._sizes().items():
            if size < 1:
                raise RequestError(f"{axis} is {size}; it must be at least 1")

    @staticmethod
    def of(ranks: int, *, tp: int = 1, cp: int = 1, pp: int = 1) -> Layout:
        """The layout of ``ranks`` ranks: what the other axes leave is data parallel. ``RequestError`` if it divides
        unevenly."""
        block = Layout(pp=pp, cp=cp, tp=tp).size
        if ranks < 1 or ranks % block:
            fits = sorted({max(ranks // block, 1) * block, (ranks // block + 1) * block})
            raise RequestError(
                f"{ranks} ranks don't divide by tensor {tp} x context {cp} x pipeline {pp} = {block}; "
                f"use {' or '.join(map(str, fits))} ranks"
            )
        return Layout(pp=pp, dp=ranks // block, cp=cp, tp=tp)

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def place(self, rank: int) -> Place:
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not one of {self.size}")
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return Place(pp, dp, cp, tp)

    def rank(self, place: Place) -> int:
        return ((place.pp * self.dp + place.dp) * self.cp + place.cp) * self.tp + place.tp

    def peers(self, rank: int, axis: Axis) -> list[int]:
        """The ranks that differ from ``rank`` in ``axis`` alone, itself included, ascending."""
        here = vars(self.place(rank))
        return [self.rank(Place(**{**here, axis: at})) for at in range(self._sizes()[axis])]

    def _sizes(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}
