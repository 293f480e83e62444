"""The controller walks the lap. It carries small things (draws, scores, seats, metrics); ops read and write columns.

Ops that share a device share one compute thread and take turns; rewards are scored on other threads while the device
samples. The first failure ends the lap and says where it happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from verl.algorithms.kl import KLController
from verl.batch import Batch, Ragged
from verl.config.errors import RequestError, RunError
from verl.config.load import memory_advice
from verl.config.run import RunConfig
from verl.data.loader import Prompt, PromptFeed
from verl.dataflow.graph import Plan
from verl.dataflow.nodes import Op
from verl.metrics.names import member
from verl.metrics.readings import latency_percentiles
from verl.metrics.record import mean_present, with_count
from verl.models.policy import Policy
from verl.rewards.base import Rewards, Scores
from verl.rollout.base import Sampling
from verl.seats import Seats, seat
from verl.workers.lap import Lap
from verl.workers.rollout import Draw, RolloutWorker, Row, reward_row
from verl.workers.train import ActorWorker, CriticWorker, ReferenceWorker

log = logging.getLogger(__name__)


@dataclass
class Workers:
    """What hosts the nodes' ops: one worker per role, and the thread that computes for all that share the device."""

    policy: Policy
    actor: ActorWorker
    rollout: RolloutWorker
    rewards: Rewards
    critic: CriticWorker | None
    reference: ReferenceWorker | None
    device: torch.device
    compute: Executor

    def method(self, op: Op) -> Callable[[Batch, Lap], None]:
        worker = getattr(self, op.node.kind, None)
        if worker is None:
            raise RequestError(f"{op.label} has no worker")
        return getattr(worker, op.name)


@dataclass
class Collected:
    """Scored rows in the order of their draws, whatever order they finished in."""

    rows: list[Row]
    texts: list[str]
    scores: Scores
    generate_seconds: float
    reward_seconds: float


@dataclass
class LapResult:
    """What a lap leaves for people: metrics and the rows behind them."""

    metrics: dict[str, float | None]
    collected: Collected = field(repr=False)


