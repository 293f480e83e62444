"""Scoring rows: every reward of the run, weighted and added, with stated policies for the ones that fail."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from verl.config.errors import RequestError, RewardError
from verl.data.chat import Message, join
from verl.rewards.calls import InProcess, Outcome, RewardShapeError, is_async
from verl.rewards.functions import Model, Score, read_batch, read_row, resolve, unique
from verl.rewards.match import Binding, bind
from verl.rewards.pool import Job, Pool, default_size

if TYPE_CHECKING:
    import torch

    from verl.config.model import RewardModelConfig
    from verl.config.run import RunConfig

log = logging.getLogger(__name__)
Failure = Literal["error", "drop", "default"]
_TOLD = 3  # failing rows logged one by one, per reward and call of score
_EXCERPT = 120  # characters


@dataclass(frozen=True)
class RewardRow:
    """One finished row as rewards see it: text is decoded without special tokens, ids are the sampler's own."""

    row_id: str
    prompt_id: str
    prompt: str  # as rendered for the policy
    response: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    finish_reason: str  # "stop" or "length"
    fields: dict[str, Any] = field(default_factory=dict)  # the data row's columns; "prompt" as its author wrote it
    messages: list[Message] | None = None  # of an episode: the prompt's, the policy's and the environment's

    @property
    def transcript(self) -> list[Message]:
        """The whole conversation as messages."""
        if self.messages is not None:
            return self.messages
        return join(self.fields.get("prompt", self.prompt), [{"role": "assistant", "content": self.response}])


@dataclass
class Scores:
    """Scores of ``B`` rows; every list has ``B`` entries in the rows' order, None where there is no opinion.

    ``totals``: sum of weight x reward over the rewards that have one. ``per_reward``: unweighted, by reward.
    ``extra``: numbers that functions returned beside the score, as ``<reward>/<key>``. ``counts``: ``abstained`` (rows
    on which no reward had an opinion), ``dropped`` (rows left out because a reward failed), ``failed`` and
    ``timed_out`` (values missing for that reason), ``truncated`` (reward-model inputs that were cut).
    """

    totals: list[float | None] = field(default_factory=list)
    per_reward: dict[str, list[float | None]] = field(default_factory=dict)
    extra: dict[str, list[float | None]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.totals)

    def __getstate__(self) -> dict[str, Any]:
        """A reward that is the total by itself travels with it: pickles keep one of two lists that are the same."""
        same = {name: self.totals if values == self.totals else values for name, values in self.per_reward.items()}
        return self.__dict__ | {"per_reward": same}

    @staticmethod
    def merge(parts: Sequence[Scores]) -> Scores:
        """The rows of all parts, in order. A key that a part lacks is None on its rows; counts add."""
        counts: Counter[str] = Counter()
        for part in parts:
            counts.update(part.counts)
        return Scores(
            [total for part in parts for total in part.totals],
            _joined((len(part), part.per_reward) for part in parts),
            _joined((len(part), part.extra) for part in parts),
            dict(counts),
        )

    def select(self, rows: Sequence[int]) -> Scores:
        """The named rows, in the named order; the counts stay those of the whole."""
        return Scores(
            [self.totals[i] for i in rows],
            {name: [values[i] for i in rows] for name, values in self.per_reward.items()},
            {name: [values[i] for i in rows] for name, values in self.extra.items()},
            dict(self.counts),
        )


