"""A run directory's JSON lines, read while a run goes on writing them: an index of its samples, and its curves."""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from verl.config.errors import RequestError

PART = 1 << 23  # bytes that one ``refresh`` reads at most, to the end of the line
START = 80  # characters of an answer that the index keeps
_MARK = 64  # bytes before the place where reading stopped; other ones there: the file was cut back meanwhile


class Lines(ABC):
    """Whole lines of a file that grows; a line without its end waits for the next `refresh`.

    A file that was cut back or replaced (``verl resume``, ``--overwrite``) is read anew: ``generation`` grows.
    ``bad`` are the numbers of lines that could not be read; they are left out.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.generation = path, 0
        self.clear()

    def clear(self) -> None:
        """Forget what was read."""
        self.end, self.count, self.behind, self._last = 0, 0, 0, b""
        self.bad: list[int] = []

    @abstractmethod
    def take(self, values: dict[str, Any], start: int, size: int) -> None:
        """One line's object and where it lies; ``ValueError``, ``TypeError`` or ``KeyError`` if it is another thing."""

    def refresh(self, limit: int = PART) -> None:
        """Read what is new, ``limit`` bytes or a little more; ``behind`` are the bytes left for the next call.

        Raises `RequestError` for a file that can't be read; one that doesn't exist yet is empty.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self.end - _MARK))
                if file.read(min(_MARK, self.end)) != self._last:
                    self.generation += 1
                    self.clear()
                    file.seek(0)
                stop, self.behind = self.end + limit, 0
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    if self.end >= stop:
                        self.behind = max(0, os.fstat(file.fileno()).st_size - self.end)
                        break
                    self._add(line)
        except FileNotFoundError:
            if self.end:
                self.generation += 1
            self.clear()
        except OSError as error:
            raise RequestError(f"can't read {self.path}: {error.strerror}") from error

    def _add(self, line: bytes) -> None:
        self.count += 1
        try:
            self.take(_object(line), self.end, len(line))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            self.bad.append(self.count)
        self.end += len(line)
        self._last = (self._last + line)[-_MARK:]


def _object(line: bytes) -> dict[str, Any]:
    values = json.loads(line, parse_constant=lambda _: None)  # browsers know no NaN
    if not isinstance(values, dict):
        raise ValueError("no object")
    return values


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return value
    if value is None:
        return None
    raise ValueError(f"{value!r} is no number")


@dataclass(frozen=True, slots=True)
class Row:
    """What the index keeps of a sample. ``prompt`` counts different prompt texts; ``logprob`` is the tokens' mean."""

    start: int
    size: int
    step: int
    row_id: str
    prompt: int
    reward: float | None
    length: int
    finish_reason: str
    logprob: float | None
    text: str


