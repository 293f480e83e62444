"""The corridor: weights from the ranks that train to the ranks that generate, bucket by bucket.

The plan is made once, when the ranks have met. A publish first exchanges a *header* per pair of ranks (version; of each
move how many of its values changed), then buckets, two at a time. A large part is a message of its own and goes from
its place to its place; small ones, and changes, are packed. What arrived is read back from its place while the next
bucket travels, and compared with the sender's checksums at the end, so a publish that ends has put every bit in its
place; one that fails leaves engines that must not generate.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from verl.config.engine import HybridConfig
from verl.config.errors import RunError
from verl.hybrid.buckets import as_bytes, bits, buckets, lanes, padded, totals, words
from verl.hybrid.reshard import Move, plan
from verl.hybrid.table import Kept, Parts, Table
from verl.hybrid.transport import Alone, Distributed, Transport
from verl.layout import Box, Part, elements, whole

Incremental = Literal["auto", True, False]
WHOLE = -1  # in a header: all of a move comes, not only what changed
NEVER = -1  # in a header: changes are counted from no version
ALONE = 1 << 20  # bytes from which a whole part is a message of its own
AHEAD = 2  # buckets on their way at once
COMPARED = 1 << 27  # values that are compared at once
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


@dataclass(frozen=True)
class _Facts:
    """Of a bucket's moves between two ranks, were they sent whole."""

    moves: tuple[Move, ...]
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    values: int
    bytes: int

    @staticmethod
    def of(moves: Sequence[Move], table: Table) -> _Facts:
        names = tuple(dict.fromkeys(move.weight for move in moves))
        dtypes = tuple(dict.fromkeys(str(table.dtypes[name]).removeprefix("torch.") for name in names))
        return _Facts(tuple(moves), names, dtypes, sum(elements(m.box) for m in moves), sum(m.bytes for m in moves))


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
        bucket: most bytes of a bucket per rank; two are on their way at a time.
        incremental: send only values that changed since the last publish, where that is fewer bytes. ``"auto"``:
            where what generation holds is at hand to compare with, and not between GPUs of one machine; ``True``:
            there, too, and elsewhere from a copy of what was sent; ``False``: never.
        checksums: compare what arrived with what was sent; the same on all ranks.
    """

    def __init__(
        self, table: Table, rank: int, transport: Transport, *, bucket: int = 256 << 20,
        incremental: Incremental = "auto", checksums: bool = True,
    ) -> None:  # fmt: skip
        self.table, self.rank, self.transport, self.incremental = table, rank, transport, incremental
        self.checksums = checksums
        self.plan = plan(table.weights, table.held, table.wanted, table.nodes.__getitem__)
        self.near = [move for move in self.plan.moves if move.source == move.target == rank]
        self.buckets = [[m for m in b if rank in (m.source, m.target)] for b in buckets(self.plan.crossing, bucket)]
        crossing = [move for bucket in self.buckets for move in bucket]
        self.outgoing = [move for move in crossing if move.source == rank]
        self.incoming = [move for move in crossing if move.target == rank]
        between = {
            (n, pair): [move for move in moves if (move.source, move.target) == pair]
            for n, moves in enumerate(self.buckets)
            for pair in {(move.source, move.target) for move in moves}
        }
        self.facts = {where: _Facts.of(moves, table) for where, moves in between.items()}
        self.views: _Views | None = None
        self.clocks: list[tuple[int, list[Any]]] = []  # the device's, of transfers by number
        self.shapes = {weight.name: weight.shape for weight in table.weights}
        self.sent: dict[Key, Tensor] = {}  # copies, where they are kept
        self.version = NEVER  # of what was published last
        self.report = Report(NEVER)

    @staticmethod
    def meet(
        source: Parts, target: Parts | None, device: torch.device, cfg: HybridConfig, *, rank: int = 0,
        group: Any = None, streams: bool = False,
    ) -> Corridor:  # fmt: skip
        """All ranks of the process group call this together, each with its own ends; without one, this is all there
        is. ``device``: where weights travel; ``streams``: as ``Table.of``."""
        table = Table.of(source, target or {}, streams, rank=rank, group=group)
        transport = Alone(device) if group is None else Distributed(group, device)
        return Corridor(table, rank, transport, bucket=cfg.bucket_mib << 20, incremental=cfg.incremental)

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
        self.report, self.clocks = Report(version), []
        with torch.no_grad():
            yield from _Passage(self, version, source, target, has).run()
        if not isinstance(source, Kept):
            self.views = None  # they hold memory
        self.version = version
        if self.transport.device.type == "cuda":
            torch.cuda.current_stream(self.transport.device).synchronize()
            self._time_transfers()
        self.report.seconds = time.perf_counter() - start

    def _time_transfers(self) -> None:
        """From the device's clock: of each bucket, from its start or the end of the one before."""
        before: Any = None
        for number, (began, ended) in self.clocks:
            seconds = began.elapsed_time(ended) / 1e3
            if before is not None:
                seconds = min(seconds, before.elapsed_time(ended) / 1e3)
            if number + 1 == len(self.clocks) or self.clocks[number + 1][1][1] is not ended:
                before = ended
            self.report.transfers[number] = replace(self.report.transfers[number], seconds=seconds)


