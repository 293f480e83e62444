"""Seats: which rank computes which row, in which mini- and micro-batch. Decided once per lap, from lengths alone.

A *mini-batch* is one optimizer step over all ranks; a *micro-batch* is one forward and backward on one rank. Within a
mini-batch every rank gets the same number of micro-batches (collectives need equal call counts) and, within one, the
same number of rows. The mini-batch's ``Totals`` are what every loss divides by, so the split never changes the maths.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Totals:
    """Denominators of one mini-batch over all ranks: ``tokens`` in the loss mask, ``rows`` with at least one such."""

    tokens: int
    rows: int


@dataclass(frozen=True)
class MiniBatch:
    """``ranks[r]`` lists rank r's micro-batches, each a list of row numbers, heaviest first.

    An empty micro-batch is padding: the rank runs a dummy forward and backward with zero weight, in step with the
    others. No micro-batches at all (the same on all ranks): every row was skipped, and the gradient is zero.
    """

    ranks: list[list[list[int]]]
    totals: Totals


@dataclass(frozen=True)
class Seats:
    """The lap's optimizer steps in order; with several epochs, each row sits once in every epoch."""

    mini_batches: list[MiniBatch]

    def rows(self, rank: int) -> list[list[int]]:
        """The rank's micro-batches of all mini-batches in order; what a pass without gradients walks."""
        return [micro for mini in self.mini_batches for micro in mini.ranks[rank]]

    def of(self, rank: int) -> Seats:
        """The rank's part alone."""
        return Seats([MiniBatch([mini.ranks[rank]], mini.totals) for mini in self.mini_batches])

    def among(self, rows: Sequence[int]) -> Seats:
        """For a batch that holds just ``rows``, in this order: row numbers are places there."""
        place = {row: i for i, row in enumerate(rows)}
        return Seats(
            [
                MiniBatch([[[place[row] for row in micro] for micro in rank] for rank in mini.ranks], mini.totals)
                for mini in self.mini_batches
            ]
        )


class _Unit(NamedTuple):
    """Rows that stay together: (part of) a group when the prompt is shared, else one row. ``tokens`` is its cost."""

    rows: tuple[int, ...]
    tokens: int


def seat(
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    groups: Sequence[int],
    *,
    ranks: int,
    mini_batch_rows: int,
    micro_rows: int,
    max_tokens: int | None = None,
    loss_tokens: Sequence[int] | None = None,
    skip: Collection[int] = (),
    share_prompts: bool = False,
    whole_groups: bool = False,
    epochs: int = 1,
    seed: int = 0,
) -> Seats:
    """Cut a lap's rows into mini-batches, spread each over ``ranks``, and cut every rank's share into micro-batches.

    - Mini-batches: the lap has ``ceil(B / mini_batch_rows)``; whole groups are placed in order of first appearance,
      and only groups that fit nowhere whole are divided. Later epochs take the groups in another order, a function of
      ``(seed, epoch)``.
    - Ranks: row counts differ by at most 1; tokens are balanced under that rule.
    - Micro-batches: at most ``micro_rows`` rows and ``max_tokens`` tokens. A row costs its prompt and its response;
      with ``share_prompts`` a group's rows stay together where the limits allow, and their prompt counts once.
    - ``whole_groups``: the rows of a group that aren't skipped share a micro-batch; ranks then hold equally many
      groups, give or take one, instead of rows. ``ValueError`` where a group is over a limit.
    - ``skip``: rows with zero loss weight. They are computed nowhere, but stay in the totals.
    - ``loss_tokens``: tokens of each row in the loss mask (default: the whole response), for the totals only.

    Row numbers index the given sequences (``B`` each). The same arguments give the same seats.
    ``ValueError``: sequences of different lengths, a count below 1, or a row that alone is over ``max_tokens``.
    """
    n = len(groups)
    loss_tokens = response_lengths if loss_tokens is None else loss_tokens
    if not len(prompt_lengths) == len(response_lengths) == len(loss_tokens) == n:
        raise ValueError(
            f"{len(prompt_lengths)} prompt lengths, {len(response_lengths)} response lengths, "
            f"{len(loss_tokens)} loss tokens and {n} groups don't describe the same rows"
        )
    counts = {"ranks": ranks, "mini_batch_rows": mini_batch_rows, "micro_rows": micro_rows, "epochs": epochs}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is {count}; it must be at least 1")
    skipped = frozenset(skip)
    costs = [p + r for p, r in zip(prompt_lengths, response_lengths, strict=True)]
    if max_tokens is not None:
        for i, cost in enumerate(costs):
            if cost > max_tokens and i not in skipped:
                raise ValueError(f"row {i} has {cost} tokens, over the micro-batch budget of {max_tokens}")

    def units(rows: Sequence[int]) -> list[_Unit]:
        """The rows as units within the limits, in order."""
        if not share_prompts and not whole_groups:
            return [_Unit((i,), costs[i]) for i in rows]
        found = []
        for members in _by_group(rows, groups):
            prompt = prompt_lengths[members[0]]
            if whole_groups:
                found.append(
                    _whole(members, prompt + sum(response_lengths[i] for i in members), micro_rows, max_tokens)
                )
                continue
            tokens = sum([response_lengths[i] for i in members])
            if len(members) <= micro_rows and (max_tokens is None or prompt + tokens <= max_tokens):
                found.append(_Unit(tuple(members), prompt + tokens))
                continue
            alone = [_Unit((i,), response_lengths[i]) for i in members]
            budget = None if max_tokens is None else max_tokens - prompt
            parts = _cut(alone, micro_rows, budget)
            found += [_Unit(_rows(part), prompt + _weight(part)) for part in parts]
        return found

    def mini_batch(rows: list[int]) -> MiniBatch:
        totals = Totals(sum(loss_tokens[i] for i in rows), sum(loss_tokens[i] > 0 for i in rows))
        active = [i for i in rows if i not in skipped]
        shares = [units(share) for share in _spread(units(active), units, ranks, whole_groups)]
        cut = [_cut(share, micro_rows, max_tokens) for share in shares]
        passes = max(map(len, cut))
        seated = []
        for share, micros in zip(shares, cut, strict=True):
            if len(micros) < passes:  # cut finer rather than idle beside the others
                micros = _level(share, passes, micro_rows, max_tokens) or micros
            micros = sorted(micros, key=lambda micro: (-_weight(micro), _rows(micro)))
            seated.append([list(_rows(micro)) for micro in micros] + [[]] * (passes - len(micros)))
        return MiniBatch(seated, totals)

    if whole_groups and any(len(g) > mini_batch_rows or mini_batch_rows % len(g) for g in _by_group(range(n), groups)):
        raise ValueError(f"mini-batches of {mini_batch_rows} rows would divide a group")
    mini_batches = []
    for epoch in range(epochs):
        chunks = _by_group(range(n), groups)
        if epoch:
            random.Random(f"{seed}/{epoch}").shuffle(chunks)
        mini_batches += [mini_batch(rows) for rows in _mini_batches(chunks, n, mini_batch_rows)]
    return Seats(mini_batches)


