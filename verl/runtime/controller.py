"""The controller walks the lap. It carries small things (draws, scores, seats, metrics); ops read and write columns.

Ops that share a device share one compute thread and take turns; rewards are scored on other threads while the device
samples. The first failure ends the lap and says where it happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from verl.algorithms.kl import KLController
from verl.batch import Batch
from verl.config.errors import RequestError, RunError
from verl.config.load import memory_advice
from verl.config.run import RunConfig
from verl.data.examples import Example, ExampleFeed
from verl.data.loader import PromptFeed
from verl.dataflow.graph import Plan
from verl.dataflow.nodes import Op
from verl.engines.base import TrainEngine
from verl.models.policy import Policy
from verl.models.scorer import Scorer
from verl.rewards.base import Rewards
from verl.runtime.collect import Collected, Lot, Reader, Sampler, gather
from verl.seats import Seats, seat
from verl.workers.actor import ActorWorker
from verl.workers.critic import CriticWorker, ProcessRewardWorker
from verl.workers.frozen import ReferenceWorker, TeacherWorker
from verl.workers.lap import Lap
from verl.workers.offline import OfflineWorker
from verl.workers.rollout import RolloutWorker

log = logging.getLogger(__name__)


@dataclass
class Workers:
    """What hosts the nodes' ops: one worker per role, and the thread that computes for all that share the device."""

    trained: Policy | Scorer
    actor: ActorWorker | OfflineWorker
    device: torch.device
    compute: Executor
    rollout: RolloutWorker | None = None
    rewards: Rewards | None = None
    critic: CriticWorker | None = None
    reference: ReferenceWorker | None = None
    teacher: TeacherWorker | None = None
    process_reward: ProcessRewardWorker | None = None

    @property
    def engines(self) -> dict[str, TrainEngine]:
        """Everything that is trained, by role."""
        roles = {"actor": self.actor, "critic": self.critic, "process_reward": self.process_reward}
        return {role: worker.engine for role, worker in roles.items() if worker is not None}

    def method(self, op: Op) -> Callable[[Batch, Lap], None]:
        worker = getattr(self, op.node.kind, None)
        if worker is None:
            raise RequestError(f"{op.label} has no worker")
        return getattr(worker, op.name)


@dataclass
class LapResult:
    """What a lap leaves for people: metrics and the rows behind them."""

    metrics: dict[str, float | None]
    collected: Collected | None = field(repr=False)  # None where nothing is sampled