@dataclass
class _Bucket:
    """On its way. ``sent``: moves from here and what they carry; ``whole``: moves to here that are a message of their
    own, which is the place itself where there is no tensor beside it; ``packed``: moves to here with their bytes."""

    number: int
    sent: list[tuple[Move, Tensor]] = field(default_factory=list)
    whole: list[tuple[Move, Tensor | None]] = field(default_factory=list)
    packed: list[tuple[Move, Tensor]] = field(default_factory=list)
    bytes: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    wait: Callable[[], None] = lambda: None
    began: float = 0.0
    clock: list[Any] = field(default_factory=list)  # events of the device, begin and end


class _Views:
    """What moves carry and where they go, cut out once: a look takes longer than a small part's way, so it is kept
    while the ends are the same objects (``table.Standing``). Parts that have to be converted are not among these."""

    def __init__(self, source: Parts, target: Parts | None) -> None:
        self.source, self.target = source, target
        self.values: dict[Move, Tensor] = {}
        self.places: dict[Move, Tensor] = {}
        self.bytes: dict[Move, Tensor] = {}
        self.words: dict[Move, Tensor | None] = {}

    def lanes(self, move: Move, tensor: Tensor) -> Tensor:
        if move not in self.words:
            self.words[move] = words(tensor)
        rows = self.words[move]
        return lanes(tensor) if rows is None else rows.sum(0)

    def as_bytes(self, move: Move, tensor: Tensor) -> Tensor:
        if move not in self.bytes:
            self.bytes[move] = as_bytes(tensor)
        return self.bytes[move]


