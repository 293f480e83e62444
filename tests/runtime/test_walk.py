"""Who holds which column of which row, beside a plain account of it; and what the account costs."""

from __future__ import annotations

import random
import time

from verl.runtime.collect import Lot
from verl.runtime.controller import Walk
from verl.runtime.orders import Fetch, Order

COLUMNS = ("a", "b", "c")


def lot(hosts: list[int]) -> Lot:
    n = len(hosts)
    return Lot([1] * n, [1] * n, [0] * n, [1] * n, COLUMNS, hosts, {})


def order(fetches: list[Fetch]) -> Order:
    return Order("actor", "update", 1, 0.0, COLUMNS, fetch=tuple(fetches))


def test_what_was_fetched_and_written_is_known() -> None:
    draw = random.Random(0)
    for _ in range(50):
        ranks, n = draw.randint(1, 4), draw.randint(1, 9)
        hosts = [draw.randrange(ranks) for _ in range(n)]
        walk, plain = Walk(1, 0.0, lot(hosts)), {c: [{h} for h in hosts] for c in COLUMNS}
        for _ in range(4):
            orders = {}
            for rank in range(ranks):
                rows, names = draw.sample(range(n), draw.randint(0, n)), draw.sample(COLUMNS, draw.randint(1, 3))
                orders[rank] = order([Fetch(0, rows, tuple(names))])
                for name in names:
                    for row in rows:
                        plain[name][row].add(rank)
            walk.fetched(orders)
            writes = {rank: draw.sample((*COLUMNS, "new"), draw.randint(0, 4)) for rank in range(ranks)}
            mine = {rank: draw.sample(range(n), draw.randint(0, n)) for rank in range(ranks)}
            for name in {name for names in writes.values() for name in names}:
                kept = plain.setdefault(name, [set() for _ in range(n)])
                for row in range(n):
                    if found := {rank for rank in range(ranks) if name in writes[rank] and row in mine[rank]}:
                        kept[row] = found
            walk.written(mine, writes)
            told = {
                c: [{r for r in range(ranks) if bits >> r & 1} for bits in rows] for c, rows in walk.holders.items()
            }
            assert told == plain


def test_many_hosts_are_no_burden() -> None:
    """Each of 64 hosts fetches from all others: the controller answers nobody meanwhile."""
    ranks, n = 64, 8192
    walk = Walk(1, 0.0, lot([row * ranks // n for row in range(n)]))
    orders = {
        rank: order(
            [Fetch(host, range(host * 128 + 2 * rank, host * 128 + 2 * rank + 2), COLUMNS) for host in range(64)]
        )
        for rank in range(ranks)
    }
    start = time.process_time()
    walk.fetched(orders)
    assert time.process_time() - start < 1  # 0.02; a walk over all rows for each fetch took 9
    assert all(bits.bit_count() <= 2 for bits in walk.holders["a"]) and walk.holders["a"] is walk.holders["c"]
