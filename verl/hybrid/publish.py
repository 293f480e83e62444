"""The corridor: weights from the ranks that train to the ranks that generate, bucket by bucket.

The plan is made once, when the ranks have met. A publish first exchanges a *header* per pair of ranks (version; of each
move a checksum and how many of its values changed), then buckets, two at a time: the next one travels while the present
one is written to its places. What arrived is read back from there and compared with the sender's checksum, so a publish
that ends has put every bit in its place; one that fails leaves engines that must not generate.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from verl.config.errors import RunError
from verl.hybrid.buckets import as_bytes, bits, buckets, checksum, padded
from verl.hybrid.reshard import Box, Move, elements, plan, whole
from verl.hybrid.table import Part, Parts, Table
from verl.hybrid.transport import Transport

Incremental = Literal["auto", True, False]
WHOLE = -1  # in a header: all of a move comes, not only what changed
NEVER = -1  # in a header: changes are counted from no version
Key = tuple[str, Box]


@dataclass(frozen=True)
class Transfer:
    """Some tensors' values on their way between two ranks."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    values: int
    bytes: int
    seconds: float
    source: int
    target: int


@dataclass
class Report:
    """What one publish did on this rank; bytes from and to other ranks.

    ``full_bytes``: what the same moves weigh when sent whole. Of ``compared`` values, ``changed`` were sent because
    they had changed.
    """

    version: int
    seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    full_bytes: int = 0
    changed: int = 0
    compared: int = 0
    transfers: list[Transfer] = field(default_factory=list)


class Corridor:
    """One rank's end. All ranks of ``table`` have one and call ``flow`` together.

    Args:
        table: what the ranks told each other.
        rank: this one.
        transport: among these ranks.
        bucket: most bytes of a bucket per rank; two are in memory at a time.
        incremental: send only values that changed since the last publish, where that is fewer bytes. ``"auto"``:
            where what generation holds is at hand to compare with; ``True``: elsewhere, too, from a copy of what was
            sent; ``False``: never.
    """

    def __init__(
        self, table: Table, rank: int, transport: Transport, *, bucket: int = 256 << 20,
        incremental: Incremental = "auto",
    ) -> None:  # fmt: skip
        self.table, self.rank, self.transport, self.incremental = table, rank, transport, incremental
        self.plan = plan(table.weights, table.held, table.wanted, table.nodes.__getitem__)
        self.near = [move for move in self.plan.moves if move.source == move.target == rank]
        self.buckets = [[m for m in b if rank in (m.source, m.target)] for b in buckets(self.plan.crossing, bucket)]
        crossing = [move for bucket in self.buckets for move in bucket]
        self.outgoing = [move for move in crossing if move.source == rank]
        self.incoming = [move for move in crossing if move.target == rank]
        self.shapes = {weight.name: weight.shape for weight in table.weights}
        self.sent: dict[Key, Tensor] = {}  # copies, where they are kept
        self.version = NEVER  # of what was published last
        self.report = Report(NEVER)

    def flow(
        self, version: int, source: Parts, target: Parts | None = None, has: int = NEVER
    ) -> Iterator[tuple[str, Tensor]]:
        """One publish. Gives each weight that this rank wants when all of it is there: the tensors of ``target``, in
        place, or where that is ``None`` new whole ones (the source's own where it has them whole), for the caller to
        keep or drop. ``has``: the version that ``target`` holds now.

        The caller iterates to the end; ``report`` then says what was done.

        Raises:
            RunError: something arrived unlike it was sent, or changes are counted from a version that isn't here.
        """
        start = time.perf_counter()
        self.report = Report(version)
        with torch.no_grad():
            yield from _Passage(self, version, source, target, has).run()
        self.version = version
        self.report.seconds = time.perf_counter() - start