class _Passage:
    """One publish on its way."""

    def __init__(self, corridor: Corridor, version: int, source: Parts, target: Parts | None, has: int) -> None:
        self.c, self.version, self.source, self.target = corridor, version, source, target
        if corridor.views is None or source is not corridor.views.source or target is not corridor.views.target:
            corridor.views = _Views(source, target)
        self.views = corridor.views
        self.base = has if target is not None else corridor.version
        self.device, self.dtypes = corridor.transport.device, corridor.table.dtypes
        self.changes: dict[Key, tuple[Tensor, Tensor]] = {}  # flat places (int32), new values as integers
        self.counts: dict[Move, int] = {}  # values on their way, of moves that are not sent whole
        self.made: dict[str, Part] = {}  # where nothing has a place
        self.left = Counter(move.weight for move in (*corridor.near, *corridor.incoming))
        self.awaited = {move.weight for move in corridor.incoming} if target is None else set()
        self.sums: dict[Key, Tensor] = {}  # of what is sent
        self.arrived: dict[Move, Tensor] = {}  # and of what came

    def run(self) -> Iterator[tuple[str, Tensor]]:
        self._find_changes()
        self._exchange_headers()
        number, near = len(self.c.buckets), self.c.near
        under_way = [self._start(n) for n in range(min(AHEAD, number))]
        if self.target is None:
            yield from self._pass_on()
        else:
            yield from self._move_near(near[: len(near) if not number else -(-len(near) // number)])
        for n in range(number):
            bucket = under_way.pop(0)
            self._end(bucket)
            if n + AHEAD < number:
                under_way.append(self._start(n + AHEAD))
            yield from self._write_bucket(bucket)
            if self.target is not None and n:
                yield from self._move_near(near[-(-n * len(near) // number) : -(-(n + 1) * len(near) // number)])
        if self.c.checksums:
            self._compare()
        if self.c.incremental is True:
            kept = (move for move in self.c.outgoing if move.target not in self.c.table.streaming)
            keys = {(move.weight, move.box): move for move in kept}
            self.c.sent = {key: self._value(move).clone() for key, move in keys.items() if self._at_hand(key) is None}

    # -- sending ---------------------------------------------------------------------------------------------------

    def _value(self, move: Move) -> Tensor:
        """What a move carries, contiguous, in the dtype it arrives in; of a whole part of that dtype no copy."""
        if (kept := self.views.values.get(move)) is not None:
            return kept
        view = _holding(move.weight, self.source[move.weight], move.box).at(move.box)
        value = view.to(self.dtypes[move.weight]).contiguous()
        if value.data_ptr() == view.data_ptr():
            self.views.values[move] = value
        return value

    def _at_hand(self, key: Key) -> Tensor | None:
        """What generation holds of a box, where this rank generates, too."""
        parts = (self.target or {}).get(key[0], ())
        return next((part.at(key[1]) for part in parts if part.has(key[1])), None)

    def _link_is_fast(self, target: int) -> bool:
        """Whether sending all is faster than finding what changed: 7B takes 40 ms beside 152 ms on two H200s."""
        return self.device.type == "cuda" and self.c.table.nodes[target] == self.c.table.nodes[self.c.rank]

    def _find_changes(self) -> None:
        """Of boxes for which it saves bytes: the flat places of values that changed."""
        if self.c.incremental is False or self.base == NEVER:
            return
        pairs: dict[Key, tuple[Tensor, Tensor]] = {}
        values = 0
        for move in self.c.outgoing:
            key = move.weight, move.box
            if key in pairs or key in self.changes or move.target in self.c.table.streaming:  # which keeps nothing
                continue
            if self.c.incremental == "auto" and self._link_is_fast(move.target):
                continue
            if (old := self.c.sent.get(key, self._at_hand(key))) is None:
                continue
            ends = bits(old), bits(self._value(move))
            if pairs and (values + old.numel() > COMPARED or ends[0].dtype != next(iter(pairs.values()))[0].dtype):
                self._compare_values(pairs)
                pairs, values = {}, 0
            pairs[key] = ends
            values += old.numel()
        if pairs:
            self._compare_values(pairs)
        for move in self.c.outgoing:
            found = self.changes.get((move.weight, move.box))
            if found is not None and move.target not in self.c.table.streaming:
                self.counts[move] = len(found[0])

    def _compare_values(self, pairs: dict[Key, tuple[Tensor, Tensor]]) -> None:
        """All of them at once: each call takes its time, and each look at a result waits for the device."""
        sizes = [len(old) for old, _ in pairs.values()]
        old, new = (torch.cat(side) for side in zip(*pairs.values(), strict=True))
        changed = (old != new).nonzero()[:, 0]
        values = new[changed]
        ends = torch.tensor(list(itertools.accumulate(sizes)), device=new.device)
        marks = torch.searchsorted(changed, ends)
        starts, counts = ends - torch.tensor(sizes, device=new.device), marks.diff(prepend=marks.new_zeros(1))
        places = (changed - starts.repeat_interleave(counts, output_size=len(changed))).to(torch.int32)
        stops = marks.tolist()
        for key, size, a, b in zip(pairs, sizes, [0, *stops[:-1]], stops, strict=True):
            if (b - a) * (4 + new.element_size()) < size * new.element_size() and size < 2**31:
                self.changes[key] = places[a:b], values[a:b]

    def _exchange_headers(self) -> None:
        sends, receives, of = {}, {}, _by_rank(self.c.incoming, "source")
        for target, moves in _by_rank(self.c.outgoing, "target").items():
            facts = [self.version, self.base, *(self.counts.get(move, WHOLE) for move in moves)]
            sends[target] = [torch.tensor(facts, device=self.device)]
        for source, moves in of.items():
            receives[source] = [torch.empty(2 + len(moves), dtype=torch.int64, device=self.device)]
        self.c.transport.start(sends, receives)()
        for source, moves in of.items():
            version, base, *counts = receives[source][0].tolist()
            if version != self.version:
                raise RunError(f"rank {source} publishes version {version}, rank {self.c.rank} awaits {self.version}")
            if base != self.base and any(count != WHOLE for count in counts):
                raise RunError(
                    f"rank {self.c.rank} generates with version {self.base}, but rank {source} sends what changed "
                    f"since version {base}: an update was missed"
                )
            self.counts |= {move: n for move, n in zip(moves, counts, strict=True) if n != WHOLE}

    def _bytes(self, move: Move) -> int:
        """Of a move on its way: all its values, or places of 4 bytes and their values."""
        count = self.counts.get(move, WHOLE)
        return move.bytes if count == WHOLE else padded(4 * count) + count * self.dtypes[move.weight].itemsize

    def _start(self, number: int) -> _Bucket:
        """Begin the exchange of a bucket. Until its ``wait`` has returned nobody else touches what is on its way."""
        now = _Bucket(number)
        sends: dict[int, list[Tensor]] = defaultdict(list)
        receives: dict[int, list[Tensor]] = defaultdict(list)
        together: dict[tuple[int, int], list[Move]] = defaultdict(list)
        for move in self.c.buckets[number]:
            pair = move.source, move.target
            now.bytes[pair] += padded(self._bytes(move))
            if move.bytes < ALONE or move in self.counts:
                together[pair].append(move)
            elif move.source == self.c.rank:
                value = self._value(move)
                now.sent.append((move, value))
                kept = move in self.views.values
                message = self.views.as_bytes(move, value) if kept else as_bytes(value)
                sends[move.target].append(message.to(self.device))
            else:
                place = self._place(move)
                if not (place.is_contiguous() and place.device == self.device):
                    message = torch.empty(move.bytes, dtype=torch.uint8, device=self.device)
                    now.whole.append((move, message))
                else:
                    message = self.views.as_bytes(move, place) if self.target is not None else as_bytes(place)
                    now.whole.append((move, None))
                receives[move.source].append(message)
        for (source, target), moves in together.items():
            sizes = [self._bytes(move) for move in moves]
            buffer = torch.empty(sum(map(padded, sizes)), dtype=torch.uint8, device=self.device)
            shares = zip(moves, buffer.split([padded(n) for n in sizes]), sizes, strict=True)
            cut = [(move, share[:n]) for move, share, n in shares]
            if source == self.c.rank:
                self._pack(cut, now)
            else:
                now.packed += cut
            if len(buffer):
                (sends[target] if source == self.c.rank else receives[source]).append(buffer)
        now.began = time.perf_counter()
        now.clock = self._tick()
        now.wait = self.c.transport.start(sends, receives)
        return now

    def _pack(self, cut: Sequence[tuple[Move, Tensor]], now: _Bucket) -> None:
        whole = []
        for move, out in cut:
            value, count = self._value(move), self.counts.get(move, WHOLE)
            now.sent.append((move, value))
            if count == WHOLE:
                whole.append((out, as_bytes(value)))
            elif count:
                places, values = self.changes[move.weight, move.box]
                whole += [(out[: 4 * count], as_bytes(places)), (out[padded(4 * count) :], as_bytes(values))]
        _copy_all(whole)

    def _tick(self) -> list[Any]:
        """The device's clock now, where it doesn't wait for what is asked of it."""
        if self.device.type != "cuda":
            return []
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return [event]

    def _end(self, bucket: _Bucket) -> None:
        bucket.wait()
        bucket.clock += self._tick()
        seconds, report = time.perf_counter() - bucket.began, self.c.report
        for pair, size in bucket.bytes.items():
            facts = self.c.facts[bucket.number, pair]
            told = [(m, n) for m in facts.moves if (n := self.counts.get(m)) is not None] if self.counts else []
            changed, compared = sum(n for _, n in told), sum(elements(m.box) for m, _ in told)
            values = facts.values - compared + changed
            report.transfers.append(Transfer(facts.names, facts.dtypes, values, size, seconds, *pair))
            if bucket.clock:
                self.c.clocks.append((len(report.transfers) - 1, bucket.clock))
            report.full_bytes += facts.bytes
            if pair[0] == self.c.rank:
                report.sent_bytes += size
                report.changed += changed
                report.compared += compared
            else:
                report.received_bytes += size

    # -- receiving -------------------------------------------------------------------------------------------------

    def _place(self, move: Move) -> Tensor:
        name = move.weight
        if self.target is None:
            if name not in self.made:
                shape = self.c.shapes[name]
                self.made[name] = Part(torch.empty(shape, dtype=self.dtypes[name], device=self.device), whole(shape))
            return self.made[name].at(move.box)
        if move not in self.views.places:
            self.views.places[move] = _holding(name, self.target[name], move.box).at(move.box)
        return self.views.places[move]

    def _done(self, move: Move) -> Iterator[tuple[str, Tensor]]:
        self.left[move.weight] -= 1
        if not self.left[move.weight]:
            parts = [self.made.pop(move.weight)] if self.target is None else self.target[move.weight]
            for part in parts:
                yield move.weight, part.tensor

    def _move_near(self, moves: Sequence[Move]) -> Iterator[tuple[str, Tensor]]:
        """What stays on this rank, to its places."""
        _copy_all([(self._place(move), self._value(move)) for move in moves])
        for move in moves:
            yield from self._done(move)

    def _pass_on(self) -> Iterator[tuple[str, Tensor]]:
        """Where nothing has a place: what is whole here. The rest of a weight waits for what comes from elsewhere."""
        for move in self.c.near:
            if move.box == whole(self.c.shapes[move.weight]):
                yield move.weight, self._value(move)
            elif move.weight not in self.awaited:
                yield from self._move_near([move])

    def _write_bucket(self, bucket: _Bucket) -> Iterator[tuple[str, Tensor]]:
        came = [move for move, _ in (*bucket.whole, *bucket.packed)]
        for name in dict.fromkeys(move.weight for move in came if move.weight in self.awaited):
            self.awaited.remove(name)
            yield from self._move_near([move for move in self.c.near if move.weight == name])
        whole = [(self._place(move), data) for move, data in bucket.whole if data is not None]
        for move, data in bucket.packed:
            place, count = self._place(move), self.counts.get(move, WHOLE)
            if count == WHOLE:
                whole.append((place, data))
            elif count:
                _write_changes(place, data, count)
        _copy_all([(place, data.view(place.dtype).view(place.shape)) for place, data in whole])
        if self.c.checksums:
            for move, value in bucket.sent:
                if (key := (move.weight, move.box)) not in self.sums:
                    kept = move in self.views.values
                    self.sums[key] = self.views.lanes(move, value) if kept else lanes(value)
            for move in came:
                place = self._place(move)
                self.arrived[move] = lanes(place) if self.target is None else self.views.lanes(move, place)
        for move in came:
            yield from self._done(move)

    def _compare(self) -> None:
        sends, receives, of = {}, {}, _by_rank(self.c.incoming, "source")
        for target, moves in _by_rank(self.c.outgoing, "target").items():
            sums = torch.stack([self.sums[move.weight, move.box] for move in moves])
            sends[target] = [totals(sums).to(self.device)]
        for source, moves in of.items():
            receives[source] = [torch.empty(len(moves), dtype=torch.int64, device=self.device)]
        self.c.transport.start(sends, receives)()
        wrong = []
        for source, moves in of.items():
            mine = totals(torch.stack([self.arrived[move] for move in moves])).to(self.device)
            wrong += [moves[i] for i in (mine != receives[source][0]).nonzero()[:, 0].tolist()]
        if wrong:
            move = wrong[0]
            box = ", ".join(f"{start}:{stop}" for start, stop in move.box)
            raise RunError(
                f"{move.weight}[{box}] is not on rank {move.target} as it left rank {move.source}: "
                f"{len(wrong)} of {len(self.arrived)} parts have another checksum"
            )


def _by_rank(moves: Sequence[Move], end: str) -> dict[int, list[Move]]:
    """Moves by the rank at one of their ends, in their order."""
    found: dict[int, list[Move]] = defaultdict(list)
    for move in moves:
        found[getattr(move, end)].append(move)
    return dict(sorted(found.items()))


def _holding(name: str, parts: Sequence[Part], box: Box) -> Part:
    for part in parts:
        if part.has(box):
            return part
    raise RunError(f"{name}: none of {len(parts)} parts here has {box}, which the plan takes from or puts on this rank")


def _copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """``into.copy_(value)`` of each pair, on a GPU by few kernels."""
    if pairs:
        into, values = zip(*pairs, strict=True)
        torch._foreach_copy_(list(into), list(values))


def _write_changes(into: Tensor, data: Tensor, count: int) -> None:
    """Changed values to their places."""
    places = data[: 4 * count].view(torch.int32).to(into.device, torch.int64)
    values = data[padded(4 * count) :].view(into.dtype).to(into.device)
    flat = into.contiguous().view(-1)  # the place itself, or a copy
    flat[places] = values
    if not into.is_contiguous():
        into.copy_(flat.view(into.shape))
