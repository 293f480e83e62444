"""Where a lap's rows come from: answers sampled and scored, or rows of the data set as they are.

Sampled rows lie on the hosts; here are their facts. Rows of a data set are packed here and handed to the hosts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from verl.algorithms.advantages import ESTIMATORS
from verl.algorithms.preference import mismatch
from verl.batch import Batch, Ragged
from verl.config.errors import DataError, RunError
from verl.config.run import RunConfig
from verl.data.examples import Completion, Example, ExampleFeed
from verl.data.feeds import OrderedFeed
from verl.data.loader import PromptFeed
from verl.metrics.names import member
from verl.metrics.readings import latency_percentiles
from verl.metrics.record import mean_present, with_count
from verl.rewards.base import Scores
from verl.rewards.rules import length as overlong
from verl.rollout.base import Sampling
from verl.runtime.crew import Crew
from verl.runtime.host import gather
from verl.runtime.orders import POOL, Accept, Ask, Put, Sampled, Shown, compact, mark_of
from verl.workers.offline import ANSWER_MASK, MISMATCHED
from verl.workers.rollout import Draw

ONE_PROMPT = (
    "KTO's baseline pairs each prompt with the answer to another one, but all rows have one prompt; it needs "
    "rows of at least two prompts"
)
SHOWN = 4  # rows of a lap whose texts are told, evenly spaced


@dataclass(frozen=True)
class Fact:
    """What is known here of a sampled row; ``place`` is its number in the pool of ``host``."""

    draw: Draw
    sample: int
    host: int
    place: int
    length: int
    sampled: int  # tokens that the policy chose
    turns: int
    finish_reason: str
    version: int
    seconds: float
    logprobs: float  # sum over the sampled tokens

    @property
    def id(self) -> str:
        return f"{self.draw.id}/{self.sample}"


@dataclass
class Collected:
    """Scored rows in the order of their draws, whatever order they finished in."""

    rows: list[Fact]
    scores: Scores
    generate_seconds: float
    reward_seconds: float
    shown: dict[int, Shown] = field(default_factory=dict)  # some rows' texts, by place

    @staticmethod
    def merge(parts: Sequence[Collected]) -> Collected:
        return Collected(
            [row for part in parts for row in part.rows],
            Scores.merge([part.scores for part in parts]),
            sum(part.generate_seconds for part in parts),
            sum(part.reward_seconds for part in parts),
        )

    def select(self, rows: Sequence[int]) -> Collected:
        return dataclasses.replace(self, rows=[self.rows[i] for i in rows], scores=self.scores.select(rows))


@dataclass
class Lot:
    """One lap's rows by what seats need to know of them (``B`` entries each), and where their columns lie."""

    prompt_lengths: list[int]
    response_lengths: list[int]
    groups: list[int]
    loss_tokens: list[int]
    columns: tuple[str, ...]  # that lie on ``hosts`` to begin with
    hosts: list[int]
    metrics: dict[str, float | None]
    untrained: frozenset[int] = frozenset()  # rows that get no update
    collected: Collected | None = field(default=None, repr=False)
    batch: Batch | None = field(default=None, repr=False)  # rows of the data set

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def tokens(self) -> int:
        return sum(self.prompt_lengths) + sum(self.response_lengths)

    @property
    def trained(self) -> list[int]:
        return [i for i in range(len(self)) if i not in self.untrained]


