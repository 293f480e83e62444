"""The controller walks the lap. It carries small things (draws, scores, seats, metrics); columns stay on the hosts.

Ops that share a device take turns, ops on devices of their own run side by side; rewards are scored while others still
sample. The first failure ends the lap and says where it happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import time
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.algorithms.kl import KLController
from verl.config.errors import DataError, RunError
from verl.config.run import RunConfig
from verl.data.examples import Example, ExampleFeed
from verl.data.feeds import Stopped
from verl.data.live import LiveFeed
from verl.data.loader import PromptFeed
from verl.dataflow.graph import Plan
from verl.dataflow.nodes import Op, Rollout
from verl.hybrid.publish import Report, Transfer
from verl.metrics.readings import GIB
from verl.runtime.collect import Collected, Lot, Reader, Sampler
from verl.runtime.crew import ROLES, Crew, Span, located, retrieved
from verl.runtime.host import gather
from verl.runtime.load import Workers, layout_of, section_of
from verl.runtime.orders import Done, Fetch, Order, Shown, compact
from verl.runtime.publish import table_of
from verl.seats import Seats, seat
from verl.workers.lap import merged
from verl.workers.offline import MISMATCHED

log = logging.getLogger(__name__)
DEBUG = os.environ.get("VERL_DEBUG") == "1"
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
    holders: dict[str, tuple[int, ...]] = field(default_factory=dict)  # column -> a bit per host, for each row
    metrics: dict[str, float | None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    trained: list[bool] | None = None
    kl_per_response: float | None = None
    seats: dict[tuple[str, int], Seats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.holders = dict.fromkeys(self.lot.columns, tuple(1 << host for host in self.lot.hosts))

    def fetched(self, orders: Mapping[int, Order]) -> None:
        """The hosts of these orders have what they fetched, too."""
        news: dict[str, list[tuple[int, Sequence[int]]]] = {}
        for rank, order in orders.items():
            for fetch in order.fetch:
                for column in fetch.columns:
                    news.setdefault(column, []).append((rank, fetch.rows))
        made: dict[Any, tuple[int, ...]] = {}  # columns that lie alike share a tuple, and are looked at once
        for column, parts in news.items():
            alike = id(self.holders[column]), *((rank, id(rows)) for rank, rows in parts)
            if alike not in made:
                holders = list(self.holders[column])
                for rank, rows in parts:
                    for row in rows:
                        holders[row] |= 1 << rank
                made[alike] = tuple(holders)
            self.holders[column] = made[alike]

    def written(self, rows: Mapping[int, Sequence[int]], columns: Mapping[int, Sequence[str]]) -> None:
        """Hosts wrote ``columns`` of ``rows``, both by rank: what lay elsewhere under these names counts no more."""
        writers: dict[str, tuple[int, ...]] = {}
        for rank, names in columns.items():
            for name in names:
                writers[name] = (*writers.get(name, ()), rank)
        made: dict[Any, tuple[int, ...]] = {}
        for name, ranks in writers.items():
            old = self.holders.get(name)
            if (id(old), ranks) not in made:
                bits: dict[int, int] = {}
                for rank in ranks:
                    for row in rows[rank]:
                        bits[row] = bits.get(row, 0) | 1 << rank
                holders = list(old or (0,) * len(self.lot))
                for row, bit in bits.items():
                    holders[row] = bit
                made[id(old), ranks] = tuple(holders)
            self.holders[name] = made[id(old), ranks]


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
        self.published = 0  # the lap whose weights rollouts sample from
        self.failed = ""  # what is under way on the workers, or ended badly there
        self._ahead: asyncio.Task[Lot] | None = None  # the next lap's rows, sampled while this one ends
        self._before_ahead: dict[str, Any] = {}  # the source's state without them

    @property
    def workers(self) -> Workers:
        """Of a run that has one host in this process."""
        return self.crew.workers

    # -- one lap ---------------------------------------------------------------------------------------------------

    async def lap(self, *, more: bool = False, fresh: bool = False) -> LapResult:
        """Collect, seat, walk the stages, publish. Returns the lap's metrics.

        ``more``: another lap follows at once. Its rows are then collected while this lap trains, where they may be so
        stale; else as soon as the actor is published, while a critic on devices of its own still updates.
        ``fresh``: publish even where the interval isn't over.
        """
        if self.failed and not self.crew.alone:
            raise RunError(f"{self.failed} failed, and workers may still wait for each other: resume the run")
        start = time.perf_counter()
        step = self.step + 1
        lot = await self._collect(step)
        self.failed = f"step {step}"  # until it ends well: its ops meet in collectives
        walk = Walk(step, self.kl.coef, lot, metrics=dict(lot.metrics))
        *stages, last = [stage for stage in self.plan.stages if stage.kind == "run"]
        due = isinstance(self.source, Sampler) and (fresh or step % self.cfg.hybrid_config.reshard_interval == 0)
        more = more and isinstance(self.source, Sampler) and not isinstance(self.feed, LiveFeed)  # it waits for rows
        in_updates = more and due and self._apart(last.ops, but={"actor"})

        async def update(op: Op) -> None:
            await self._run(op, walk)
            if op.node.kind == "actor" and due:
                walk.metrics |= await self._publish(step)
                if in_updates and self._ahead is None:
                    self._go_ahead(step + 1)

        try:
            beside = self.cfg.max_staleness >= self.cfg.hybrid_config.reshard_interval
            if more and beside and self._apart([op for stage in (*stages, last) for op in stage.ops]):
                self._go_ahead(step + 1)
            for stage in stages:
                await gather([self._run(op, walk) for op in stage.ops])
                await self._release(walk, stage.ops)
            await gather([update(op) for op in last.ops])
            if due and not any(op.node.kind == "actor" for op in last.ops):
                walk.metrics |= await self._publish(step)
        except BaseException:
            await self._give_up_ahead()
            raise
        with located(step, "end of the lap"):
            if any(walk.metrics.get(f"{family}/bad_steps") for family in ("policy", "critic", "process_reward")):
                await self._show_all(walk)
            await self.crew.everywhere("finish", step)
        if walk.kl_per_response is not None:
            with located(step, "kl"):
                self.kl.update(walk.kl_per_response, len(lot))
        end = time.perf_counter()
        self.step, self.failed = step, ""
        metrics = walk.metrics | self._times(lot.collected, walk.seconds)
        if isinstance(self.source, Sampler):
            unpublished: dict[str, float | None] = {"time/publish": 0.0, "publish/bytes": 0.0}
            metrics = unpublished | metrics
            metrics |= {"kl/coef": walk.kl_coef, "kl/mean": walk.metrics.get("kl/mean")}
        metrics["time/step"] = end - start
        metrics["throughput/tokens_per_second"] = lot.tokens / (end - start)
        return LapResult(metrics, lot.collected)

    async def _show_all(self, walk: Walk) -> None:
        """Tell the tokens of all sampled rows, so that people can look at what made the optimizer skip a step."""
        collected, hosts = walk.lot.collected, walk.lot.hosts
        if collected is None or "response_ids" not in walk.holders:
            return
        by_host = {host: [i for i, other in enumerate(hosts) if other == host] for host in set(hosts)}
        calls = {host: (walk.step, rows, ("response_ids",)) for host, rows in by_host.items()}
        for host, batch in (await self.crew.each("give", calls)).items():
            for i, ids in zip(by_host[host], batch.ragged("response_ids").rows(), strict=True):
                collected.shown.setdefault(i, Shown(array("i", ids.tolist()), array("f")))

    async def _collect(self, step: int) -> Lot:
        ahead, self._ahead = self._ahead, None
        return await (self._sample(step) if ahead is None else ahead)

    def _apart(self, ops: Sequence[Op], but: Collection[str] = ()) -> bool:
        """Whether these ops, and there are some, run on other devices than rollouts do."""
        roles = {ROLES.get(op.node.kind, op.node.kind) for op in ops} - set(but)
        return bool(roles) and all(self.crew.placement.disjoint("rollout", role) for role in roles)

    def _go_ahead(self, step: int) -> None:
        """Begin to sample a lap's rows."""
        self._before_ahead = self.source.state()
        self._ahead = asyncio.create_task(self._sample(step))
        self._ahead.add_done_callback(retrieved)

    async def _sample(self, step: int) -> Lot:
        before, position = self.published, self.source.state()
        with located(step, "collecting"):
            try:
                lot = await self.source.collect(step, baseline=self.plan.has("reward.baseline"))
            except (Stopped, DataError):  # as if the lap had never begun
                self.source.restore(position)
                raise
            self._check_versions(lot, step, before)
        lot.metrics["data/epoch"] = self.feed.epoch
        lot.metrics |= {f"data/{what}": float(n) for what, n in self.feed.counts.items() if what != "kept"}
        return lot

    def _check_versions(self, lot: Lot, step: int, before: int) -> None:
        """Whether the rows were sampled from what was published meanwhile, and not before what staleness allows."""
        if lot.collected is None:
            return
        oldest = max(before, step - 1 - self.cfg.max_staleness)
        for row in lot.collected.rows:
            if not oldest <= row.version <= self.published:
                raise RunError(
                    f"worker {row.host} sampled prompt {row.draw.prompt.id} with weights of version {row.version}; "
                    f"version {self.published} was published"
                )
        if self.cfg.max_staleness:
            stale = [step - 1 - row.version for row in lot.collected.rows]
            lot.metrics["rollout/staleness"] = sum(stale) / len(stale)

    async def stop_sampling(self) -> None:
        """A lap whose rows are still sampled raises ``Stopped``, as if it had never begun; one that trains goes on."""
        with contextlib.suppress(Exception):  # a host that is lost is told of by those who wait for it
            await self.crew.everywhere("stop_sampling")

    async def _give_up_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)
            self._ahead = None

    async def begin(self) -> None:
        """Before the first lap: engines that have no weights yet get the start's."""
        if isinstance(self.source, Sampler) and self.cfg.rollout.outside:
            await self._publish(self.step)

    async def publish(self) -> None:
        """Rollouts sample from the newest weights, where the interval left them older ones."""
        if self.published != self.step:
            await self._publish(self.step)

    async def _publish(self, step: int) -> dict[str, float | None]:
        """Every rollout samples from the weights of this lap's end; what it took."""
        if self._ahead is not None:  # all rows of a lap are sampled from one version
            await asyncio.wait([self._ahead])
        ranks = sorted({*self.crew.of("actor"), *self.crew.of("rollout")})
        start, failed = time.time(), self.failed
        self.failed = f"publish {step}"
        with located(step, "publish"):
            async with self.crew.hold(sorted({*ranks, *self.crew.placement.reach("rollout")})):
                reports: dict[int, Report] = await self.crew.each("publish", {rank: (step, DEBUG) for rank in ranks})
        self.published, self.failed = step, failed
        for rank in ranks:
            self.crew.record(Span("publish", rank, step, start, time.time()))
        self._tell([t for rank, r in reports.items() for t in r.transfers if t.target == rank], f"publish {step}")
        told = list(reports.values())
        metrics: dict[str, float | None] = {"time/publish": max(r.seconds for r in told)}
        metrics["publish/bytes"] = float(sum(r.received_bytes for r in told))
        if compared := sum(r.compared for r in told):
            metrics["publish/changed"] = sum(r.changed for r in told) / compared
        return metrics

    @staticmethod
    def _tell(transfers: list[Transfer], during: str) -> None:
        """With VERL_DEBUG=1, what went from host to host."""
        if DEBUG and transfers:
            log.info("%s:\n%s", during, table_of(transfers))

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
        told = {name: v for name, v in walk.metrics.items() if name not in before | {"columns/bytes"} and v is not None}
        return told

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
        fetched = [transfer for d in told for transfer in d.fetched]
        self._tell(fetched, f"step {walk.step}, {op.label}")
        walk.metrics["columns/bytes"] = (walk.metrics.get("columns/bytes") or 0.0) + sum(t.bytes for t in fetched)
        walk.seconds["columns"] = walk.seconds.get("columns", 0.0) + max(d.waited for d in told)
        walk.seconds[op.label] = max(d.end - d.start for d in told)
        walk.metrics |= merged([d.metrics for d in told])
        for rank, d in done.items():
            self.crew.record(Span(op.label, rank, max(walk.step, 0), d.start, d.end))
        if told[0].trained is not None:
            walk.trained = told[0].trained
        if told[0].kl_per_response is not None:
            walk.kl_per_response = told[0].kl_per_response
        walk.fetched(orders)
        walk.written(
            {rank: order.rows for rank, order in orders.items()}, {rank: d.columns for rank, d in done.items()}
        )

    def _orders(self, op: Op, ranks: Sequence[int], walk: Walk, judge: bool) -> dict[int, Order]:
        role, lot = op.node.kind, walk.lot
        columns = tuple(c for c in dict.fromkeys((*op.reads, *op.uses, *op.keeps)) if c in walk.holders)

        def order(rank: int, forward: Seats | None, update: Seats | None, others: Sequence[int] = ()) -> Order:
            name = "judge" if judge else op.name
            asked = Order(role, name, walk.step, walk.kl_coef, columns, forward, update, others)
            if self.cfg.hybrid_engine:
                fetch = self._fetches(rank, asked.rows, columns, walk)
            else:  # the plain way, to compare: everything that there is, everywhere
                fetch = self._fetches(rank, range(len(lot)), tuple(walk.holders), walk)
            return dataclasses.replace(asked, fetch=fetch)

        if op.seats == "one":
            return {ranks[0]: order(ranks[0], None, None, range(len(lot)))}
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
            place = layout.place(i).dp
            if update is None:
                orders[rank] = order(rank, forward.of(place), None)
                continue
            mine, partners = update.of(place), []
            if MISMATCHED in walk.holders:  # a row of KTO's and the partner that has its prompt go together
                partner = {lot.groups[r]: r for r in lot.untrained}
                partners = [partner[lot.groups[r]] for micro in mine.rows(0) for r in micro]
            orders[rank] = order(rank, None, mine, partners)
        return orders

    def _fetches(self, rank: int, rows: Sequence[int], columns: Sequence[str], walk: Walk) -> tuple[Fetch, ...]:
        """What of these columns isn't on the rank yet."""
        if self.crew.alone:
            return ()
        wanted: dict[tuple[int, tuple[int, ...]], list[str]] = {}
        alike: dict[int, list[str]] = {}
        for column in columns:
            alike.setdefault(id(walk.holders[column]), []).append(column)
        for names in alike.values():
            holders = walk.holders[names[0]]
            by_host: dict[int, list[int]] = {}
            for row in rows:
                bits = holders[row]
                if bits and not bits >> rank & 1:
                    by_host.setdefault((bits & -bits).bit_length() - 1, []).append(row)
            if not rows:  # none of the column's rows, but its kind, dtype and inner shape
                elsewhere = (bits for bits in holders if bits and not bits >> rank & 1)
                by_host = {(bits & -bits).bit_length() - 1: [] for bits in itertools.islice(elsewhere, 1)}
            for host, missing in by_host.items():
                wanted.setdefault((host, tuple(missing)), []).extend(names)
        return tuple(Fetch(host, compact(list(missing)), tuple(found)) for (host, missing), found in wanted.items())

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
        self.step = self.published = state["step"]
        self.source.restore(state)
        self.kl.restore(state["kl"])

    async def make_room(self, whole: bool) -> str:
        """Every host gets memory for the copies of ``snapshot``, while training goes on; or on which machine there is
        too little for them, and nothing is done."""
        needed: Counter[str] = Counter()
        free: dict[str, int | None] = {}
        for rank, (size, left) in (await self.crew.everywhere("room_needed", whole)).items():
            machine = self.crew.group.places[rank].node
            needed[machine] += size
            free[machine] = left
        for machine, size in needed.items():
            if (left := free[machine]) is not None and size > left:
                return f"copies of {size / GIB:.3g} GiB don't fit into the {left / GIB:.3g} GiB free on {machine}"
        await self.crew.everywhere("make_room")
        return ""

    async def snapshot(self, copy: bool, whole: bool) -> dict[str, Any]:
        """Every host notes its part of a checkpoint; what of the optimizers is plain JSON."""
        facts: dict[str, Any] = {}
        for scalars in (await self.crew.everywhere("snapshot", copy, whole)).values():
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