def _whole(members: list[int], tokens: int, micro_rows: int, max_tokens: int | None) -> _Unit:
    """A group that stays together."""
    if len(members) > micro_rows:
        raise ValueError(f"rows {members} belong together, but a micro-batch holds {micro_rows}")
    if max_tokens is not None and tokens > max_tokens:
        raise ValueError(f"rows {members} belong together and have {tokens} tokens, over the budget of {max_tokens}")
    return _Unit(tuple(members), tokens)


def _rows(units: Iterable[_Unit]) -> tuple[int, ...]:
    """The units' rows, units in order of their first row."""
    return tuple(row for rows in sorted(unit.rows for unit in units) for row in rows)


def _weight(units: Iterable[_Unit]) -> int:
    return sum(unit.tokens for unit in units)


def _by_group(rows: Iterable[int], groups: Sequence[int]) -> list[list[int]]:
    members: dict[int, list[int]] = {}
    for i in rows:
        members.setdefault(groups[i], []).append(i)
    return list(members.values())


def _mini_batches(chunks: list[list[int]], n: int, size: int) -> list[list[int]]:
    """First fit of whole groups into ``ceil(n / size)`` mini-batches; what fits nowhere fills the gaps."""
    bins: list[list[int]] = [[] for _ in range(0, n, size)]
    room = [min(size, n - start) for start in range(0, n, size)]
    homeless: list[int] = []
    opened = 0  # every bin before this one is full
    for chunk in chunks:
        while opened < len(bins) and not room[opened]:
            opened += 1
        home = next((b for b in range(opened, len(bins)) if room[b] >= len(chunk)), None)
        if home is None:
            homeless += chunk
        else:
            bins[home] += chunk
            room[home] -= len(chunk)
    for b, free in enumerate(room):
        bins[b] += homeless[:free]
        del homeless[:free]
    return bins