class Sampler:
    """Draws prompts, has them answered and scored, and replaces flat groups where the algorithm asks for it."""

    def __init__(self, cfg: RunConfig, crew: Crew, feed: PromptFeed, *, scored: bool) -> None:
        self.cfg, self.crew, self.feed, self.scored = cfg, crew, feed, scored
        r = cfg.rollout
        self.sampling = Sampling(
            temperature=r.temperature, top_p=r.top_p, top_k=r.top_k, max_new_tokens=cfg.max_response_length,
            seed=cfg.seed, stop=tuple(r.stop),
        )  # fmt: skip
        self.greedy = dataclasses.replace(self.sampling, greedy=True)
        self.draws = 0
        self._placed = 0  # rows that were asked for
        self._step = 0  # the lap that is collected

    def state(self) -> dict[str, Any]:
        return {"draws": self.draws, "data": self.feed.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.draws = state["draws"]
        self.feed.restore(state["data"])

    # -- a lap's rows ----------------------------------------------------------------------------------------------

    async def collect(self, step: int, *, baseline: bool) -> Lot:
        """Rollouts of one version until ``train_batch_size`` rows are there. ``baseline``: and a greedy answer each."""
        self._step = step
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
            greedy = await self.sample(draws, 1, self.greedy, own=True)
            collected.generate_seconds += greedy.generate_seconds
            collected.reward_seconds += greedy.reward_seconds
        n = len(collected.rows)
        picked = [i * n // min(SHOWN, n) for i in range(min(SHOWN, n))]
        collected.shown = dict(zip(picked, await self.show([collected.rows[i] for i in picked]), strict=True))
        penalties = self._penalties(collected)
        totals = [math.nan if t is None else t for t in collected.scores.totals]
        if penalties is not None:
            totals = [t + p for t, p in zip(totals, penalties, strict=True)]
        metrics = self._metrics(collected, totals) | metrics
        if penalties is not None:
            metrics["reward/overlong_penalty"] = sum(penalties) / len(penalties)
        if greedy is not None:
            metrics["reward/greedy_mean"] = mean_present(greedy.scores.totals)[0]
        return await self._accept(step, collected, totals, greedy, metrics)

    async def _round(self, prompts: int) -> Collected:
        cfg = self.cfg
        drawn = await asyncio.to_thread(self.feed.take, prompts)  # a live source may wait
        draws = [Draw(self.draws + i, prompt) for i, prompt in enumerate(drawn)]
        self.draws += len(draws)
        feeders = cfg.num_rollout_workers if cfg.rollout.environment is None else 1  # who feeds also waits for turns
        return await self.sample(draws, cfg.group_size, self.sampling, feeders, own=True)

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
                    f"dynamic sampling: of {sampled} groups sampled, {sampled - len(kept.rows) // n} got one reward, "
                    f"or none, on all their {n} rows; {len(kept.rows) // n} of {wanted} are there after "
                    f"algorithm.max_refills {cfg.algorithm.max_refills}. Prompts of another difficulty, a larger "
                    "group_size, a larger algorithm.max_refills, or algorithm.dynamic_sampling false would go on"
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
            algorithm.overlong_factor * overlong(range(row.length), max_tokens=limit, buffer=buffer)
            for row in collected.rows
        ]

    async def sample(
        self, draws: Sequence[Draw], n: int, sampling: Sampling, feeders: int = 1, *, own: bool = False
    ) -> Collected:
        """``n`` scored rows for each draw, spread over the hosts that sample. ``own``: drawn from the training data.

        ``feeders`` requests run side by side; those of one host share its engine's batch.
        """
        hosts = self.crew.of("rollout")
        scorers = self.crew.of("reward") if self.scored else ()
        first = self._placed
        self._placed += len(draws) * n

        async def share(i: int) -> Collected | None:
            start, end = (k * len(draws) // len(hosts) for k in (i, i + 1))
            if start == end:
                return None
            mine, rank = draws[start:end], hosts[i]
            here = rank in scorers
            drawn = self._told(mine) if own else mine
            ask = Ask(drawn, first + start * n, n, sampling, max(1, feeders // len(hosts)), here, stops=own)
            async with self.crew.hold(self.crew.placement.span(rank)):
                told: Sampled = await self.crew.one(rank, "rollout.generate", self._step, "generate", ask)
            places = range(ask.first, ask.first + len(mine) * n)
            scores, seconds = told.scores, told.reward_seconds
            if scores is None and scorers:
                scorer = scorers[i % len(scorers)]
                async with self.crew.hold([scorer]):
                    begin = time.perf_counter()
                    scores = await self.crew.one(scorer, "reward.score", self._step, "score", list(places), rank)
                    seconds = time.perf_counter() - begin
            samples = [(draw, k) for draw in mine for k in range(n)]
            rows = [
                Fact(draw, k, rank, *facts)
                for (draw, k), *facts in zip(
                    samples, places, told.lengths, told.sampled, told.turns, told.finish_reasons, told.versions,
                    told.seconds, told.logprobs, strict=True,
                )
            ]  # fmt: skip
            return Collected(rows, scores or Scores([None] * len(rows)), told.generate_seconds, seconds)

        parts = [part for part in await gather([share(i) for i in range(len(hosts))]) if part is not None]
        merged = Collected.merge(parts)
        merged.generate_seconds = max((part.generate_seconds for part in parts), default=0.0)  # side by side
        merged.reward_seconds = max((part.reward_seconds for part in parts), default=0.0)
        return merged

    def _told(self, draws: Sequence[Draw]) -> Sequence[Draw] | tuple[list[int], list[int], int]:
        """Draws as the hosts are told them: the training data's own, which hosts have too, as rows of it."""
        if self.crew.alone or not isinstance(self.feed, OrderedFeed):
            return draws
        return [draw.number for draw in draws], [int(draw.prompt.id) for draw in draws], mark_of(draws)

    async def show(self, rows: Sequence[Fact]) -> list[Shown]:
        """Texts and tokens of sampled rows, while no lap has accepted them."""
        by_host = _by_host(row.host for row in rows)
        calls = {host: (POOL, [rows[i].place for i in places]) for host, places in by_host.items()}
        found = await self.crew.each("show", calls)
        shown = {i: told for host, places in by_host.items() for i, told in zip(places, found[host], strict=True)}
        return [shown[i] for i in range(len(rows))]

    async def _accept(
        self, step: int, collected: Collected, totals: list[float], greedy: Collected | None,
        metrics: dict[str, float | None],
    ) -> Lot:  # fmt: skip
        """The lap's rows, in the order of their draws. A row without a score leaves loss and statistics."""
        rows, recipe = collected.rows, self.cfg.algorithm.recipe
        judged = "reward" in recipe.needs  # else scores are only told
        kept = [not (judged and math.isnan(t)) for t in totals]
        if self.cfg.algorithm.mask_truncated:
            kept = [k and row.finish_reason != "length" for k, row in zip(kept, rows, strict=True)]
        by_draw: dict[int, float] = {}
        if greedy is not None:
            values = [math.nan if t is None else t for t in greedy.scores.totals]
            by_draw = dict(zip((row.draw.number for row in greedy.rows), values, strict=True))
        by_parts = recipe.advantage is not None and "per_reward" in inspect.signature(
            ESTIMATORS[recipe.advantage]
        ).parameters  # fmt: skip
        named = collected.scores.per_reward if by_parts else {}
        more = ("chosen",) if self.cfg.algorithm.mask_truncated else ()

        def accept(places: list[int]) -> Accept:
            return Accept(
                step, compact([rows[i].place for i in places]), compact(places),
                array("d", [totals[i] for i in places]), [kept[i] for i in places],
                [by_draw[rows[i].draw.number] for i in places] if greedy is not None else None,
                [{name: v[i] for name, v in named.items()} for i in places] if named else None, more,
            )  # fmt: skip

        by_host = _by_host(row.host for row in rows)
        for host in self.crew.of("rollout"):  # where nothing is accepted, the pool is emptied all the same
            by_host.setdefault(host, [])
        await self.crew.each("accept", {host: (accept(places),) for host, places in by_host.items()})
        columns = ["prompt_ids", "group", "response_ids", "response_mask", "sampled_logprobs", "finish_reason"]
        columns += ["version", "scores", *more]
        columns += ["greedy_scores"] * (greedy is not None) + ["reward_parts"] * bool(named)
        return Lot(
            prompt_lengths=[len(row.draw.prompt.ids) for row in rows],
            response_lengths=[row.length for row in rows],
            groups=[row.draw.number for row in rows],
            loss_tokens=[row.sampled * k for row, k in zip(rows, kept, strict=True)],
            columns=tuple(columns),
            hosts=[row.host for row in rows],
            metrics=metrics,
            collected=collected,
        )

    def _metrics(self, collected: Collected, totals: Sequence[float]) -> dict[str, float | None]:
        rows, scores = collected.rows, collected.scores
        present = [t for t in scores.totals if t is not None]
        lengths = [row.length for row in rows]
        metrics: dict[str, float | None] = {
            "reward/mean": mean_present(scores.totals)[0],
            "reward/std": torch.tensor(present).std().item() if len(present) > 1 else None,
            "response/length_mean": sum(lengths) / len(lengths),
            "response/length_max": max(lengths),
            "response/truncated": sum(row.finish_reason == "length" for row in rows) / len(rows),
            # of all sampled tokens; the update replaces it by the exact value on the tokens that it trains
            "policy/entropy": -sum(row.logprobs for row in rows) / sum(row.sampled for row in rows),
            **latency_percentiles([row.seconds for row in rows]),
        }
        if self.cfg.rollout.environment is not None:
            metrics["response/sampled_mean"] = sum(row.sampled for row in rows) / len(rows)
            metrics["response/turns_mean"] = sum(row.turns for row in rows) / len(rows)
        if not self.scored:
            metrics |= {"reward/mean": None, "reward/std": None}
        for family, columns in (("reward/<name>", scores.per_reward), ("extra/<key>", scores.extra)):
            for name, values in columns.items():
                metrics |= with_count(member(family, name), values)
        metrics |= {f"reward/{name}": float(count) for name, count in scores.counts.items()}
        if self.cfg.group_size > 1 and self.scored:
            groups = torch.tensor(totals, dtype=torch.float64).view(-1, self.cfg.group_size)
            least, most = groups.nan_to_num(nan=math.inf).amin(1), groups.nan_to_num(nan=-math.inf).amax(1)
            metrics["reward/flat_groups"] = (least >= most).double().mean().item()  # of the rows that have one
        return metrics


class Reader:
    """Takes rows of the data set as they are."""

    def __init__(self, cfg: RunConfig, crew: Crew, feed: ExampleFeed) -> None:
        self.cfg, self.crew, self.feed = cfg, crew, feed

    def state(self) -> dict[str, Any]:
        return {"data": self.feed.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.feed.restore(state["data"])

    async def collect(self, step: int, *, baseline: bool) -> Lot:
        del baseline
        wanted = self.cfg.train_batch_size // self.cfg.group_size
        examples = await asyncio.to_thread(self.feed.take, wanted)
        one_prompt = self.cfg.algorithm.name == "kto" and len({e.prompt_ids for e in examples}) == 1
        if one_prompt and isinstance(self.feed, OrderedFeed):
            table = self.feed.table
            if all(table[i].prompt_ids == examples[0].prompt_ids for i in range(len(table))):
                raise DataError(f"dataset: {ONE_PROMPT}")
        lot = self.lot(examples, alone=one_prompt)
        if self.cfg.algorithm.name == "kto":
            lot.metrics["preference/one_prompt"] = float(one_prompt)
        await self.place(step, lot)
        return lot

    async def place(self, step: int, lot: Lot) -> None:
        """Hand the rows to the hosts that train on them, whole groups to each; other hosts fetch what they need."""
        assert lot.batch is not None
        hosts, groups = self.crew.of("actor"), {group: i for i, group in enumerate(dict.fromkeys(lot.groups))}
        lot.hosts = [hosts[groups[group] * len(hosts) // len(groups)] for group in lot.groups]
        calls = {
            host: (Put(step, rows, lot.batch if self.crew.alone else lot.batch.select(rows)),)
            for host, rows in _by_host(lot.hosts).items()
        }
        await self.crew.each("put", calls)

    def lot(self, examples: Sequence[Example], *, alone: bool = False) -> Lot:
        """A preference pair becomes two rows of one group, the chosen one first; the others one row each.

        With KTO, a row of zero weight for each: its prompt with another row's answer, for the baseline. ``alone``: all
        rows have one prompt, so there is none; their own answers stand there, of which no token counts.
        """
        parts = [(e, c, i, +1 - 2 * k if len(e.completions) == 2 else 0)
                 for i, e in enumerate(examples) for k, c in enumerate(e.completions)]  # fmt: skip
        own = len(parts)
        if self.cfg.algorithm.name == "kto":
            limit = self.cfg.max_prompt_length + self.cfg.max_response_length
            prompts = [e.prompt_ids for e in examples]
            if not alone and len(set(prompts)) == 1:
                raise DataError(f"eval.dataset: {ONE_PROMPT}")
            for i, other in enumerate(range(own) if alone else mismatch(prompts)):
                said, room = examples[other].completions[0], limit - len(examples[i].prompt_ids)
                mask = tuple(m and not alone for m in said.mask[:room])
                parts.append((examples[i], Completion(said.ids[:room], mask, said.text), i, 0))
        batch = Batch([f"{e.id}/{place}" for place, (e, *_) in enumerate(parts)])
        batch["prompt_ids"] = Ragged.from_rows([e.prompt_ids for e, *_ in parts], torch.int64)
        batch["group"] = torch.tensor([i for _, _, i, _ in parts])
        batch["response_ids"] = Ragged.from_rows([c.ids for _, c, *_ in parts], torch.int64)
        answer = Ragged.from_rows([c.mask for _, c, *_ in parts], torch.bool)
        trained = answer.with_values(answer.values & (answer.row_index < own))
        batch["response_mask"] = trained
        batch["preferred"] = torch.tensor([preferred for *_, preferred in parts])
        if all(e.label is not None for e in examples):
            batch["label"] = torch.tensor([float(bool(e.label)) for e, *_ in parts], dtype=torch.float64)
        if any(e.margin is not None for e in examples):
            margins = [math.nan if e.margin is None else e.margin for e, *_ in parts]
            batch["margin"] = torch.tensor(margins, dtype=torch.float64)
        if len(parts) > own:
            batch[ANSWER_MASK] = answer
            batch[MISMATCHED] = torch.tensor([-1] * own + list(range(own)))
        metrics: dict[str, float | None] = {"response/length_mean": trained.lengths[:own].double().mean().item()}
        counted = torch.zeros(len(parts), dtype=torch.int64).index_add_(0, trained.row_index, trained.values.long())
        return Lot(
            prompt_lengths=batch.ragged("prompt_ids").lengths.tolist(),
            response_lengths=trained.lengths.tolist(),
            groups=batch.tensor("group").tolist(),
            loss_tokens=counted.tolist(),
            columns=tuple(batch.columns),
            hosts=[],
            metrics=metrics,
            untrained=frozenset(range(own, len(parts))),
            batch=batch,
        )


def _telling(collected: Collected, n: int) -> list[int]:
    """Rows of the groups whose scored rows don't all have the same reward; groups lie in runs of ``n``."""
    totals, found = collected.scores.totals, list[int]()
    for start in range(0, len(totals), n):
        group = range(start, start + n)
        if len({totals[i] for i in group if totals[i] is not None}) > 1:
            found += group
    return found


def _by_host(hosts: Iterable[int]) -> dict[int, list[int]]:
    """Places by what stands there."""
    found: dict[int, list[int]] = {}
    for place, host in enumerate(hosts):
        found.setdefault(host, []).append(place)
    return found