class Controller:
    """Runs laps of one plan. ``step`` counts finished laps; ``state`` and ``restore`` continue exactly."""

    def __init__(
        self,
        cfg: RunConfig,
        plan: Plan,
        workers: Workers,
        feed: PromptFeed,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.cfg, self.plan, self.workers = cfg, plan, workers
        self.feed, self.tokenizer = feed, tokenizer
        self.kl = KLController(cfg.init_kl_coef or 0.0, cfg.kl_target, cfg.kl_horizon)
        self.step = 0
        self.draws = 0
        self.sampling = Sampling(
            temperature=cfg.rollout.temperature, top_p=cfg.rollout.top_p, top_k=cfg.rollout.top_k,
            max_new_tokens=cfg.max_response_length, seed=cfg.seed, greedy=False, stop=tuple(cfg.rollout.stop),
        )  # fmt: skip

    # -- one lap ---------------------------------------------------------------------------------------------------

    async def lap(self) -> LapResult:
        """Collect, seat, walk the stages, publish. Returns the lap's metrics."""
        start = time.perf_counter()
        step = self.step + 1
        lap = Lap(step, kl_coef=self.kl.coef)
        lap.metrics["kl/coef"] = self.kl.coef
        collected = await self._collect()
        batch = self._batch(collected)
        lap.metrics |= self._row_metrics(collected, batch)
        lap.forward = self._seat(batch, range(len(batch)), passes_only=True)
        seconds: dict[str, float] = {}
        for stage in self.plan.stages:
            if stage.kind == "run":
                await self._gather([self._run(op, batch, lap, seconds) for op in stage.ops])
                self._release(batch, stage.ops)
        if lap.kl_per_response is not None:
            with self._located("kl"):
                self.kl.update(lap.kl_per_response, len(batch))
        publish = time.perf_counter()
        self.workers.rollout.engine.version = step  # generation shares the trainer's parameters: nothing to move
        end = time.perf_counter()
        self.step = step
        metrics = lap.metrics | self._times(collected, seconds)
        metrics["time/publish"] = end - publish
        metrics["time/step"] = end - start
        metrics["throughput/tokens_per_second"] = _tokens(collected.rows) / (end - start)
        metrics["data/epoch"] = self.feed.epoch
        metrics |= {f"data/{what}": float(n) for what, n in self.feed.counts.items() if what != "kept"}
        metrics.setdefault("kl/mean", None)
        return LapResult(metrics, collected)

    async def _run(self, op: Op, batch: Batch, lap: Lap, seconds: dict[str, float]) -> None:
        def timed() -> float:  # waiting for the device is not the op's time
            start = time.perf_counter()
            self.workers.method(op)(batch, lap)
            return time.perf_counter() - start

        with self._located(op.label):
            if op.name == "update" and lap.update is None:
                lap.update = self._update_seats(batch, lap)
            loop = asyncio.get_running_loop()
            seconds[op.label] = await loop.run_in_executor(self.workers.compute, timed)

    @contextlib.contextmanager
    def _located(self, label: str) -> Iterator[None]:
        """Failures name the op and the step; what is wrong with the request keeps its kind."""
        try:
            yield
        except RequestError:
            raise
        except Exception as error:
            text = f"step {self.step + 1}, {label} on {self.workers.device}: {error or type(error).__name__}"
            if isinstance(error, torch.OutOfMemoryError):
                text += "\n" + memory_advice(self.cfg)
            raise RunError(text) from error

    @staticmethod
    async def _gather(tasks: Sequence[Awaitable[Any]]) -> None:
        """Run side by side; the first failure cancels the rest."""
        try:
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    group.create_task(_as_coroutine(task))
        except* Exception as failures:
            raise failures.exceptions[0] from None

    def _release(self, batch: Batch, ops: Sequence[Op]) -> None:
        """Drop the columns whose last reader has run."""
        for column, reader in self.plan.last_reader.items():
            if reader in ops:
                batch.columns.pop(column, None)

    # -- collecting ------------------------------------------------------------------------------------------------

    async def _collect(self) -> Collected:
        """Rollouts of one version until the lap's rows are there; rewards are scored as rows finish."""
        cfg = self.cfg
        rounds = []
        for _ in range(cfg.train_batch_size // cfg.rollout_batch_size):
            draws = [self._draw(p) for p in self.feed.take(cfg.rollout_batch_size // cfg.group_size)]
            rounds.append(await self.sample(draws, cfg.group_size, self.sampling, cfg.num_rollout_workers))
        return Collected(
            [row for r in rounds for row in r.rows],
            [text for r in rounds for text in r.texts],
            Scores.merge([r.scores for r in rounds]),
            sum(r.generate_seconds for r in rounds),
            sum(r.reward_seconds for r in rounds),
        )

    def _draw(self, prompt: Prompt) -> Draw:
        self.draws += 1
        return Draw(self.draws - 1, prompt)

    async def sample(self, draws: Sequence[Draw], n: int, sampling: Sampling, feeders: int = 1) -> Collected:
        """``n`` scored rows for each draw. ``feeders`` requests run side by side and share the engine's batch."""
        start = time.perf_counter()
        rewards = self.workers.rewards
        rows: list[Row] = []
        texts: dict[str, str] = {}
        parts: list[tuple[list[Row], asyncio.Task[Scores]]] = []

        async def score(part: list[Row]) -> Scores:
            for row in part:
                texts[row.id] = str(self.tokenizer.decode(list(row.response.ids), skip_special_tokens=True))
            with self._located("reward.score"):
                return await asyncio.to_thread(rewards.score, [reward_row(row, texts[row.id]) for row in part])

        async def feed(share: Sequence[Draw]) -> None:
            groups: dict[str, list[Row]] = {}
            with self._located("rollout.generate"):
                async for row in self.workers.rollout.generate(share, n, sampling):
                    rows.append(row)
                    group = groups.setdefault(row.draw.id, [])
                    group.append(row)
                    # A group at a time, while others are still sampled; a reward model waits: it shares the device.
                    if len(group) == n and not rewards.has_model:
                        parts.append((group, asyncio.create_task(score(group))))

        shares = [draws[k * len(draws) // feeders : (k + 1) * len(draws) // feeders] for k in range(feeders)]
        try:
            await self._gather([feed(share) for share in shares if share])
            generated = time.perf_counter()
            if rewards.has_model:
                rows.sort(key=_place)
                parts.append((list(rows), asyncio.create_task(score(rows))))
            scored = Scores.merge([await task for _, task in parts])
        finally:
            for _, task in parts:
                task.cancel()
            await asyncio.gather(*(task for _, task in parts), return_exceptions=True)  # all have ended, none unseen
        merged = [row for part, _ in parts for row in part]
        order = sorted(range(len(merged)), key=lambda i: _place(merged[i]))
        rows = [merged[i] for i in order]
        return Collected(
            rows, [texts[row.id] for row in rows], scored.select(order), generated - start,
            time.perf_counter() - generated,
        )  # fmt: skip

    def _batch(self, collected: Collected) -> Batch:
        """Pack once: the rows' columns, in the order of their ids. A row without a score leaves loss and statistics."""
        rows, totals = collected.rows, collected.scores.totals
        lengths = torch.tensor([len(r.response.ids) for r in rows])
        kept = torch.tensor([total is not None for total in totals])
        numbers = {draw: i for i, draw in enumerate(dict.fromkeys(r.draw.number for r in rows))}
        batch = Batch([r.id for r in rows])
        batch["prompt_ids"] = Ragged.from_rows([r.draw.prompt.ids for r in rows], torch.int64)
        batch["group"] = torch.tensor([numbers[r.draw.number] for r in rows])
        batch["response_ids"] = Ragged.from_rows([r.response.ids for r in rows], torch.int64)
        batch["response_mask"] = Ragged(kept.repeat_interleave(lengths), lengths)
        batch["sampled_logprobs"] = Ragged.from_rows([r.response.logprobs for r in rows], torch.float32)
        batch["finish_reason"] = [r.response.finish_reason for r in rows]
        batch["version"] = torch.tensor([r.response.version for r in rows])
        batch["scores"] = torch.tensor([math.nan if t is None else t for t in totals], dtype=torch.float64)
        return batch

    # -- seats -----------------------------------------------------------------------------------------------------

    def _seat(self, batch: Batch, trained: Sequence[int], *, passes_only: bool) -> Seats:
        cfg = self.cfg
        mask = batch.ragged("response_mask")
        loss_tokens = torch.zeros(len(batch), dtype=torch.int64).index_add_(0, mask.row_index, mask.values.long())
        return seat(
            batch.ragged("prompt_ids").lengths.tolist(), mask.lengths.tolist(), batch.tensor("group").tolist(),
            ranks=1,
            mini_batch_rows=cfg.train_batch_size if passes_only else cfg.mini_batch_size,
            micro_rows=cfg.micro_batch_size,
            max_tokens=cfg.max_tokens_per_micro_batch,
            loss_tokens=loss_tokens.tolist(),
            skip=set(range(len(batch))) - set(trained),
            share_prompts=True,
            epochs=1 if passes_only else cfg.algorithm.update_epochs,
            seed=cfg.seed + self.step,
        )  # fmt: skip

    def _update_seats(self, batch: Batch, lap: Lap) -> Seats:
        """Rows whose loss is exactly zero are counted in every denominator but not computed."""
        trained = list(range(len(batch)))
        in_loss = self.cfg.algorithm.entropy_coef or (lap.kl_coef and self.cfg.algorithm.kl_place == "loss")
        if self.workers.critic is None and not in_loss:
            flags = self.workers.actor.trained_rows(batch)
            trained = [i for i in trained if flags[i]]
        lap.metrics["policy/rows_trained"] = len(trained)
        return self._seat(batch, trained, passes_only=False)

    # -- metrics ---------------------------------------------------------------------------------------------------

    def _row_metrics(self, collected: Collected, batch: Batch) -> dict[str, float | None]:
        rows, scores = collected.rows, collected.scores
        present = [t for t in scores.totals if t is not None]
        lengths = [len(r.response.ids) for r in rows]
        metrics: dict[str, float | None] = {
            "reward/mean": mean_present(scores.totals)[0],
            "reward/std": torch.tensor(present).std().item() if len(present) > 1 else None,
            "response/length_mean": sum(lengths) / len(lengths),
            "response/length_max": max(lengths),
            "response/truncated": sum(r.response.finish_reason == "length" for r in rows) / len(rows),
            # of all sampled tokens; the update replaces it by the exact value on the tokens that it trains
            "policy/entropy": -batch.ragged("sampled_logprobs").values.mean().item(),
            **latency_percentiles([r.response.seconds for r in rows]),
        }
        for family, columns in (("reward/<name>", scores.per_reward), ("extra/<key>", scores.extra)):
            for name, values in columns.items():
                metrics |= with_count(member(family, name), values)
        metrics |= {f"reward/{name}": float(count) for name, count in scores.counts.items()}
        if self.cfg.group_size and self.cfg.group_size > 1:
            flat = batch.tensor("scores").view(-1, self.cfg.group_size)
            metrics["reward/flat_groups"] = (flat == flat[:, :1]).all(1).double().mean().item()
        return metrics

    def _times(self, collected: Collected, seconds: dict[str, float]) -> dict[str, float | None]:
        times: dict[str, float | None] = {
            "time/generate": collected.generate_seconds,
            "time/reward": collected.reward_seconds,
            "time/update": sum(s for label, s in seconds.items() if label.endswith(".update")),
        }
        return times | {f"time/{label}": s for label, s in seconds.items()}

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain JSON: with the engines' tensors, all that the next lap depends on."""
        return {"step": self.step, "draws": self.draws, "data": self.feed.state(), "kl": self.kl.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.step, self.draws = state["step"], state["draws"]
        self.feed.restore(state["data"])
        self.kl.restore(state["kl"])
        self.workers.rollout.engine.version = self.step


def _place(row: Row) -> tuple[int, int]:
    return row.draw.number, row.sample


def _tokens(rows: Sequence[Row]) -> int:
    return sum(len(r.draw.prompt.ids) + len(r.response.ids) for r in rows)


async def _as_coroutine(task: Awaitable[Any]) -> Any:
    return await task
