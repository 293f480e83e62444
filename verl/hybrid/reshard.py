"""Which rank sends which part of which weight to whom, so that every rank gets what it lacks and nothing else.

A part of a weight is a *box*: a half-open range of indices along each dimension. Ranks hold boxes (training) and want
boxes (generation); the plan covers everything wanted exactly once, first from what the rank holds itself, then from the
nearest owner that has sent least. No torch here: plans of models that fit nowhere can be made anywhere.

With p x t x d training ranks (pipeline, tensor, data) and generation over p' x t' of them, generation groups are chosen
so that a rank's training part lies inside its generation part (arXiv 2409.19256, section 5.3). Each rank then receives
``(1/(p't') - 1/(pt)) M`` of a model of ``M`` bytes, and holds nothing twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from verl.config.errors import RequestError
from verl.layout import Box, Layout, elements, meet, whole

Holdings = Mapping[int, Mapping[str, Sequence[Box]]]  # rank -> weight -> boxes


def without(box: Box, taken: Box) -> Iterator[Box]:
    """What of ``box`` isn't in ``taken``, as boxes that don't overlap."""
    inner = meet(box, taken)
    if inner is None:
        yield box
        return
    for dim, ((start, stop), (a, b)) in enumerate(zip(box, inner, strict=True)):
        for side in ((start, a), (b, stop)):
            if side[0] < side[1]:
                yield (*inner[:dim], side, *box[dim + 1 :])


@dataclass(frozen=True)
class Weight:
    """A whole weight. ``cut``: the dimension that tensor parallelism cuts, if it cuts it; ``layer`` in ``[0, 1)``:
    how far down the model it lies, which says its pipeline stage."""

    name: str
    shape: tuple[int, ...]
    itemsize: int = 2
    cut: int | None = None
    layer: float = 0.0

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, eq=False)  # found by identity, which takes no time
class Move:
    """``box`` of ``weight`` goes from ``source`` to ``target``; within a rank where they are the same."""

    weight: str
    box: Box
    source: int
    target: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    moves: tuple[Move, ...]

    @cached_property
    def crossing(self) -> tuple[Move, ...]:
        """Moves from one rank to another."""
        return tuple(move for move in self.moves if move.source != move.target)

    def received(self, rank: int) -> int:
        """Bytes that come from other ranks."""
        return sum(move.bytes for move in self.crossing if move.target == rank)


def plan(
    weights: Sequence[Weight], held: Holdings, wanted: Holdings, node: Callable[[int], object] = lambda rank: None
) -> Plan:
    """Cover all that is wanted from what is held. ``node``: of a rank; owners on the target's node are nearer.

    Every rank that calls this with the same arguments gets the same plan.

    Raises:
        RequestError: part of a weight is wanted that no rank holds.
    """
    moves: list[Move] = []
    load: dict[int, int] = defaultdict(int)
    for weight in weights:
        owners: dict[Box, list[int]] = defaultdict(list)
        for rank in sorted(held):
            for box in held[rank].get(weight.name, ()):
                if elements(box):
                    owners[box].append(rank)
        for target in sorted(wanted):
            own = [box for box in held.get(target, {}).get(weight.name, ()) if elements(box)]
            for part in wanted[target].get(weight.name, ()):
                left = [part] if elements(part) else []
                for box, source in (*((b, target) for b in own), *((b, None) for b in owners if b not in own)):
                    rest: list[Box] = []
                    for piece in left:
                        common = meet(piece, box)
                        if common is None:
                            rest.append(piece)
                            continue
                        size = elements(common) * weight.itemsize
                        sender = source
                        if sender is None:
                            sender = min(owners[box], key=lambda r: (node(r) != node(target), load[r], r))
                            load[sender] += size
                        moves.append(Move(weight.name, common, sender, target, size))
                        rest += without(piece, box)
                    left = rest
                if left:
                    raise RequestError(f"{weight.name}{list(left[0])} is wanted on rank {target}, and no rank holds it")
    return Plan(tuple(moves))


# -- layouts ---------------------------------------------------------------------------------------------------------


def _chunk(start: int, stop: int, parts: int, part: int) -> tuple[int, int]:
    """As ``torch.chunk`` cuts: all parts but the last ones are of equal size, the last may be smaller or empty."""
    size = -(-(stop - start) // parts)
    return min(start + part * size, stop), min(start + (part + 1) * size, stop)


def _cut(weight: Weight, tp: int, index: int) -> Box:
    box = list(whole(weight.shape))
    if weight.cut is not None and tp > 1:
        n = weight.shape[weight.cut]
        if n % tp:
            raise RequestError(f"{weight.name}: {tp} tensor parallel ranks don't divide its {n} rows or columns")
        box[weight.cut] = _chunk(0, n, tp, index)
    return tuple(box)


def training(weights: Sequence[Weight], layout: Layout, *, sharded: bool) -> Holdings:
    """What each training rank holds: its pipeline stage's weights, cut by tensor parallelism; ``sharded`` (FSDP): of
    that the data-parallel rank's part along dimension 0."""
    held: dict[int, dict[str, list[Box]]] = {}
    for rank in range(layout.size):
        place = layout.place(rank)
        held[rank] = {}
        for weight in weights:
            if int(weight.layer * layout.pp) != place.pp:
                continue
            box = _cut(weight, layout.tp, place.tp)
            if sharded and layout.dp > 1 and box:
                box = (_chunk(*box[0], layout.dp, place.dp), *box[1:])
            held[rank][weight.name] = [box]
    return held


