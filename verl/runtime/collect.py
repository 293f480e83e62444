"""Where a lap's rows come from: answers sampled and scored, or rows of the data set as they are."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from verl.algorithms.preference import mismatch
from verl.batch import Batch, Ragged
from verl.config.errors import DataError, RunError
from verl.config.run import RunConfig
from verl.data.examples import Completion, Example, ExampleFeed
from verl.data.loader import PromptFeed
from verl.metrics.names import member
from verl.metrics.readings import latency_percentiles
from verl.metrics.record import mean_present, with_count
from verl.rewards.base import Rewards, Scores
from verl.rewards.rules import length as overlong
from verl.rollout.base import Sampling
from verl.workers.offline import ANSWER_MASK, MISMATCHED
from verl.workers.rollout import Draw, RolloutWorker, Row, reward_row

Located = Callable[[str], AbstractContextManager[None]]


@dataclass
class Collected:
    """Scored rows in the order of their draws, whatever order they finished in."""

    rows: list[Row]
    texts: list[str]
    scores: Scores
    generate_seconds: float
    reward_seconds: float

    @staticmethod
    def merge(parts: Sequence[Collected]) -> Collected:
        return Collected(
            [row for part in parts for row in part.rows],
            [text for part in parts for text in part.texts],
            Scores.merge([part.scores for part in parts]),
            sum(part.generate_seconds for part in parts),
            sum(part.reward_seconds for part in parts),
        )

    def select(self, rows: Sequence[int]) -> Collected:
        return dataclasses.replace(
            self,
            rows=[self.rows[i] for i in rows],
            texts=[self.texts[i] for i in rows],
            scores=self.scores.select(rows),
        )


@dataclass
class Lot:
    """One lap's rows: the batch, what it says about itself, rows that get no update, and tokens that pass through."""

    batch: Batch
    metrics: dict[str, float | None]
    untrained: frozenset[int] = frozenset()
    tokens: int = 0
    collected: Collected | None = field(default=None, repr=False)

    @property
    def trained(self) -> list[int]:
        return [i for i in range(len(self.batch)) if i not in self.untrained]