class Samples(Lines):
    """The rows of ``samples.jsonl``: an index in memory; texts and tokens stay in the file."""

    def clear(self) -> None:
        super().clear()
        self.rows: list[Row] = []
        self.finish_reasons: set[str] = set()
        self._prompts: dict[bytes, int] = {}
        self._text, self._searched, self._with_text = "", 0, set[int]()

    def take(self, values: dict[str, Any], start: int, size: int) -> None:
        prompt, text, finish = values["prompt"], values["response"], values["finish_reason"]
        if not all(isinstance(value, str) for value in (prompt, text, finish)):
            raise ValueError("prompt, response and finish_reason are texts")
        key = blake2b(prompt.encode(errors="surrogatepass"), digest_size=12).digest()
        logprobs = values["logprobs"]
        if not isinstance(logprobs, dict):
            raise ValueError("logprobs is an object")
        row = Row(
            start, size, int(values["step"]), str(values["row_id"]), self._prompts.get(key, len(self._prompts)),
            _number(values["reward"]), len(values["response_ids"]), finish, _number(logprobs.get("mean")), text[:START],
        )  # fmt: skip
        self._prompts.setdefault(key, row.prompt)
        self.finish_reasons.add(finish)
        self.rows.append(row)

    def read(self, number: int) -> dict[str, Any]:
        """All of one row. ``LookupError`` where there is none, or where the file has changed meanwhile."""
        if not 0 <= number < len(self.rows):
            raise LookupError(f"there is no row {number}")
        try:
            values = _object(next(self._lines([number])))
        except (OSError, ValueError) as error:
            raise LookupError(f"{self.path.name} has changed") from error
        if (values.get("step"), values.get("row_id")) != (self.rows[number].step, self.rows[number].row_id):
            raise LookupError(f"{self.path.name} has changed")
        return values

    def find(
        self,
        order: str = "newest",
        *,
        finish_reason: str | None = None,
        step: int | None = None,
        prompt: int | None = None,
        text: str = "",
    ) -> Sequence[int]:
        """Numbers of the rows that fit, sorted by ``order``; rows that lack its value come last.

        ``text``: part of the prompt or the response, capitals or not. ``ValueError``: no such order;
        ``LookupError``: the file has changed meanwhile.
        """
        rows = self.rows
        found: Sequence[int] = range(len(rows))
        if finish_reason is not None:
            found = [i for i in found if rows[i].finish_reason == finish_reason]
        if step is not None:
            found = [i for i in found if rows[i].step == step]
        if prompt is not None:
            found = [i for i in found if rows[i].prompt == prompt]
        if text:
            fits = self._search(text.lower())
            found = [i for i in found if i in fits]
        if order in ("newest", "oldest"):
            return found[::-1] if order == "newest" else found
        name, _, way = order.rpartition(" ")
        if name not in ("reward", "length", "logprob") or way not in ("up", "down"):
            raise ValueError(f"rows aren't sorted by {order!r}")
        values = {i: value for i in found if (value := getattr(rows[i], name)) is not None}
        ranked = sorted(values, key=values.__getitem__, reverse=way == "down")
        return ranked + [i for i in found if i not in values]

    def _search(self, text: str) -> set[int]:
        """Rows with ``text``; a second search for the same one reads only the rows that are new."""
        if text != self._text:
            self._text, self._searched, self._with_text = text, 0, set()
        written = json.dumps(text, ensure_ascii=False)[1:-1]  # as it stands in the file
        new = range(self._searched, len(self.rows))
        try:
            for i, line in zip(new, self._lines(new), strict=True):
                if written in line.decode(errors="replace").lower():
                    values = _object(line)
                    if text in f"{values['prompt']}\n{values['response']}".lower():
                        self._with_text.add(i)
        except (OSError, ValueError, KeyError) as error:
            raise LookupError(f"{self.path.name} has changed") from error
        self._searched = len(self.rows)
        return self._with_text

    def _lines(self, numbers: Sequence[int]) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            for i in numbers:
                file.seek(self.rows[i].start)
                yield file.read(self.rows[i].size)


class Steps(Lines):
    """Chosen numbers of ``metrics.jsonl`` or ``eval.jsonl`` as points of curves, and all of the last line."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._names = names
        super().__init__(path)

    def clear(self) -> None:
        super().clear()
        self.last: dict[str, Any] = {}
        self.points: dict[str, list[tuple[int, float]]] = {name: [] for name in self._names}

    def take(self, values: dict[str, Any], start: int, size: int) -> None:
        step = int(values["step"])
        for name in self._names:
            if (value := _number(values.get(name))) is not None:
                self.points[name].append((step, value))
        self.last = values | {"step": step}


def thinned(points: Sequence[tuple[int, float]], most: int = 400) -> list[tuple[int, float]]:
    """At most ``most`` of the points: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    size = -(-len(points) // (most // 2))
    kept: list[tuple[int, float]] = []
    for i in range(0, len(points), size):
        part = points[i : i + size]
        low, high = min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])
        kept += sorted({low, high})
    return kept