class _Passage:
    """One publish on its way."""

    def __init__(self, corridor: Corridor, version: int, source: Parts, target: Parts | None, has: int) -> None:
        self.c, self.version, self.source, self.target = corridor, version, source, target
        self.base = has if target is not None else corridor.version
        self.device, self.dtypes = corridor.transport.device, corridor.table.dtypes
        self.changes: dict[Key, Tensor] = {}
        self.told: dict[Move, tuple[int, Tensor]] = {}  # values on their way (or WHOLE), checksum
        self.places: dict[str, Sequence[Part]] = {}
        self.left = Counter(move.weight for move in (*corridor.near, *corridor.incoming))
        self.differences: list[Tensor] = []  # of checksums, in the order of incoming moves

    def run(self) -> Iterator[tuple[str, Tensor]]:
        self._find_changes()
        self._exchange_headers()
        yield from self._move_near()
        under_way = self._start(0)
        for number, bucket in enumerate(self.c.buckets):
            buffers, wait, began = under_way
            wait()
            self._note(bucket, buffers, time.perf_counter() - began)
            under_way = self._start(number + 1)  # travels while this one is written
            yield from self._write_bucket(bucket, buffers)
        self._compare()
        if self.c.incremental is True:
            kept = (move for move in self.c.outgoing if move.target not in self.c.table.streaming)
            keys = {(move.weight, move.box): move for move in kept}
            self.c.sent = {key: self._value(move).clone() for key, move in keys.items() if self._at_hand(key) is None}

    # -- sending ---------------------------------------------------------------------------------------------------

    def _value(self, move: Move) -> Tensor:
        """What a move carries, contiguous, in the dtype it arrives in; of a whole part of that dtype no copy."""
        part = next(part for part in self.source[move.weight] if part.has(move.box))
        return part.at(move.box).to(self.dtypes[move.weight]).contiguous()

    def _at_hand(self, key: Key) -> Tensor | None:
        """What generation holds of a box, where this rank generates, too."""
        parts = (self.target or {}).get(key[0], ())
        return next((part.at(key[1]) for part in parts if part.has(key[1])), None)

    def _find_changes(self) -> None:
        """Of boxes for which it saves bytes: the flat places of values that changed."""
        seen = set()
        for move in self.c.outgoing:
            if move.target in self.c.table.streaming:  # it keeps nothing to add to
                continue
            key = move.weight, move.box
            if self.c.incremental is False or self.base == NEVER or key in seen:
                continue
            seen.add(key)
            old = self.c.sent.get(key, self._at_hand(key))
            if old is None:
                continue
            new = self._value(move)
            places = (bits(old) != bits(new)).nonzero()[:, 0]
            if len(places) * (4 + new.element_size()) < move.bytes and new.numel() < 2**31:
                self.changes[key] = places.to(torch.int32)

    def _count(self, move: Move) -> int:
        """Values that are sent."""
        if move.target in self.c.table.streaming or (move.weight, move.box) not in self.changes:
            return WHOLE
        return len(self.changes[move.weight, move.box])

    def _exchange_headers(self) -> None:
        sends, receives = {}, {}
        for target in sorted({move.target for move in self.c.outgoing}):
            moves = [move for move in self.c.outgoing if move.target == target]
            for move in moves:
                self.told[move] = self._count(move), checksum(self._value(move)).to(self.device)
            facts = torch.tensor([self.version, self.base, *(self.told[move][0] for move in moves)])
            sends[target] = torch.cat([facts.to(self.device), torch.stack([self.told[move][1] for move in moves])])
        of = {
            source: [move for move in self.c.incoming if move.source == source]
            for source in sorted({move.source for move in self.c.incoming})
        }
        for source, moves in of.items():
            receives[source] = torch.empty(2 + 2 * len(moves), dtype=torch.int64, device=self.device)
        self.c.transport.start(sends, receives)()
        for source, moves in of.items():
            version, base, *counts = receives[source][: 2 + len(moves)].tolist()
            if version != self.version:
                raise RunError(f"rank {source} publishes version {version}, rank {self.c.rank} awaits {self.version}")
            if base != self.base and any(count != WHOLE for count in counts):
                raise RunError(
                    f"rank {self.c.rank} generates with version {self.base}, but rank {source} sends what changed "
                    f"since version {base}: an update was missed"
                )
            for move, count, total in zip(moves, counts, receives[source][2 + len(moves) :], strict=True):
                self.told[move] = count, total

    def _bytes(self, move: Move) -> int:
        """Of a move on its way: all its values, or places of 4 bytes and their values."""
        count = self.told[move][0]
        return move.bytes if count == WHOLE else padded(4 * count) + count * self.dtypes[move.weight].itemsize

    def _start(self, number: int) -> tuple[dict[tuple[int, int], Tensor], Callable[[], None], float]:
        """Pack a bucket and begin its exchange. Until its ``wait`` has returned nobody else touches its buffers."""
        bucket = self.c.buckets[number] if number < len(self.c.buckets) else []
        sizes: dict[tuple[int, int], int] = defaultdict(int)
        for move in bucket:
            sizes[move.source, move.target] += padded(self._bytes(move))
        buffers = {pair: torch.empty(n, dtype=torch.uint8, device=self.device) for pair, n in sizes.items()}
        for move, out in self._cut(bucket, buffers, sent=True):
            value, count = self._value(move), self.told[move][0]
            if count == WHOLE:
                out.copy_(as_bytes(value))
            elif count:
                places = self.changes[move.weight, move.box]
                out[: 4 * count].copy_(as_bytes(places))
                out[padded(4 * count) :].copy_(as_bytes(bits(value)[places]))
        began = time.perf_counter()
        ours = {pair: buffer for pair, buffer in buffers.items() if len(buffer)}
        sends = {target: buffer for (source, target), buffer in ours.items() if source == self.c.rank}
        receives = {source: buffer for (source, target), buffer in ours.items() if target == self.c.rank}
        return buffers, self.c.transport.start(sends, receives), began

    def _cut(
        self, bucket: Sequence[Move], buffers: dict[tuple[int, int], Tensor], *, sent: bool
    ) -> Iterator[tuple[Move, Tensor]]:
        """Moves from (or to) this rank, each with its bytes in the buffers."""
        at: dict[tuple[int, int], int] = defaultdict(int)
        for move in bucket:
            if (move.source if sent else move.target) == self.c.rank:
                pair, size = (move.source, move.target), self._bytes(move)
                yield move, buffers[pair][at[pair] : at[pair] + size]
                at[pair] += padded(size)

    # -- receiving -------------------------------------------------------------------------------------------------

    def _place(self, move: Move) -> Tensor:
        name = move.weight
        if name not in self.places:
            if self.target is not None:
                self.places[name] = self.target[name]
            else:
                new = torch.empty(self.c.shapes[name], dtype=self.dtypes[name], device=self.device)
                self.places[name] = [Part(new, whole(self.c.shapes[name]))]
        return next(part for part in self.places[name] if part.has(move.box)).at(move.box)

    def _done(self, move: Move) -> Iterator[tuple[str, Tensor]]:
        self.left[move.weight] -= 1
        if not self.left[move.weight]:
            for part in self.places.pop(move.weight):
                yield move.weight, part.tensor

    def _move_near(self) -> Iterator[tuple[str, Tensor]]:
        """What stays on this rank; of weights that come from elsewhere, too, only where they have a place already."""
        crossing = {move.weight for move in self.c.incoming}
        for move in self.c.near:
            value = self._value(move)
            if self.target is None and move.box == whole(self.c.shapes[move.weight]):
                yield move.weight, value
            elif self.target is not None or move.weight not in crossing:
                self._place(move).copy_(value)
                yield from self._done(move)

    def _write_bucket(
        self, bucket: Sequence[Move], buffers: dict[tuple[int, int], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        for move, data in self._cut(bucket, buffers, sent=False):
            if self.target is None and move.weight not in self.places:
                for near in (m for m in self.c.near if m.weight == move.weight):
                    self._place(near).copy_(self._value(near))
                    yield from self._done(near)
            place, (count, total) = self._place(move), self.told[move]
            _write(place, data, count)
            self.differences.append(checksum(place).to(total.device) - total)
            yield from self._done(move)

    def _compare(self) -> None:
        if not self.differences:
            return
        arrived = [move for bucket in self.c.buckets for move in bucket if move.target == self.c.rank]
        if wrong := torch.stack(self.differences).nonzero()[:, 0].tolist():
            move = arrived[wrong[0]]
            box = ", ".join(f"{start}:{stop}" for start, stop in move.box)
            raise RunError(
                f"{move.weight}[{box}] is not on rank {move.target} as it left rank {move.source}: "
                f"{len(wrong)} of {len(arrived)} parts have another checksum"
            )

    def _note(self, bucket: Sequence[Move], buffers: dict[tuple[int, int], Tensor], seconds: float) -> None:
        report = self.c.report
        for (source, target), buffer in buffers.items():
            moves = [move for move in bucket if (move.source, move.target) == (source, target)]
            counts = [self.told[move][0] for move in moves]
            values = sum(elements(m.box) if n == WHOLE else n for m, n in zip(moves, counts, strict=True))
            weights = tuple(dict.fromkeys(move.weight for move in moves))
            dtypes = tuple(dict.fromkeys(str(self.dtypes[name]).removeprefix("torch.") for name in weights))
            report.transfers.append(Transfer(weights, dtypes, values, len(buffer), seconds, source, target))
            report.full_bytes += sum(move.bytes for move in moves)
            if source == self.c.rank:
                report.sent_bytes += len(buffer)
                report.changed += sum(n for n in counts if n != WHOLE)
                report.compared += sum(elements(m.box) for m, n in zip(moves, counts, strict=True) if n != WHOLE)
            else:
                report.received_bytes += len(buffer)


def _write(into: Tensor, data: Tensor, count: int) -> None:
    """A move's ``data`` to its place."""
    if count == WHOLE:
        into.copy_(data.view(into.dtype).view(into.shape))
    elif count:
        places = data[: 4 * count].view(torch.int32).to(into.device, torch.int64)
        values = data[padded(4 * count) :].view(into.dtype).to(into.device)
        flat = into.contiguous().view(-1)  # the place itself, or a copy
        flat[places] = values
        if not into.is_contiguous():
            into.copy_(flat.view(into.shape))