class Controller:
    """Runs laps of one plan. ``step`` counts finished laps; ``state`` and ``restore`` continue exactly."""

    def __init__(
        self, cfg: RunConfig, plan: Plan, workers: Workers, feed: PromptFeed | ExampleFeed,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:  # fmt: skip
        self.cfg, self.plan, self.workers, self.feed = cfg, plan, workers, feed
        self.source: Sampler | Reader
        if workers.rollout is not None:
            prompts: Any = feed
            self.source = Sampler(cfg, workers.rollout, workers.rewards, prompts, tokenizer, self._located)
        else:
            examples: Any = feed
            self.source = Reader(cfg, examples)
        self.kl = KLController(cfg.init_kl_coef or 0.0, cfg.kl_target, cfg.kl_horizon)
        self.step = 0

    # -- one lap ---------------------------------------------------------------------------------------------------

    async def lap(self) -> LapResult:
        """Collect, seat, walk the stages, publish. Returns the lap's metrics."""
        start = time.perf_counter()
        lap = Lap(self.step + 1, kl_coef=self.kl.coef)
        lot = await self.source.collect(baseline=self.plan.has("reward.baseline"))
        lap.metrics |= lot.metrics
        seconds: dict[str, float] = {}
        await self._walk(lot, lap, seconds)
        if lap.kl_per_response is not None:
            with self._located("kl"):
                self.kl.update(lap.kl_per_response, len(lot.batch))
        publish = time.perf_counter()
        if self.workers.rollout is not None:
            self.workers.rollout.engine.version = lap.step  # it shares the trainer's parameters: nothing to move
        end = time.perf_counter()
        self.step = lap.step
        metrics = lap.metrics | self._times(lot.collected, seconds)
        if self.workers.rollout is not None:
            metrics |= {"time/publish": end - publish, "kl/coef": lap.kl_coef, "kl/mean": lap.metrics.get("kl/mean")}
        metrics["time/step"] = end - start
        metrics["throughput/tokens_per_second"] = lot.tokens / (end - start)
        metrics["data/epoch"] = self.feed.epoch
        metrics |= {f"data/{what}": float(n) for what, n in self.feed.counts.items() if what != "kept"}
        return LapResult(metrics, lot.collected)

    async def _walk(self, lot: Lot, lap: Lap, seconds: dict[str, float]) -> None:
        """All stages after collecting, on the lap's rows."""
        lap.forward = self._seat(lot.batch, range(len(lot.batch)), passes_only=True)
        for stage in self.plan.stages:
            if stage.kind == "run":
                await gather([self._run(op, lot, lap, seconds) for op in stage.ops])
                self._release(lot.batch, stage.ops)

    async def judge(self, examples: Sequence[Example]) -> dict[str, float]:
        """Loss and metrics of held-out rows, without an update."""
        assert isinstance(self.source, Reader) and isinstance(self.workers.actor, OfflineWorker)
        lot, lap = self.source.lot(examples), Lap(self.step, kl_coef=0.0)
        batch, loop = lot.batch, asyncio.get_running_loop()
        with self._located("evaluation"):
            lap.forward = self._seat(batch, range(len(batch)), passes_only=True)
            lap.update = self._seat(batch, lot.trained, passes_only=True)
            if self.workers.reference is not None:
                await loop.run_in_executor(self.workers.compute, self.workers.reference.logprobs, batch, lap)
            return await loop.run_in_executor(self.workers.compute, self.workers.actor.judge, batch, lap)

    async def _run(self, op: Op, lot: Lot, lap: Lap, seconds: dict[str, float]) -> None:
        def timed() -> float:  # waiting for the device is not the op's time
            start = time.perf_counter()
            self.workers.method(op)(lot.batch, lap)
            return time.perf_counter() - start

        with self._located(op.label):
            if lap.update is None and (op.name == "fit" or op.label in ("actor.update", "critic.update")):
                lap.update = self._update_seats(lot, lap)
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

    def _release(self, batch: Batch, ops: Sequence[Op]) -> None:
        """Drop the columns whose last reader has run."""
        for column, reader in self.plan.last_reader.items():
            if reader in ops:
                batch.columns.pop(column, None)

    # -- seats -----------------------------------------------------------------------------------------------------

    def _seat(self, batch: Batch, trained: Sequence[int], *, passes_only: bool) -> Seats:
        cfg = self.cfg
        in_pairs = isinstance(self.workers.actor, OfflineWorker)  # the loss compares rows of a group
        mask = batch.ragged("response_mask")
        loss_tokens = torch.zeros(len(batch), dtype=torch.int64).index_add_(0, mask.row_index, mask.values.long())
        return seat(
            batch.ragged("prompt_ids").lengths.tolist(), mask.lengths.tolist(), batch.tensor("group").tolist(),
            ranks=1,
            mini_batch_rows=len(batch) if passes_only else cfg.mini_batch_size * len(batch) // cfg.train_batch_size,
            micro_rows=cfg.micro_batch_size,
            max_tokens=cfg.max_tokens_per_micro_batch,
            loss_tokens=loss_tokens.tolist(),
            skip=set(range(len(batch))) - set(trained),
            share_prompts=True,
            whole_groups=cfg.algorithm.recipe.data == "pairs" or (not passes_only and in_pairs),
            epochs=1 if passes_only else cfg.algorithm.update_epochs,
            seed=cfg.seed + self.step,
        )  # fmt: skip

    def _update_seats(self, lot: Lot, lap: Lap) -> Seats:
        """Rows whose loss is exactly zero are counted in every denominator but not computed."""
        algorithm, actor, batch = self.cfg.algorithm, self.workers.actor, lot.batch
        trained = lot.trained
        if isinstance(actor, ActorWorker):
            in_loss = algorithm.entropy_coef or (lap.kl_coef and algorithm.kl_in == "loss")
            in_loss = in_loss or algorithm.recipe.loss == "kl_cov"  # its KL has a gradient whatever the advantage
            if self.workers.critic is None and not in_loss:
                flags = actor.trained_rows(batch)
                trained = [i for i in trained if flags[i]]
        elif lot.collected is not None:  # online DPO: a pair of each group
            trained = (batch.tensor("preferred") != 0).nonzero().flatten().tolist()
        lap.metrics["policy/rows_trained"] = len(trained)
        return self._seat(batch, trained, passes_only=False)

    # -- metrics ---------------------------------------------------------------------------------------------------

    def _times(self, collected: Collected | None, seconds: Mapping[str, float]) -> dict[str, float | None]:
        update = (".update", ".fit")
        times: dict[str, float | None] = {
            "time/update": sum(s for label, s in seconds.items() if label.endswith(update))
        }
        if collected is not None:
            times |= {"time/generate": collected.generate_seconds, "time/reward": collected.reward_seconds}
        return times | {f"time/{label}": s for label, s in seconds.items()}

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain JSON: with the engines' tensors, all that the next lap depends on."""
        return {"step": self.step, "kl": self.kl.state(), **self.source.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.source.restore(state)
        self.kl.restore(state["kl"])
        if self.workers.rollout is not None:
            self.workers.rollout.engine.version = self.step