class Rewards:
    """The rewards of a run. ``score`` may be called from several threads at once; ``close`` ends the processes.

    ``rewards``: see ``functions.resolve``. ``weights``: one each; default 1.
    ``timeout``: seconds for one call (one row; all rows of a batch function), None: no limit. ``failure``: what
    becomes of a row whose reward raised, overran or gave NaN: ``error`` raises ``RewardError``, ``drop`` leaves the
    row without a total, ``default`` takes ``default`` as that reward's value. ``module:function`` and the rules of
    ``rules.IN_WORKERS`` run in ``processes`` killable processes, callables in a thread of this one.
    Raises ``RequestError`` for what can't be set up.
    """

    def __init__(
        self,
        rewards: Sequence[Any],
        weights: Sequence[float] | None = None,
        timeout: float | None = 60.0,
        failure: Failure = "error",
        default: float = 0.0,
        processes: int | None = None,
    ) -> None:
        found = unique([resolve(spec, timeout) for spec in rewards])
        self._functions = [f for f in found if f.model is None]
        self._models = {f.name: f.model for f in found if f.model is not None}
        self._labels = {f.name: f.label for f in found}
        self.names = [f.name for f in found]
        if not self.names:
            raise RequestError("no reward: set reward_fn or reward_model_config")
        self._weights = [1.0] * len(self.names) if weights is None else [float(w) for w in weights]
        if len(self._weights) != len(self.names):
            raise RequestError(
                f"reward_weights: {len(self._weights)} numbers for {len(self.names)} rewards ({', '.join(self.names)})"
            )
        self._timeout, self._failure, self._default = timeout, failure, default
        self._match_lock = threading.Lock()
        self._columns: frozenset[str] | None = None
        self._bindings: list[Binding] = []
        self._local = {f.name: InProcess(f.function, f.label) for f in self._functions if f.target is None}
        targets = {f.name: f.target for f in self._functions if f.target is not None}
        self._numbers = {name: i for i, name in enumerate(targets)}
        self._pool = Pool(list(targets.values()), timeout, processes or default_size()) if targets else None

    @property
    def has_model(self) -> bool:
        """Whether scoring also computes on the device."""
        return bool(self._models)

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the scoring processes; batches still being scored fail. A second call does nothing."""
        if self._pool is not None:
            self._pool.close()
        for local in self._local.values():
            local.close()

    def check(self, columns: Collection[str]) -> None:
        """Match every function's arguments with the data's ``columns``; ``RequestError`` where one can't be filled.

        Without this call, the first rows' columns decide; after several, those of all.
        """
        for f in self._functions:
            bind(f.function, f.label, columns, f.options)
        self._match(columns)

    def score(self, rows: Sequence[RewardRow]) -> Scores:
        """Score rows; a lap's rows may come in several calls.

        Raises ``RewardError`` naming function and row when a reward fails under the policy ``error``, and whenever
        a reward returns something else than a value per row.
        """
        if not rows:
            return Scores()
        bound = list(zip(self._functions, self._match(set().union(*(row.fields for row in rows))), strict=True))
        counts: Counter[str] = Counter(abstained=0, dropped=0, failed=0, timed_out=0)
        eager = self._failure == "error"
        jobs: dict[str, Job] = {}
        modelled: dict[str, list[float]] = {}
        try:
            for function, binding in bound:
                if self._pool is not None and function.target is not None:
                    together = is_async(function.function) and not binding.batch
                    number, calls = self._numbers[function.name], binding.calls(rows)
                    jobs[function.name] = self._pool.submit(number, calls, together=together, eager=eager)
            # while the processes work: the functions of this process, then the models
            outcomes: dict[str, Sequence[Outcome | None]] = {
                function.name: self._local[function.name].run(binding.calls(rows), self._timeout, eager=eager)
                for function, binding in bound
                if function.target is None
            }
            for name, model in self._models.items():
                modelled[name], cut = model.evaluate(rows)
                counts["truncated"] += cut
            outcomes |= {name: job.wait() for name, job in jobs.items()}
        finally:
            for job in jobs.values():
                job.cancel()

        places = [f"row {i} ({row.row_id})" for i, row in enumerate(rows)]
        results = {f.name: _read(outcomes[f.name], f.label, binding.batch, places) for f, binding in bound}
        for name, values in modelled.items():
            label = self._labels[name]
            results[name] = [read_row(value, label, place) for value, place in zip(values, places, strict=True)]
        results = {name: results[name] for name in self.names}
        for name, scores in results.items():
            self._report(self._labels[name], scores, rows, counts)
        return self._add(results, counts)

    def _match(self, columns: Collection[str]) -> list[Binding]:
        with self._match_lock:
            if self._columns is None or not self._columns.issuperset(columns):
                known = (self._columns or frozenset()).union(columns)
                self._bindings = [bind(f.function, f.label, known, f.options) for f in self._functions]
                self._columns = known
            return self._bindings

    def _report(self, label: str, scores: Sequence[Score], rows: Sequence[RewardRow], counts: Counter[str]) -> None:
        """Count and tell the rows on which a reward failed; under the policy ``error`` the first one raises."""
        failed = [i for i, score in enumerate(scores) if score.failure is not None]
        for told, i in enumerate(failed):
            score, row = scores[i], rows[i]
            reason = f"did not return within {self._timeout:g} s" if score.timed_out else score.failure
            message = (
                f"reward {label}: row {i} ({row.row_id}) {reason}. "
                f"Prompt {row.prompt_id}: {excerpt(row.prompt)}; response: {excerpt(row.response)}"
            )
            if self._failure == "error":
                error = RewardError(f"{message}. reward_failure: drop or default would go on without it")
                if score.trace:
                    error.add_note(score.trace)
                raise error
            counts["timed_out" if score.timed_out else "failed"] += 1
            if told < _TOLD:
                value = "is left out" if self._failure == "drop" else f"gets {self._default:g}"
                log.warning("%s; the row %s (reward_failure: %s)", message, value, self._failure)
        if len(failed) > _TOLD:
            log.warning("reward %s: failed on %d of %d rows in all", label, len(failed), len(rows))

    def _add(self, results: dict[str, list[Score]], counts: Counter[str]) -> Scores:
        """Apply the failure policy and add up, row by row."""
        size = len(next(iter(results.values())))
        per_reward: dict[str, list[float | None]] = {}
        extra: dict[str, list[float | None]] = {}
        for name, scores in results.items():
            filled = self._default if self._failure == "default" else None
            per_reward[name] = [filled if s.failure is not None else s.value for s in scores]
            for i, result in enumerate(scores):
                for key, value in result.extra.items():
                    extra.setdefault(f"{name}/{key}", [None] * size)[i] = value
        totals: list[float | None] = []
        for i in range(size):
            present = [
                w * score
                for w, name in zip(self._weights, self.names, strict=True)
                if (score := per_reward[name][i]) is not None
            ]
            dropped = self._failure == "drop" and any(scores[i].failure is not None for scores in results.values())
            counts["dropped" if dropped else "abstained"] += dropped or not present
            totals.append(total(present) if present and not dropped else None)
        return Scores(totals, per_reward, extra, dict(counts))


def total(parts: Sequence[float]) -> float:
    """Their sum to twelve digits of the largest: 0.1 + 0.2 is 0.3. Rows whose totals are compared, in pairs and groups,
    must not differ by rounding."""
    largest, plain = max(map(abs, parts)), sum(parts)
    if len(parts) == 1 or not largest or not math.isfinite(plain):
        return plain
    return round(math.fsum(parts), 12 - math.ceil(math.log10(largest)))


def build_rewards(cfg: RunConfig, device: torch.device) -> Rewards:
    """The run's rewards, reward models loaded onto ``device``. Raises ``RequestError`` for what can't be set up."""
    from verl.config.model import reward_model_of  # scoring processes import this module, and load light

    def scorer(model: RewardModelConfig) -> Model:
        from verl.rewards.model import RewardModelScorer

        return RewardModelScorer(model, device)

    rewards: list[Any] = []
    for entry in cfg.reward_fn:
        model = reward_model_of(entry)
        rewards.append(entry if model is None else {"name": scorer(model), "as": entry.get("as")})
    if cfg.reward_model_config is not None:
        rewards.append(scorer(cfg.reward_model_config))
    return Rewards(rewards, cfg.reward_weights, cfg.reward_timeout, cfg.reward_failure, cfg.reward_default)


def _read(outcomes: Sequence[Outcome | None], label: str, batch: bool, places: Sequence[str]) -> list[Score]:
    """The rows' scores out of what the calls gave; a row that an eager end left unjudged has no opinion."""
    for outcome in outcomes:
        if outcome is not None and outcome.misshapen:
            raise RewardShapeError(f"reward {label}: {outcome.error}")
    if batch:
        outcome = outcomes[0]
        assert outcome is not None  # a job with one call ends with that call
        return read_batch(outcome.value, label, places) if outcome.ok else [Score.failed(outcome)] * len(places)
    return [
        Score() if outcome is None else read_row(outcome.value, label, place) if outcome.ok else Score.failed(outcome)
        for outcome, place in zip(outcomes, places, strict=True)
    ]


def _joined(parts: Iterable[tuple[int, dict[str, list[float | None]]]]) -> dict[str, list[float | None]]:
    joined: dict[str, list[float | None]] = {}
    size = 0
    for rows, columns in parts:
        for name, values in columns.items():
            joined.setdefault(name, []).extend([None] * (size - len(joined.get(name, []))) + values)
        size += rows
    return {name: values + [None] * (size - len(values)) for name, values in joined.items()}


def excerpt(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}...")
