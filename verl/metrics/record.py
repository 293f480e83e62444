"""One step's metrics go in, every sink gets them: finite, documented, in order of steps."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from verl.config.errors import RequestError
from verl.metrics.names import UndocumentedMetric, find, nearest

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where metrics go."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take one step; ``values`` are finite, absent ones do not exist. Steps only grow."""

    def close(self) -> None:
        """Flush and let go of files, ports and the screen; a second call does nothing."""


@dataclass(frozen=True)
class Sample:
    """One row for people to read. ``logprobs`` are the sampler's, one per id of ``response_ids`` that it sampled.

    ``chosen``: which ids these are, 1 or 0; None: all. ``group_rewards``: of all answers to the prompt, this one's too.
    """

    row_id: str
    prompt: str
    response: str
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    reward: float | None  # None: every reward abstained
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    version: int = 0
    chosen: Sequence[int] | None = None
    group_rewards: Sequence[float | None] = ()


class SampleSink(Protocol):
    """Where samples go."""

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None: ...


def check_alarms(above: Iterable[str], below: Iterable[str]) -> None:
    """``RequestError`` for the name of a limit that no metric has."""
    for key, names in (("alarms", above), ("alarms_below", below)):
        for name in names:
            if find(name) is None:
                raise RequestError(f"metrics.{key}: no metric is called {name!r}; nearest: {nearest(name)!r}")


class Recorder:
    """Fans each step out to the sinks.

    ``alarms`` and ``alarms_below``: upper and lower limits by metric name; a value beyond its limit is logged as a
    warning and counted in ``alarms``.
    A name that the table lacks warns with `UndocumentedMetric`, once.
    Raises `RequestError` for an alarm on an unknown metric.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        sample_sinks: Sequence[SampleSink] = (),
        *,
        alarms: Mapping[str, float] | None = None,
        alarms_below: Mapping[str, float] | None = None,
    ) -> None:
        self._sinks, self._sample_sinks = list(sinks), list(sample_sinks)
        self._above, self._below = dict(alarms or {}), dict(alarms_below or {})
        self._last: int | None = None
        self._warned: set[str] = set()
        self._documented: set[str] = set()
        check_alarms(self._above, self._below)

    def step(self, step: int, values: Mapping[str, float | None]) -> dict[str, float]:
        """Write one step and give back what was written.

        ``None`` is a value that does not exist. NaN and infinities are left out too, and counted in ``not_finite``.
        Raises ``ValueError`` when ``step`` is not above the last one: a step is one line.
        """
        if self._last is not None and step <= self._last:
            raise ValueError(f"step {step} was recorded after step {self._last}")
        self._last = step
        present = {name: float(value) for name, value in values.items() if value is not None}
        finite = {name: value for name, value in present.items() if math.isfinite(value)}
        if len(finite) < len(present):
            finite["not_finite"] = float(len(present) - len(finite))
            for name in sorted(present.keys() - finite.keys() - self._warned):
                log.warning("step %d: %s is %s; further such steps are only counted", step, name, present[name])
                self._warned.add(name)
        beyond = [(name, "above", limit) for name, limit in self._above.items() if finite.get(name, limit) > limit]
        beyond += [(name, "below", limit) for name, limit in self._below.items() if finite.get(name, limit) < limit]
        if beyond:
            finite["alarms"] = float(len({name for name, _, _ in beyond}))
            for name, side, limit in beyond:
                log.warning("step %d: %s is %g, %s its limit %g", step, name, finite[name], side, limit)
        for name in sorted(values.keys() - self._documented):
            self._documented.add(name)  # or warned about: once
            if find(name) is None:
                warnings.warn(f"{name!r} is not in verl/metrics/names.py", UndocumentedMetric, stacklevel=2)
        for sink in self._sinks:
            sink.write(step, finite)
        return finite

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Hand rows of the step to the sample sinks."""
        for sink in self._sample_sinks:
            sink.write_samples(step, samples)

    def close(self) -> None:
        """Close every sink, also after one of them fails; the first failure is raised."""
        failures = []
        both: list[Sink | SampleSink] = [*self._sinks, *self._sample_sinks]
        for sink in {id(s): s for s in both}.values():  # one object may be both
            try:
                sink.close()
            except Exception as error:  # raised below
                failures.append(error)
        if failures:
            raise failures[0]


def mean_present(values: Iterable[float | None]) -> tuple[float | None, int]:
    """``(mean, count)`` over the values that exist; ``None`` and NaN are "no opinion"; the mean of none is ``None``.

    ``mean_present([0.5, nan, nan, 0.8, 0.6, 0.7])`` is ``(0.65, 4)``. Infinities count: they are wrong, not absent.
    """
    present = [value for value in values if value is not None and not math.isnan(value)]
    return (math.fsum(present) / len(present) if present else None), len(present)


def with_count(name: str, values: Iterable[float | None]) -> dict[str, float | None]:
    """A sparse column as two metrics: ``name`` (mean over present values) and ``name/count``."""
    mean, count = mean_present(values)
    return {name: mean, f"{name}/count": float(count)}
