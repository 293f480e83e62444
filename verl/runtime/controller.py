"""The controller walks the lap. It carries small things (draws, scores, seats, metrics); columns stay on the hosts.

Ops that share a device take turns, ops on devices of their own run side by side; rewards are scored while others still
sample. The first failure ends the lap and says where it happened.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.algorithms.kl import KLController
from verl.config.errors import RunError
from verl.config.run import RunConfig
from verl.data.examples import Example, ExampleFeed
from verl.data.live import LiveFeed
from verl.data.loader import PromptFeed
from verl.dataflow.graph import Plan
from verl.dataflow.nodes import Op, Rollout
from verl.runtime.collect import Collected, Lot, Reader, Sampler
from verl.runtime.crew import ROLES, Crew, Span, located, retrieved
from verl.runtime.host import gather
from verl.runtime.load import Workers, layout_of, section_of
from verl.runtime.orders import Done, Fetch, Order, compact
from verl.seats import Seats, seat
from verl.workers.lap import merged
from verl.workers.offline import MISMATCHED

JUDGED = -2  # the "lap" of held-out rows


@dataclass
class LapResult:
    """What a lap leaves for people: metrics and the rows behind them."""

    metrics: dict[str, float | None]
    collected: Collected | None = field(repr=False)  # None where nothing is sampled


@dataclass
class Walk:
    """A lap on its way: its rows, who holds which column of them, and what the ops have told so far."""

    step: int
    kl_coef: float
    lot: Lot
    holders: dict[str, list[int]] = field(default_factory=dict)  # column -> a bit per host, for each row
    metrics: dict[str, float | None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    trained: list[bool] | None = None
    kl_per_response: float | None = None
    seats: dict[tuple[str, int], Seats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for column in self.lot.columns:
            self.holders[column] = [1 << host for host in self.lot.hosts]


class Controller:
    """Runs laps of one plan. ``step`` counts finished laps; ``state`` and ``restore`` continue exactly."""

    def __init__(self, cfg: RunConfig, plan: Plan, crew: Crew, feed: PromptFeed | ExampleFeed) -> None:
        self.cfg, self.plan, self.crew, self.feed = cfg, plan, crew, feed
        self.source: Sampler | Reader
        given: Any = feed
        if plan.node(Rollout) is not None:
            self.source = Sampler(cfg, crew, given, scored="reward_model" in crew.placement.roles)
        else:
            self.source = Reader(cfg, crew, given)
        self.kl = KLController(cfg.init_kl_coef or 0.0, cfg.kl_target, cfg.kl_horizon)
        self.step = 0
        self._failed = ""
        self._ahead: asyncio.Task[Lot] | None = None  # the next lap's rows, sampled while this one ends
        self._before_ahead: dict[str, Any] = {}  # the source's state without them

    @property
    def workers(self) -> Workers:
        """Of a run that has one host in this process."""
        return self.crew.workers

    # -- one lap ---------------------------------------------------------------------------------------------------

    async def lap(self, *, more: bool = False) -> LapResult:
        """Collect, seat, walk the stages, publish. Returns the lap's metrics.

        ``more``: another lap follows at once. Its rows are then collected as soon as the actor is published, while a
        critic on devices of its own still updates.
        """
        if self._failed and not self.crew.alone:
            raise RunError(f"{self._failed} failed, and workers may still wait for each other: resume the run")
        start = time.perf_counter()
        step = self.step + 1
        lot = await self._collect(step)
        self._failed = f"step {step}"  # until it ends well: its ops meet in collectives
        walk = Walk(step, self.kl.coef, lot, metrics=dict(lot.metrics))
        *stages, last = [stage for stage in self.plan.stages if stage.kind == "run"]
        for stage in stages:
            await gather([self._run(op, walk) for op in stage.ops])
            await self._release(walk, stage.ops)
        sampled = isinstance(self.source, Sampler)
        others = {ROLES.get(op.node.kind, op.node.kind) for op in last.ops} - {"actor"}
        apart = bool(others) and all(self.crew.placement.disjoint("rollout", role) for role in others)
        ahead = more and apart and not isinstance(self.feed, LiveFeed)  # what comes in meanwhile is for the next lap
        published = 0.0

        async def update(op: Op) -> None:
            nonlocal published
            await self._run(op, walk)
            if op.node.kind == "actor" and sampled:
                published = await self._publish(step)
                if ahead:
                    self._before_ahead = self.source.state()
                    self._ahead = asyncio.create_task(self._sample(step + 1))
                    self._ahead.add_done_callback(retrieved)

        try:
            await gather([update(op) for op in last.ops])
            if sampled and not any(op.node.kind == "actor" for op in last.ops):
                published = await self._publish(step)
        except BaseException:
            await self._give_up_ahead()
            raise
        with located(step, "end of the lap"):
            await self.crew.everywhere("finish", step)
        if walk.kl_per_response is not None:
            with located(step, "kl"):
                self.kl.update(walk.kl_per_response, len(lot))
        end = time.perf_counter()
        self.step, self._failed = step, ""
        metrics = walk.metrics | self._times(lot.collected, walk.seconds)
        if sampled:
            metrics |= {"time/publish": published, "kl/coef": walk.kl_coef, "kl/mean": walk.metrics.get("kl/mean")}
        metrics["time/step"] = end - start
        metrics["throughput/tokens_per_second"] = lot.tokens / (end - start)
        return LapResult(metrics, lot.collected)

    async def _collect(self, step: int) -> Lot:
        ahead, self._ahead = self._ahead, None
        return await (self._sample(step) if ahead is None else ahead)

    async def _sample(self, step: int) -> Lot:
        with located(step, "collecting"):
            lot = await self.source.collect(step, baseline=self.plan.has("reward.baseline"))
        lot.metrics["data/epoch"] = self.feed.epoch
        lot.metrics |= {f"data/{what}": float(n) for what, n in self.feed.counts.items() if what != "kept"}
        return lot

    async def _give_up_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)
            self._ahead = None

    async def _publish(self, step: int) -> float:
        """Seconds until every rollout samples from the weights of this lap's end."""
        ranks = sorted({*self.crew.of("actor"), *self.crew.of("rollout")})
        start = time.time()
        with located(step, "publish"):
            async with self.crew.hold(ranks):
                seconds = await self.crew.each("publish", {rank: (step,) for rank in ranks})
        for rank in ranks:
            self.crew.record(Span("publish", rank, step, start, time.time()))
        return max(seconds.values())

    async def judge(self, examples: Sequence[Example]) -> dict[str, float]:
        """Loss and metrics of held-out rows, without an update."""
        assert isinstance(self.source, Reader)
        lot = self.source.lot(examples)
        await self.crew.everywhere("finish", JUDGED)
        await self.source.place(JUDGED, lot)
        walk = Walk(JUDGED, 0.0, lot)
        actor = next(node for node in self.plan.nodes if node.kind == "actor")
        reference = next((node for node in self.plan.nodes if node.kind == "reference"), None)
        if reference is not None:
            await self._run(reference.ops["logprobs"], walk)
        before = set(walk.metrics)
        await self._run(actor.ops["fit"], walk, judge=True)
        await self.crew.everywhere("finish", JUDGED)
        return {name: v for name, v in walk.metrics.items() if name not in before and v is not None}

    # -- ops -------------------------------------------------------------------------------------------------------

    async def _run(self, op: Op, walk: Walk, *, judge: bool = False) -> None:
        """One op on all ranks of its role; columns that lie elsewhere are fetched by those that need them."""
        role = op.node.kind
        ranks = self.crew.of(role)
        with located(max(walk.step, self.step), op.label):
            orders = self._orders(op, ranks, walk, judge)
            async with self.crew.hold(list(orders)):
                done: dict[int, Done] = await self.crew.each("run", {rank: (o,) for rank, o in orders.items()})
        told = list(done.values())
        walk.seconds[op.label] = max(d.end - d.start for d in told)
        walk.metrics |= merged([d.metrics for d in told])
        for rank, d in done.items():
            self.crew.record(Span(op.label, rank, max(walk.step, 0), d.start, d.end))
        if told[0].trained is not None:
            walk.trained = told[0].trained
        if told[0].kl_per_response is not None:
            walk.kl_per_response = told[0].kl_per_response
        written: dict[str, dict[int, int]] = {}
        for rank, d in done.items():
            for fetch in orders[rank].fetch:
                for column in fetch.columns:
                    for row in fetch.rows:
                        walk.holders[column][row] |= 1 << rank
            for column in d.columns:
                bits = written.setdefault(column, {})
                for row in orders[rank].rows:
                    bits[row] = bits.get(row, 0) | 1 << rank
        for column, bits in written.items():
            holders = walk.holders.setdefault(column, [0] * len(walk.lot))
            for row, bit in bits.items():
                holders[row] = bit

    def _orders(self, op: Op, ranks: Sequence[int], walk: Walk, judge: bool) -> dict[int, Order]:
        role, lot = op.node.kind, walk.lot
        columns = tuple(c for c in dict.fromkeys((*op.reads, *op.uses, *op.keeps)) if c in walk.holders)

        def order(rank: int, rows: Sequence[int], forward: Seats | None = None, update: Seats | None = None) -> Order:
            fetch = self._fetches(rank, rows, columns, walk)
            name = "judge" if judge else op.name
            return Order(role, name, walk.step, walk.kl_coef, rows, columns, forward, update, fetch)

        if op.seats == "one":
            return {ranks[0]: order(ranks[0], range(len(lot)))}
        layout = layout_of(section_of(self.cfg, role).fsdp_config, len(ranks))
        forward = self._forward_seats(walk, layout.dp)
        update = None
        if judge:
            update = self._seat(walk.lot, lot.trained, layout.dp, passes_only=True)
        elif op.seats == "update":
            if ("update", layout.dp) not in walk.seats:
                walk.seats["update", layout.dp] = self._update_seats(walk, layout.dp)
            update = walk.seats["update", layout.dp]
        orders = {}
        for i, rank in enumerate(ranks):
            place, everything = layout.place(i).dp, range(len(lot))
            if update is None:
                mine = forward.share(place, everything)
                orders[rank] = order(rank, compact(sorted({r for micro in mine.rows(0) for r in micro})), mine)
                continue
            mine = update.share(place, everything)
            micros = mine.rows(0)
            if MISMATCHED in walk.holders:  # a row of KTO's and the partner that has its prompt go together
                partner = {lot.groups[r]: r for r in lot.untrained}
                micros = micros + [[partner[lot.groups[r]] for r in micro] for micro in micros]
            rows = compact(sorted({r for micro in micros for r in micro}))
            orders[rank] = order(rank, rows, None, mine)
        return orders

    def _fetches(self, rank: int, rows: Sequence[int], columns: Sequence[str], walk: Walk) -> tuple[Fetch, ...]:
        """What of these columns isn't on the rank yet."""
        if self.crew.alone:
            return ()
        wanted: dict[tuple[int, tuple[int, ...]], list[str]] = {}
        for column in columns:
            by_host: dict[int, list[int]] = {}
            holders = walk.holders[column]
            for row in rows:
                bits = holders[row]
                if bits and not bits >> rank & 1:
                    by_host.setdefault((bits & -bits).bit_length() - 1, []).append(row)
            if not rows:  # none of the column's rows, but its kind, dtype and inner shape
                elsewhere = (bits for bits in holders if bits and not bits >> rank & 1)
                by_host = {(bits & -bits).bit_length() - 1: [] for bits in itertools.islice(elsewhere, 1)}
            for host, missing in by_host.items():
                wanted.setdefault((host, tuple(missing)), []).append(column)
        return tuple(Fetch(host, compact(list(missing)), tuple(names)) for (host, missing), names in wanted.items())

    async def _release(self, walk: Walk, ops: Sequence[Op]) -> None:
        """Drop the columns whose last reader has run."""
        gone = [c for c, reader in self.plan.last_reader.items() if reader in ops and c in walk.holders]
        for column in gone:
            del walk.holders[column]
        if gone:
            with located(max(walk.step, self.step), "release"):
                await self.crew.everywhere("release", walk.step, gone)

    # -- seats -----------------------------------------------------------------------------------------------------

    def _forward_seats(self, walk: Walk, ranks: int) -> Seats:
        if ("forward", ranks) not in walk.seats:
            everything = range(len(walk.lot))
            walk.seats["forward", ranks] = self._seat(walk.lot, everything, ranks, passes_only=True)
        return walk.seats["forward", ranks]

    def _seat(self, lot: Lot, trained: Sequence[int], ranks: int, *, passes_only: bool) -> Seats:
        cfg, recipe = self.cfg, self.cfg.algorithm.recipe
        in_pairs = recipe.advantage is None  # the loss compares rows of a group
        return seat(
            lot.prompt_lengths, lot.response_lengths, lot.groups,
            ranks=ranks,
            mini_batch_rows=len(lot) if passes_only else cfg.mini_batch_size * len(lot) // cfg.train_batch_size,
            micro_rows=cfg.micro_batch_size,
            max_tokens=cfg.max_tokens_per_micro_batch,
            loss_tokens=lot.loss_tokens,
            skip=set(range(len(lot))) - set(trained),
            share_prompts=True,
            whole_groups=recipe.data == "pairs" or (not passes_only and in_pairs),
            epochs=1 if passes_only else cfg.algorithm.update_epochs,
            seed=cfg.seed + self.step,
        )  # fmt: skip

    def _update_seats(self, walk: Walk, ranks: int) -> Seats:
        """Rows whose loss is exactly zero are counted in every denominator but not computed."""
        algorithm, trained = self.cfg.algorithm, walk.lot.trained
        recipe = algorithm.recipe
        if walk.trained is not None:
            in_loss = algorithm.entropy_coef or (walk.kl_coef and algorithm.kl_in == "loss")
            in_loss = in_loss or recipe.loss == "kl_cov"  # its KL has a gradient whatever the advantage
            if recipe.advantage is None or not (in_loss or "critic" in self.crew.placement.roles):
                trained = [i for i in trained if walk.trained[i]]
        walk.metrics["policy/rows_trained"] = len(trained)
        lot = walk.lot
        if recipe.advantage is None and walk.trained is not None:  # rows of no pair are in no loss
            tokens = [n * k for n, k in zip(lot.loss_tokens, walk.trained, strict=True)]
            lot = dataclasses.replace(lot, loss_tokens=tokens)
        return self._seat(lot, trained, ranks, passes_only=False)

    # -- metrics ---------------------------------------------------------------------------------------------------

    def _times(self, collected: Collected | None, seconds: Mapping[str, float]) -> dict[str, float | None]:
        update = (".update", ".fit")
        times: dict[str, float | None] = {
            "time/update": sum(s for label, s in seconds.items() if label.endswith(update))
        }
        if collected is not None:
            times |= {"time/generate": collected.generate_seconds, "time/reward": collected.reward_seconds}
        return times | {f"time/{label}": s for label, s in seconds.items()}

    async def readings(self) -> dict[str, float]:
        """Memory and utilisation: of several hosts, the largest."""
        found: dict[str, float] = {}
        with located(self.step, "readings"):
            told = await self.crew.everywhere("readings")
        for readings in told.values():
            found = {name: max(value, found.get(name, value)) for name, value in (found | readings).items()}
        return found

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain JSON: with the engines' tensors, all that the next lap depends on."""
        source = self.source.state() if self._ahead is None else self._before_ahead
        return {"step": self.step, "kl": self.kl.state(), **source}

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.source.restore(state)
        self.kl.restore(state["kl"])

    async def snapshot(self, copy: bool) -> dict[str, Any]:
        """Every host notes its part of a checkpoint; what of the optimizers is plain JSON."""
        facts: dict[str, Any] = {}
        for scalars in (await self.crew.everywhere("snapshot", copy)).values():
            facts |= scalars
        return facts

    async def write(self, folder: str) -> dict[str, dict[str, int]]:
        """Every host writes what it noted; the entries of the checkpoint's manifest."""
        writing = [self.crew.each("write", {rank: (folder,)}) for rank in self.crew.ranks]
        entries: dict[str, dict[str, int]] = {}
        for written in await asyncio.gather(*writing, return_exceptions=True):  # nobody writes on behind a failure
            if isinstance(written, BaseException):
                raise written
            for part in written.values():
                entries |= part
        return entries

    async def take_back(self, folder: str, facts: dict[str, Any]) -> None:
        """The hosts continue from a checkpoint; ``restore`` comes first."""
        await self.crew.everywhere("restore", folder, facts)
        if isinstance(self.source, Sampler):
            await self._publish(self.step)
