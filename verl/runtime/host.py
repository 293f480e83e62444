"""A host: all nodes that are placed on one device, and the rows that lie there.

One process has one host. The controller calls its methods by name (``cluster/group.py``); each call has a thread of its
own, and whatever computes takes turns on the host's one compute thread. Where a role spans hosts, the controller calls
all of them together.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from verl.batch import Batch, Ragged
from verl.checkpoint.export import model_files
from verl.checkpoint.parts import write_parts
from verl.checkpoint.snapshot import Room, snapshot
from verl.checkpoint.store import Checkpoint
from verl.checkpoint.tensorfile import Pieces
from verl.cluster.group import Context
from verl.cluster.shelf import Shelf
from verl.config.errors import RequestError, RunError
from verl.config.load import memory_advice
from verl.config.run import RunConfig
from verl.data.feeds import Stopped
from verl.data.loader import PromptDataset
from verl.dataflow.placement import Placement
from verl.hybrid.publish import Report, Transfer
from verl.layout import Piece
from verl.metrics.readings import UtilisationMeter, free_memory, memory_readings
from verl.models.factory import load_tokenizer
from verl.rewards.base import Scores
from verl.runtime.data import training_prompts
from verl.runtime.load import Registered, Workers, load, register
from verl.runtime.orders import POOL, Accept, Ask, Done, Fetch, Order, Put, Sampled, Shown, mark_of, transfer_of
from verl.workers.lap import Lap
from verl.workers.rollout import Draw, Row, reward_row

T = TypeVar("T")
FETCHES = 8  # hosts from which columns are brought at the same time
SAMPLED = (  # columns of the pool; chosen: which of the response's tokens the policy sampled
    "draw", "response_ids", "sampled_logprobs", "chosen", "finish_reason", "version", "text", "messages",
)  # fmt: skip


def make_host(
    context: Context, cfg: RunConfig, placement: Placement, tokenizer: PreTrainedTokenizerBase | None,
    own: Registered = (),
) -> Host:  # fmt: skip
    """A worker's factory; nothing is loaded before ``load``. ``own``: the algorithm, which a script may have added."""
    register(own)
    return Host(context, cfg, placement, tokenizer)