def generation(weights: Sequence[Weight], layout: Layout, tp: int, pp: int = 1) -> Holdings:
    """What each training rank wants when it generates in groups of ``pp x tp``.

    Tensor-parallel groups take ranks at the interval (ranks cutting a weight while training) / ``tp``, so that
    neighbours, who share a generation part, hold neighbouring training parts.

    Raises:
        RequestError: the sizes don't divide.
    """
    blocks = layout.tp if layout.tp > 1 else layout.dp  # ranks that cut weights; data-parallel ones do under FSDP
    for name, size, ranks in (("tensor", tp, blocks), ("pipeline", pp, layout.pp)):
        if size < 1 or ranks % size:
            fits = [n for n in range(1, ranks + 1) if ranks % n == 0]
            raise RequestError(f"generation's {name} parallel size {size} doesn't divide {ranks}; it can be {fits}")
    wanted: dict[int, dict[str, list[Box]]] = {}
    for rank in range(layout.size):
        place = layout.place(rank)
        index = (place.tp if layout.tp > 1 else place.dp) * tp // blocks
        stage = place.pp * pp // layout.pp
        wanted[rank] = {weight.name: [_cut(weight, tp, index)] for weight in weights if int(weight.layer * pp) == stage}
    return wanted


# -- what it costs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Of one publish, the most over ranks, in bytes: what comes in, what a rank holds at the worst moment of it, and
    what it holds twice afterwards (a training part that isn't inside its generation part)."""

    received: int
    peak: int
    redundant: int


def cost(
    weights: Sequence[Weight], held: Holdings, wanted: Holdings, bucket: int, *, reused: bool = True,
    spans: Mapping[int, Sequence[int]] | None = None,
) -> Cost:  # fmt: skip
    """Of our plan: parts go straight to their places, through two buckets. ``reused``: a training part that lies
    inside its generation part is not kept beside it. ``spans``: of a rank whose engine computes on several devices,
    the ranks of all of these; it alone receives, and each keeps its share of the matrices, and the vectors."""
    table, made = {w.name: w for w in weights}, plan(weights, held, wanted)
    received, peak, redundant = 0, 0, 0
    for rank, parts in wanted.items():
        incoming, devices = made.received(rank), (spans or {}).get(rank, (rank,))
        kept = max(_bytes(table, held.get(device, {})) for device in devices)
        copy = _bytes(table, parts, len(devices))
        mine = sum(m.bytes for m in made.moves if m.source == m.target == rank)
        again = kept if not reused else kept - mine
        received = max(received, incoming)
        peak = max(peak, copy + again + min(2 * bucket, 2 * incoming))
        redundant = max(redundant, again)
    return Cost(received, peak, redundant)


def cost_of_gathering(weights: Sequence[Weight], layout: Layout, held: Holdings, *, everything: bool) -> Cost:
    """Of the two classic ways: each rank gathers the whole model from all ranks (``everything``), or from its
    model-parallel group, and keeps its training part beside it."""
    model = sum(weight.bytes for weight in weights)
    cutting = layout.size if everything else layout.tp * layout.pp
    received = model * (cutting - 1) // cutting
    mine = max(_bytes({w.name: w for w in weights}, part) for part in held.values())
    return Cost(received, model + mine, mine)


def _bytes(table: Mapping[str, Weight], part: Mapping[str, Sequence[Box]], devices: int = 1) -> int:
    """On each of ``devices`` that share the matrices; vectors are whole on all."""
    return sum(
        -(-elements(box) // (devices if len(box) > 1 else 1)) * table[name].itemsize
        for name, boxes in part.items()
        for box in boxes
    )