def _spread(
    units: list[_Unit], regroup: Callable[[list[int]], list[_Unit]], ranks: int, whole: bool
) -> list[list[int]]:
    """Rows of each rank: counts (of rows, or of ``whole`` units) differ by at most 1, tokens balanced.

    Longest unit first to the lightest rank with room; then swaps between the heaviest and the lightest rank.
    """
    size_of = (lambda _: 1) if whole else (lambda unit: len(unit.rows))
    share, extra = divmod(sum(map(size_of, units)), ranks)  # `extra` ranks hold one more
    held: list[list[_Unit]] = [[] for _ in range(ranks)]
    load, room = [0] * ranks, [share] * ranks
    lightest = [(0, r) for r in range(ranks)]  # heap of (load, rank)

    def give(rank: int, unit: _Unit) -> None:
        held[rank].append(unit)
        load[rank] += unit.tokens
        room[rank] -= size_of(unit)

    divided: list[_Unit] = []
    for unit in sorted(units, key=lambda u: (-u.tokens, u.rows)):
        size, passed = size_of(unit), []
        while lightest:
            rank = heapq.heappop(lightest)[1]
            if size <= room[rank] + (extra > 0 and room[rank] >= 0):
                give(rank, unit)
                extra -= room[rank] < 0
                passed.append(rank)
                break
            if room[rank] > 0 or (extra and room[rank] == 0):  # else it is full for good
                passed.append(rank)
        else:
            divided.append(unit)
        for rank in passed:
            heapq.heappush(lightest, (load[rank], rank))
    for unit in divided:  # a group no rank can take whole: the fewest parts, largest gap first
        rows = list(unit.rows)
        while rows:
            rank = min(range(ranks), key=lambda r: (-room[r], load[r]))
            size = max(room[rank], 1)
            give(rank, _Unit(tuple(rows[:size]), _weight(regroup(rows[:size]))))
            del rows[:size]
    _refine(held, load)
    return [sorted(row for unit in mine for row in unit.rows) for mine in held]


def _refine(held: list[list[_Unit]], load: list[int], rounds: int = 100) -> None:
    """Swap units of equal size between the heaviest and the lightest rank while that brings them closer."""
    for _ in range(rounds):
        heavy, light = load.index(max(load)), load.index(min(load))
        gap = load[heavy] - load[light]
        small = sorted(range(len(held[light])), key=lambda j: held[light][j].tokens)
        weights = [held[light][j].tokens for j in small]
        best: tuple[int, int, int] | None = None  # (gap after the swap, position in heavy, position in light)
        for i, unit in enumerate(held[heavy]):
            near = bisect_left(weights, unit.tokens - gap / 2)
            for j in small[max(near - 1, 0) : near + 1]:
                after = abs(gap - 2 * (unit.tokens - held[light][j].tokens))
                if len(held[light][j].rows) == len(unit.rows) and (best is None or (after, i, j) < best):
                    best = (after, i, j)
        if best is None or best[0] >= gap:
            return
        _, i, j = best
        moved = held[heavy][i].tokens - held[light][j].tokens
        held[heavy][i], held[light][j] = held[light][j], held[heavy][i]
        load[heavy] -= moved
        load[light] += moved


def _cut(units: list[_Unit], max_rows: int, max_tokens: int | None) -> list[list[_Unit]]:
    """Few micro-batches within both limits, of about equal weight. Every unit must fit on its own."""
    total = _weight(units)
    budget = total if max_tokens is None else max_tokens
    if total <= budget and sum(len(unit.rows) for unit in units) <= max_rows:
        return [units] if units else []
    bins: list[list[_Unit]] = []
    rows_left: list[int] = []
    open_bins: list[tuple[int, int]] = []  # (tokens left, bin), sorted: best fit is the first with room
    share = {unit.rows: max(len(unit.rows) / max_rows, unit.tokens / max(budget, 1)) for unit in units}
    for unit in sorted(units, key=lambda u: (-share[u.rows], -u.tokens, u.rows)):
        at = bisect_left(open_bins, (unit.tokens, -1))
        while at < len(open_bins) and rows_left[open_bins[at][1]] < len(unit.rows):
            at += 1
        if at < len(open_bins):
            left, home = open_bins.pop(at)
        else:
            left, home = budget, len(bins)
            bins.append([])
            rows_left.append(max_rows)
        bins[home].append(unit)
        rows_left[home] -= len(unit.rows)
        if rows_left[home]:
            insort(open_bins, (left - unit.tokens, home))
    return _level(units, len(bins), max_rows, max_tokens) or bins


def _level(units: list[_Unit], count: int, max_rows: int, max_tokens: int | None) -> list[list[_Unit]] | None:
    """``count`` micro-batches (or one per unit) of about equal weight; ``None`` if the limits are in the way."""
    bins: list[list[_Unit]] = [[] for _ in range(min(count, len(units)))]
    rows_left = [max_rows] * len(bins)
    lightest = [(0, b) for b in range(len(bins))]
    for unit in sorted(units, key=lambda u: (-u.tokens, u.rows)):
        passed = []
        while lightest:
            weight, b = heapq.heappop(lightest)
            if max_tokens is not None and weight + unit.tokens > max_tokens:
                return None
            if rows_left[b] >= len(unit.rows):
                bins[b].append(unit)
                rows_left[b] -= len(unit.rows)
                passed.append((weight + unit.tokens, b))
                break
            if rows_left[b]:
                passed.append((weight, b))
        else:
            return None
        for entry in passed:
            heapq.heappush(lightest, entry)
    return bins