class Host:
    """See the module. ``tokenizer``: the actor's where it is at hand already."""

    def __init__(
        self, context: Context, cfg: RunConfig, placement: Placement, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        self.context, self.cfg, self.placement, self._tokenizer = context, cfg, placement, tokenizer
        self.device = torch.device(context.device.partition(":")[0] if "cpu" in context.device else context.device)
        self.where = str(self.device) if context.size == 1 else f"{self.device} (worker {context.rank})"
        self.workers: Workers | None = None
        self._laps: dict[int, Shelf] = {POOL: Shelf()}
        self._unwritten: tuple[dict[str, Any], dict[str, Any]] = ({}, {})  # a checkpoint's parts and files
        self._sizes: dict[str, dict[str, int]] = {}  # bytes of its parts' tensors
        self._rooms: dict[str, Room] = {}  # for copies of them
        self._utilisation = UtilisationMeter(self.device)
        self._fetches = ThreadPoolExecutor(FETCHES, thread_name_prefix="verl-fetch")
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="verl-host", daemon=True)
        self._thread.start()

    # -- set up ----------------------------------------------------------------------------------------------------

    def load(self, laps: int) -> None:
        """Models and engines of this host's roles. ``laps``: of the whole run, for learning-rate schedules."""
        actor = self.cfg.actor_model_config
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(actor.model_name_or_path, actor.trust_remote_code)
        self.workers = load(self.cfg, self.placement, self.context, self._tokenizer, self.device, laps)

    def check_rewards(self, columns: Collection[str]) -> None:
        """Whether the data's columns fill the reward functions' arguments."""
        if self._ready.rewards is not None:
            self._ready.rewards.check(columns)

    @property
    def _ready(self) -> Workers:
        if self.workers is None:
            raise RuntimeError("load comes first")
        return self.workers

    # -- rows ------------------------------------------------------------------------------------------------------

    def put(self, put: Put) -> None:
        self._shelf(put.step).put(put.rows, put.batch)

    def give(self, step: int, rows: Sequence[int], columns: Sequence[str]) -> Batch:
        """Columns of rows that lie here, for another host."""
        return self._shelf(step).batch(rows, columns)

    def release(self, step: int, columns: Sequence[str]) -> None:
        """Nobody reads these columns any more."""
        self._shelf(step).release(columns)

    def finish(self, step: int) -> None:
        """The lap is over: its rows go."""
        self._laps.pop(step, None)

    def _shelf(self, step: int) -> Shelf:
        return self._laps.setdefault(step, Shelf())

    # -- sampling --------------------------------------------------------------------------------------------------

    def generate(self, ask: Ask) -> Sampled:
        """Sample, and score where that is asked for; the rows stay here, in the pool."""
        work = self._generate(ask)
        return self._await(self._unless_stopped(work) if ask.stops else work)

    def stop_sampling(self) -> None:
        """What samples for a lap raises ``Stopped``, now and from now on."""
        self._loop.call_soon_threadsafe(self._stopping.set)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Stopped
        finally:
            stop.cancel()
            task.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    def _draws(self, told: Sequence[Draw] | tuple[list[int], list[int], int]) -> Sequence[Draw]:
        if not isinstance(told, tuple):
            return told
        assert self._tokenizer is not None
        numbers, rows, mark = told
        limits: Any = {"max_prompt_length": self.cfg.max_prompt_length, "overlong": self.cfg.overlong}
        prompts = self._data.chosen(rows, self._tokenizer, **limits)
        draws = [Draw(number, prompt) for number, prompt in zip(numbers, prompts, strict=True)]
        if mark_of(draws) != mark:
            raise RunError(
                f"rows {', '.join(map(str, rows[:4]))}{', ...' * (len(rows) > 4)} of the training data are others here "
                "than where the run was started: every worker must read the same data, unchanged while the run lasts"
            )
        return draws

    @cached_property
    def _data(self) -> PromptDataset:
        return training_prompts(self.cfg)

    async def _generate(self, ask: Ask) -> Sampled:
        start, rollout, rewards = time.perf_counter(), self._ready.rollout, self._ready.rewards
        assert rollout is not None
        await asyncio.to_thread(self._compute, rollout.engine.wake)
        drawn = await asyncio.to_thread(self._draws, ask.draws)
        has_model = rewards is not None and rewards.has_model
        number = {draw.id: ask.first + i * ask.n for i, draw in enumerate(drawn)}
        rows: dict[int, Row] = {}
        facts: dict[int, _Fact] = {}
        parts: list[tuple[list[int], asyncio.Task[Scores | None]]] = []

        async def finish(part: list[int]) -> Scores | None:
            """Rows enter the pool, and only their facts stay here. A reward model waits: it shares the device."""
            done = {i: rows.pop(i) for i in part}
            await asyncio.to_thread(self._pool_rows, done)
            facts.update((i, _fact(row)) for i, row in done.items())
            return await asyncio.to_thread(self.score, part) if ask.score and not has_model else None

        async def feed(draws: Sequence) -> None:
            groups: dict[str, list[int]] = {}
            with self._located("rollout.generate"):
                async for row in rollout.generate(draws, ask.n, ask.sampling):
                    place = number[row.draw.id] + row.sample
                    rows[place] = row
                    group = groups.setdefault(row.draw.id, [])
                    group.append(place)
                    if len(group) == ask.n:  # while others are still sampled
                        parts.append((group, tasks.create_task(finish(group))))

        n, feeders = len(drawn), ask.feeders
        shares = [drawn[k * n // feeders : (k + 1) * n // feeders] for k in range(feeders)]
        async with together() as tasks:  # a reward that fails ends the sampling, too
            await gather([feed(share) for share in shares if share])
            generated = time.perf_counter()
        places = sorted(facts)
        scores = None
        if ask.score and has_model:
            scores = await asyncio.to_thread(self.score, places)
        elif ask.score:
            order = [place for part, _ in parts for place in part]
            scores = Scores.merge([s for _, task in parts if (s := task.result()) is not None])
            scores = scores.select(sorted(range(len(order)), key=order.__getitem__))
        told = _Fact(*map(list, zip(*(facts[place] for place in places), strict=True)))
        return Sampled(
            lengths=told.length,
            sampled=told.length if told.sampled == told.length else told.sampled,  # the same list twice travels once
            turns=told.turns,
            finish_reasons=told.finish_reason,
            versions=told.version,
            seconds=array("f", told.seconds),
            logprobs=array("f", told.logprobs),
            scores=scores,
            generate_seconds=generated - start,
            reward_seconds=time.perf_counter() - generated,
        )

    def _pool_rows(self, rows: dict[int, Row]) -> None:
        """Pack once: the rows' columns as they were sampled, and their text."""
        assert self._tokenizer is not None
        batch = Batch([row.id for row in rows.values()])
        responses = [row.response for row in rows.values()]
        batch["draw"] = [row.draw for row in rows.values()]
        batch["response_ids"] = Ragged.from_rows([r.ids for r in responses], torch.int64)
        batch["sampled_logprobs"] = Ragged.from_rows([r.logprobs for r in responses], torch.float32)
        batch["chosen"] = Ragged.from_rows([_mask(row) for row in rows.values()], torch.bool)
        batch["finish_reason"] = [r.finish_reason for r in responses]
        batch["version"] = torch.tensor([r.version for r in responses])
        batch["text"] = [str(self._tokenizer.decode(list(r.ids), skip_special_tokens=True)) for r in responses]
        batch["messages"] = [row.messages for row in rows.values()]
        self._laps[POOL].put(list(rows), batch)

    def score(self, rows: list[int], held_by: int | None = None) -> Scores:
        """Scores of rows of the pool, here or of the host ``held_by``."""
        rewards = self._ready.rewards
        with self._located("reward.score"):
            if held_by is None or held_by == self.context.rank:
                batch = self.give(POOL, rows, SAMPLED)
            else:
                batch = self.context.peer(held_by).call("give", POOL, rows, SAMPLED)
            ids = [tuple(row.tolist()) for row in batch.ragged("response_ids").rows()]
            facts: list[Any] = [batch["draw"], batch["text"], ids, batch["finish_reason"], batch["messages"]]
            told = [
                reward_row(row_id, draw.prompt, text, response, reason, messages)
                for row_id, draw, text, response, reason, messages in zip(batch.ids, *facts, strict=True)
            ]
            return rewards.score(told) if rewards is not None else Scores([None] * len(told))

    def accept(self, accept: Accept) -> None:
        """Rows of the pool enter a lap; the rest of the pool goes. A row without a score leaves loss and statistics."""
        if not accept.pool:
            self._laps[POOL].clear()
            return
        pool = self._laps[POOL].batch(accept.pool, SAMPLED)
        draws: Any = pool["draw"]
        responses = pool.ragged("response_ids")
        batch = Batch(pool.ids)
        batch["prompt_ids"] = Ragged.from_rows([draw.prompt.ids for draw in draws], torch.int64)
        batch["group"] = torch.tensor([draw.number for draw in draws])
        batch["response_ids"] = responses
        kept = torch.tensor(accept.kept).repeat_interleave(responses.lengths)
        batch["response_mask"] = responses.with_values(pool.ragged("chosen").values & kept)
        for name in ("sampled_logprobs", "finish_reason", "version", *accept.more):
            batch[name] = pool[name]
        batch["scores"] = torch.tensor(accept.scores, dtype=torch.float64)
        if accept.greedy is not None:
            batch["greedy_scores"] = torch.tensor(accept.greedy, dtype=torch.float64)
        if accept.parts is not None:
            batch["reward_parts"] = accept.parts
        self._shelf(accept.step).put(accept.rows, batch)
        self._laps[POOL].clear()

    def show(self, step: int, rows: list[int]) -> list[Shown]:
        """Tokens of sampled rows, for people."""
        columns = ("response_ids", "sampled_logprobs", "chosen")
        batch = self._shelf(step).batch(rows, columns)
        return [
            Shown(
                array("i", ids.tolist()),
                array("f", logprobs.tolist()),
                None if bool(chosen.all()) else tuple(chosen.tolist()),
            )
            for ids, logprobs, chosen in zip(*(batch.ragged(name).rows() for name in columns), strict=True)
        ]

    def empty_pool(self) -> None:
        """Rows that no lap will accept, such as an evaluation's."""
        self._laps[POOL].clear()

    # -- ops -------------------------------------------------------------------------------------------------------

    def run(self, order: Order) -> Done:
        """One op: bring what lies elsewhere, compute, keep what was written."""
        shelf = self._shelf(order.step)
        with self._located(f"{order.role}.{order.op}"):
            start = time.perf_counter()
            fetched = list(self._fetches.map(lambda fetch: self._bring(order.step, fetch, shelf), order.fetch))
            waited = time.perf_counter() - start if fetched else 0.0
            return replace(self._compute(lambda: self._op(order, shelf)), fetched=fetched, waited=waited)

    def _bring(self, step: int, fetch: Fetch, shelf: Shelf) -> Transfer:
        start = time.perf_counter()
        part = self.context.peer(fetch.host).call("give", step, fetch.rows, fetch.columns)
        seconds = time.perf_counter() - start
        shelf.put(fetch.rows, part)
        return transfer_of(part, seconds, fetch.host, self.context.rank)

    def _op(self, order: Order, shelf: Shelf) -> Done:
        if self._ready.rollout is not None:  # its memory is the op's
            self._ready.rollout.engine.sleep()
        start = time.time()
        rows = order.rows
        batch = shelf.batch(rows, order.columns)
        if "group" in batch:  # numbers of the lap's groups here, from 0
            batch["group"] = batch.tensor("group").unique(return_inverse=True)[1]
        batch["row"] = torch.tensor(rows, dtype=torch.int64)
        before = dict(batch.columns)
        lap = Lap(order.step, order.kl_coef)
        if order.forward is not None:
            lap.forward = order.forward.among(rows)
        if order.update is not None:
            lap.update = order.update.among(rows)
        with _nvtx(self.device, f"{order.role}.{order.op}"):
            result = getattr(getattr(self._ready, order.role), order.op)(batch, lap)
        written = {name: column for name, column in batch.columns.items() if before.get(name) is not column}
        shelf.put(rows, Batch(batch.ids, written))
        metrics = lap.metrics | result if isinstance(result, dict) else lap.metrics
        return Done(start, time.time(), metrics, tuple(written), lap.trained, lap.kl_per_response)

    def publish(self, version: int, detail: bool = False) -> Report:
        """Rollouts sample from the actor's present weights from now on. All hosts of both roles call it together.

        ``detail``: the report has a line per transfer.
        """
        start = time.perf_counter()
        with self._located("publish"):
            report = self._compute(lambda: self._ready.publisher.publish(version))
        return replace(report, seconds=time.perf_counter() - start, transfers=report.transfers if detail else [])

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def room_needed(self, whole: bool) -> tuple[int, int | None]:
        """Bytes of the copies that ``snapshot`` makes, and of memory that is free; to be asked when optimizers have
        their states. Megatron's parts are gathered in host memory, so room for them is no help."""

        def measure() -> None:
            for saved in self._saved(whole):
                for part, pieces in saved.parts.items():
                    self._sizes[part] = {piece.name: piece.tensor.nbytes for piece in pieces}

        if self._ready.engines and self.cfg.actor_model_config.engine != "megatron":  # others may be sampling ahead
            self._compute(measure)
        return sum(sum(sizes.values()) for sizes in self._sizes.values()), free_memory()

    def make_room(self) -> None:
        """Get that memory while training goes on, and keep it. Beside a CPU it is got by each snapshot: at once."""
        if self.device.type == "cuda" and not self._rooms:
            self._rooms = {part: Room(sizes, self.device) for part, sizes in self._sizes.items()}

    def snapshot(self, copy: bool, whole: bool) -> dict[str, Any]:
        """What ``write`` will write, as it is now; gives what of the optimizers is plain JSON. ``copy``: training goes
        on before it is written. ``whole``: everything that is trained, with its optimizer; else the policy alone."""
        return self._compute(lambda: self._snapshot(copy, whole))

    def _saved(self, whole: bool) -> Iterator[_Saved]:
        """On every host in the same order, and each part to its end before the next: some gather."""
        for role, engine in self._ready.engines.items():
            if role != "actor" and not whole:
                continue
            ranks = self.placement.ranks(role)
            number = ranks.index(self.context.rank)
            suffix = f"_{number}" if len(ranks) > 1 else ""
            weights, state, scalars = engine.saved(whole)
            parts = {f"{role}{suffix}": weights} | ({f"{role}_optimizer{suffix}": state} if whole else {})
            yield _Saved(role, number, len(ranks) == 1, parts, scalars)

    def _snapshot(self, copy: bool, whole: bool) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        facts: dict[str, Any] = {}
        files = {}
        for saved in self._saved(whole):
            for part, pieces in saved.parts.items():
                held = list(pieces)
                tensors = {piece.name: piece.tensor for piece in held}
                if copy:
                    tensors = snapshot(tensors, self._rooms.get(part))
                if saved.alone:
                    parts[part] = tensors
                elif held or not saved.number:
                    parts[part] = Pieces(tensors, {piece.name: (piece.shape, piece.start) for piece in held})
            if not saved.number:
                facts[saved.role] = saved.scalars
            if saved.role == "actor" and not saved.number:
                trained = self._ready.trained
                assert trained is not None
                files["hf"] = model_files(trained.lm, self._tokenizer, self.cfg.actor_model_config)
        self._unwritten = parts, files
        return facts

    def write(self, folder: str) -> dict[str, dict[str, int]]:
        """Write this host's part of a checkpoint; its files' sizes and checksums."""
        (parts, files), self._unwritten = self._unwritten, ({}, {})
        return write_parts(Path(folder), parts, files)

    def restore(self, folder: str, facts: dict[str, Any]) -> None:
        """Continue with what ``write`` wrote, on whatever number of hosts."""

        def take() -> None:
            checkpoint = Checkpoint.open(Path(folder), checksums=False)
            for name, engine in self._ready.engines.items():
                if name not in facts:
                    raise RequestError(f"{folder} holds no {name}, which is trained now")
                engine.restore(checkpoint.parts(name), checkpoint.parts(f"{name}_optimizer"), facts[name])

        self._compute(take)

    # -- the host itself -------------------------------------------------------------------------------------------

    def readings(self) -> dict[str, float]:
        """Memory and utilisation of this process and its device since the last call."""
        return memory_readings(self.device) | self._utilisation.read()

    def ping(self) -> None:
        """Whether this host is still there."""

    def close(self) -> None:
        """End threads and scoring processes; a second call does nothing."""
        if self._loop.is_closed():
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._end_loop)
            stack.callback(self._utilisation.close)
            stack.callback(self._fetches.shutdown, cancel_futures=True)
            for room in self._rooms.values():
                stack.callback(room.close)
            if self.workers is not None:
                stack.callback(self.workers.close)

    def _end_loop(self) -> None:
        asyncio.run_coroutine_threadsafe(cancel_others(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except CancelledError:
            raise RunError("the host was closed") from None

    def _compute(self, work: Callable[[], T]) -> T:
        return self._ready.compute.submit(copy_context().run, work).result()

    @contextlib.contextmanager
    def _located(self, label: str) -> Iterator[None]:
        """Failures name the op and the device; what is wrong with the request keeps its kind."""
        try:
            yield
        except (RequestError, LocatedError):
            raise
        except Exception as error:
            text = f"{label} on {self.where}: {error or type(error).__name__}"
            if isinstance(error, torch.OutOfMemoryError):
                text += "\n" + memory_advice(self.cfg)
            raise LocatedError(text) from error


class _Saved(NamedTuple):
    """What this host saves of a role's engine."""

    role: str
    number: int  # of the host among the role's
    alone: bool
    parts: dict[str, Iterator[Piece]]
    scalars: dict[str, Any]


class _Fact(NamedTuple):
    """What is told of a sampled row, in the words of ``Sampled``; of many, lists."""

    length: Any
    sampled: Any
    turns: Any
    finish_reason: Any
    version: Any
    seconds: Any
    logprobs: Any


def _fact(row: Row) -> _Fact:
    r, mask = row.response, _mask(row)
    logprobs = sum(itertools.compress(r.logprobs, mask))
    return _Fact(len(r.ids), sum(mask), row.turns, r.finish_reason, r.version, r.seconds, logprobs)


def _mask(row: Row) -> tuple[bool, ...]:
    """Which of the response's tokens the policy sampled."""
    return row.mask if row.mask is not None else (True,) * len(row.response.ids)


class LocatedError(RunError):
    """A failure that says which op on which device it was."""


@contextlib.asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """Tasks that run side by side; the first failure, of the body too, cancels the rest and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:  # Python 3.11.2 would wrap what is raised in an except*
        raise failures.exceptions[0] from None


async def cancel_others() -> None:
    """All that the running loop does beside the caller has ended when this returns."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def gather(tasks: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run side by side; the first failure cancels the rest."""
    async with together() as group:
        started = [group.create_task(task) for task in tasks]
    return [task.result() for task in started]


@contextlib.contextmanager
def _nvtx(device: torch.device, name: str) -> Iterator[None]:
    """A range in a profiler's timeline."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.nvtx.range(name):
        yield