class Sampler:
    """Draws prompts, samples answers, scores them; replaces groups that say nothing where the algorithm asks."""

    def __init__(
        self, cfg: RunConfig, rollout: RolloutWorker, rewards: Rewards | None, feed: PromptFeed,
        tokenizer: PreTrainedTokenizerBase, located: Located,
    ) -> None:  # fmt: skip
        self.cfg, self.rollout, self.rewards, self.feed = cfg, rollout, rewards, feed
        self.tokenizer, self._located = tokenizer, located
        self.draws = 0
        self.sampling = Sampling(
            temperature=cfg.rollout.temperature, top_p=cfg.rollout.top_p, top_k=cfg.rollout.top_k,
            max_new_tokens=cfg.max_response_length, seed=cfg.seed, greedy=False, stop=tuple(cfg.rollout.stop),
        )  # fmt: skip
        self.greedy = dataclasses.replace(self.sampling, greedy=True)

    def state(self) -> dict[str, Any]:
        return {"draws": self.draws, "data": self.feed.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.draws = state["draws"]
        self.feed.restore(state["data"])

    # -- a lap's rows ----------------------------------------------------------------------------------------------

    async def collect(self, *, baseline: bool) -> Lot:
        """Rollouts of one version until ``train_batch_size`` rows are there. ``baseline``: and a greedy answer each."""
        cfg = self.cfg
        metrics: dict[str, float | None] = {}
        rounds = []
        for _ in range(cfg.train_batch_size // cfg.rollout_batch_size):
            rounds.append(await self._round(cfg.rollout_batch_size // cfg.group_size))
        collected = Collected.merge(rounds)
        if cfg.algorithm.dynamic_sampling:
            collected = await self._refill(collected, metrics)
        greedy = None
        if baseline:
            draws = list({row.draw.number: row.draw for row in collected.rows}.values())
            greedy = await self.sample(draws, 1, self.greedy)
            collected.generate_seconds += greedy.generate_seconds
            collected.reward_seconds += greedy.reward_seconds
        penalties = self._penalties(collected)
        batch = self._batch(collected, penalties, greedy)
        metrics = self._metrics(collected, batch) | metrics
        if penalties is not None:
            metrics["reward/overlong_penalty"] = sum(penalties) / len(penalties)
        if greedy is not None:
            metrics["reward/greedy_mean"] = mean_present(greedy.scores.totals)[0]
        tokens = sum(len(r.draw.prompt.ids) + len(r.response.ids) for r in collected.rows)
        return Lot(batch, metrics, tokens=tokens, collected=collected)

    async def _round(self, prompts: int) -> Collected:
        cfg = self.cfg
        drawn = await asyncio.to_thread(self.feed.take, prompts)  # a live source may wait
        draws = [Draw(self.draws + i, prompt) for i, prompt in enumerate(drawn)]
        self.draws += len(draws)
        return await self.sample(draws, cfg.group_size, self.sampling, cfg.num_rollout_workers)

    async def _refill(self, collected: Collected, metrics: dict[str, float | None]) -> Collected:
        """Dynamic sampling (DAPO, arXiv 2503.14476): groups whose rows all got the same reward are drawn anew.

        A refill draws as many groups as will probably be needed, at most one rollout.
        """
        cfg, n = self.cfg, self.cfg.group_size
        wanted = cfg.train_batch_size // n
        most = wanted * (1 + cfg.algorithm.max_refills)
        sampled, refills = len(collected.rows) // n, 0
        kept = collected.select(_telling(collected, n))
        generate, reward = collected.generate_seconds, collected.reward_seconds
        while (missing := wanted - len(kept.rows) // n) > 0:
            if sampled >= most:
                raise RunError(
                    f"dynamic sampling: of {sampled} groups sampled, {sampled - len(kept.rows) // n} got one reward on "
                    f"all their {n} rows; {len(kept.rows) // n} of {wanted} are there after algorithm.max_refills "
                    f"{cfg.algorithm.max_refills}. Prompts of another difficulty, a larger group_size, a larger "
                    "algorithm.max_refills, or algorithm.dynamic_sampling false would go on"
                )
            likely = missing * sampled // max(1, len(kept.rows) // n)  # at the rate seen so far
            more = await self._round(min(max(missing, likely), cfg.rollout_batch_size // n, most - sampled))
            refills += 1
            sampled += len(more.rows) // n
            generate, reward = generate + more.generate_seconds, reward + more.reward_seconds
            kept = Collected.merge([kept, more.select(_telling(more, n))])
        metrics["reward/flat_groups"] = 1 - len(kept.rows) / n / sampled
        kept = kept.select(range(wanted * n))  # the first drawn; what a refill brought beyond them is not trained on
        metrics["rollout/refills"] = refills
        metrics["rollout/groups_sampled"] = sampled
        return dataclasses.replace(kept, generate_seconds=generate, reward_seconds=reward)

    def _penalties(self, collected: Collected) -> list[float] | None:
        """DAPO's soft overlong penalty per row; None: no row can get one."""
        limit, algorithm = self.cfg.max_response_length, self.cfg.algorithm
        if not algorithm.overlong_share:
            return None
        buffer = max(1, math.ceil(limit * algorithm.overlong_share))
        return [
            algorithm.overlong_factor * overlong(row.response.ids, max_tokens=limit, buffer=buffer)
            for row in collected.rows
        ]

    async def sample(self, draws: Sequence[Draw], n: int, sampling: Sampling, feeders: int = 1) -> Collected:
        """``n`` scored rows for each draw. ``feeders`` requests run side by side and share the engine's batch."""
        start = time.perf_counter()
        rewards = self.rewards
        has_model = rewards is not None and rewards.has_model
        rows: list[Row] = []
        texts: dict[str, str] = {}
        parts: list[tuple[list[Row], asyncio.Task[Scores]]] = []

        async def score(part: list[Row]) -> Scores:
            for row in part:
                texts[row.id] = str(self.tokenizer.decode(list(row.response.ids), skip_special_tokens=True))
            with self._located("reward.score"):
                told = [reward_row(row, texts[row.id]) for row in part]
                return await asyncio.to_thread(rewards.score, told) if rewards else Scores([None] * len(told))

        async def feed(share: Sequence[Draw]) -> None:
            groups: dict[str, list[Row]] = {}
            with self._located("rollout.generate"):
                async for row in self.rollout.generate(share, n, sampling):
                    rows.append(row)
                    group = groups.setdefault(row.draw.id, [])
                    group.append(row)
                    # A group at a time, while others are still sampled; a reward model waits: it shares the device.
                    if len(group) == n and not has_model:
                        parts.append((group, asyncio.create_task(score(group))))

        shares = [draws[k * len(draws) // feeders : (k + 1) * len(draws) // feeders] for k in range(feeders)]
        try:
            await gather([feed(share) for share in shares if share])
            generated = time.perf_counter()
            if has_model:
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

    def _batch(self, collected: Collected, penalties: Sequence[float] | None, greedy: Collected | None) -> Batch:
        """Pack once: the rows' columns, in the order of their ids. A row without a score leaves loss and statistics."""
        rows, scores = collected.rows, collected.scores
        totals = [math.nan if t is None else t for t in scores.totals]
        if penalties is not None:
            totals = [t + p for t, p in zip(totals, penalties, strict=True)]
        judged = "reward" in self.cfg.algorithm.recipe.needs  # else scores are only told
        kept = [not (judged and math.isnan(t)) for t in totals]
        if self.cfg.algorithm.mask_truncated:
            kept = [k and r.response.finish_reason != "length" for k, r in zip(kept, rows, strict=True)]
        lengths = torch.tensor([len(r.response.ids) for r in rows])
        numbers = {draw: i for i, draw in enumerate(dict.fromkeys(r.draw.number for r in rows))}
        batch = Batch([r.id for r in rows])
        batch["prompt_ids"] = Ragged.from_rows([r.draw.prompt.ids for r in rows], torch.int64)
        batch["group"] = torch.tensor([numbers[r.draw.number] for r in rows])
        batch["response_ids"] = Ragged.from_rows([r.response.ids for r in rows], torch.int64)
        batch["response_mask"] = Ragged(torch.tensor(kept).repeat_interleave(lengths), lengths)
        batch["sampled_logprobs"] = Ragged.from_rows([r.response.logprobs for r in rows], torch.float32)
        batch["finish_reason"] = [r.response.finish_reason for r in rows]
        batch["version"] = torch.tensor([r.response.version for r in rows])
        batch["scores"] = torch.tensor(totals, dtype=torch.float64)
        if scores.per_reward:
            batch["reward_parts"] = [{name: v[i] for name, v in scores.per_reward.items()} for i in range(len(rows))]
        if greedy is not None:
            found = dict(zip((r.draw.number for r in greedy.rows), greedy.scores.totals, strict=True))
            values = [found[r.draw.number] for r in rows]
            batch["greedy_scores"] = torch.tensor([math.nan if v is None else v for v in values], dtype=torch.float64)
        return batch

    def _metrics(self, collected: Collected, batch: Batch) -> dict[str, float | None]:
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
        if self.rewards is None:
            metrics |= {"reward/mean": None, "reward/std": None}
        for family, columns in (("reward/<name>", scores.per_reward), ("extra/<key>", scores.extra)):
            for name, values in columns.items():
                metrics |= with_count(member(family, name), values)
        metrics |= {f"reward/{name}": float(count) for name, count in scores.counts.items()}
        if self.cfg.group_size > 1 and self.rewards is not None:
            flat = batch.tensor("scores").view(-1, self.cfg.group_size)
            metrics["reward/flat_groups"] = (flat == flat[:, :1]).all(1).double().mean().item()
        return metrics


class Reader:
    """Takes rows of the data set as they are."""

    def __init__(self, cfg: RunConfig, feed: ExampleFeed) -> None:
        self.cfg, self.feed = cfg, feed

    def state(self) -> dict[str, Any]:
        return {"data": self.feed.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.feed.restore(state["data"])

    async def collect(self, *, baseline: bool) -> Lot:
        del baseline
        wanted = self.cfg.train_batch_size // self.cfg.group_size
        return self.lot(await asyncio.to_thread(self.feed.take, wanted))

    def lot(self, examples: Sequence[Example]) -> Lot:
        """A preference pair becomes two rows of one group, the chosen one first; the others one row each.

        With KTO, a row of zero weight for each: its prompt with another row's answer, for the baseline.
        """
        parts = [(e, c, i, +1 - 2 * k if len(e.completions) == 2 else 0)
                 for i, e in enumerate(examples) for k, c in enumerate(e.completions)]  # fmt: skip
        own = len(parts)
        if self.cfg.algorithm.name == "kto":
            limit = self.cfg.max_prompt_length + self.cfg.max_response_length
            try:
                partners = mismatch([e.prompt_ids for e in examples])
            except ValueError as error:
                raise DataError(str(error)) from error
            for i, other in enumerate(partners):
                said, room = examples[other].completions[0], limit - len(examples[i].prompt_ids)
                parts.append((examples[i], Completion(said.ids[:room], said.mask[:room], said.text), i, 0))
        batch = Batch([f"{e.id}/{place}" for place, (e, *_) in enumerate(parts)])
        batch["prompt_ids"] = Ragged.from_rows([e.prompt_ids for e, *_ in parts], torch.int64)
        batch["group"] = torch.tensor([i for _, _, i, _ in parts])
        batch["response_ids"] = Ragged.from_rows([c.ids for _, c, *_ in parts], torch.int64)
        answer = Ragged.from_rows([c.mask for _, c, *_ in parts], torch.bool)
        mask = answer.with_values(answer.values & (answer.row_index < own))
        batch["response_mask"] = mask
        batch["preferred"] = torch.tensor([preferred for *_, preferred in parts])
        if all(e.label is not None for e in examples):
            batch["label"] = torch.tensor([float(bool(e.label)) for e, *_ in parts], dtype=torch.float64)
        if any(e.margin is not None for e in examples):
            margins = [math.nan if e.margin is None else e.margin for e, *_ in parts]
            batch["margin"] = torch.tensor(margins, dtype=torch.float64)
        if len(parts) > own:
            batch[ANSWER_MASK] = answer
            batch[MISMATCHED] = torch.tensor([-1] * own + list(range(own)))
        tokens = len(batch.ragged("prompt_ids").values) + len(batch.ragged("response_ids").values)
        metrics: dict[str, float | None] = {"response/length_mean": mask.lengths[:own].double().mean().item()}
        return Lot(batch, metrics, frozenset(range(own, len(parts))), tokens)


def _telling(collected: Collected, n: int) -> list[int]:
    """Rows of the groups whose scored rows don't all have the same reward; groups lie in runs of ``n``."""
    totals, found = collected.scores.totals, list[int]()
    for start in range(0, len(totals), n):
        group = range(start, start + n)
        if len({totals[i] for i in group if totals[i] is not None}) > 1:
            found += group
    return found


async def gather(tasks: Iterable[Awaitable[Any]]) -> None:
    """Run side by side; the first failure cancels the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(_as_coroutine(task))
    except* Exception as failures:
        raise failures.exceptions[0] from None


async def _as_coroutine(task: Awaitable[Any]) -> Any:
    return await task


def _place(row: Row) -> tuple[int, int]:
    return row.draw.number, row.sample
