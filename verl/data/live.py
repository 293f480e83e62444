"""A source that grows while training goes on: rows appended to a JSONL file by anyone, or posted to a loopback port.

``{name: live, path: events.jsonl, port: 8700, when_empty: repeat, wait_timeout: 60}``. The file is the only truth:
what is posted is appended to it, and a saved position is a number of its rows.
"""

from __future__ import annotations

import hashlib
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import Field, ValidationError

from verl.config.errors import DataError
from verl.config.section import Section, faults
from verl.data.endpoint import Endpoint, is_object
from verl.data.feeds import Stopped
from verl.data.order import PromptOrder, check_saved
from verl.data.policies import BadRows, Encoder, Numbered
from verl.data.sources import Broken, Row, Source, read_line

T = TypeVar("T")
POLL = 0.1  # seconds between looks at a file that may have grown


def is_live(source: Any) -> bool:
    return isinstance(source, Mapping) and source.get("name") == "live"


class LiveSource(Section):
    """Where events come from, and what a lap does that finds too few."""

    name: Literal["live"]
    path: str
    port: int | None = Field(None, ge=0, le=65535)  # of 127.0.0.1; 0: any free one, none: the file only
    when_empty: Literal["repeat", "wait"] = "repeat"  # go on with earlier rows, or wait for new ones
    wait_timeout: float | None = Field(None, gt=0)  # seconds without a new row; none: wait for ever

    @staticmethod
    def of(spec: Mapping[str, Any]) -> LiveSource:
        """DataError names every wrong key."""
        try:
            return LiveSource.model_validate(dict(spec))
        except ValidationError as error:
            raise DataError(f"live source: {faults(error)}") from error

    @property
    def file(self) -> Path:
        return Path(self.path).expanduser()

    def open(self) -> Source:
        """The rows that are there now; without the file, none."""

        def rows() -> Sequence[Row | Broken]:
            offset, found = 0, []
            while (line := _line_at(self.file, offset)) is not None:
                text, offset = line
                found.append(read_line(text, str(self.file)))
            return found

        return Source(f"live source {self.path}", rows, lambda: iter(rows()))


class LiveFeed(Generic[T]):
    """Draws rows in order of arrival, each as soon as it is there; see ``take``.

    ``rows`` reads one line of the file: its number, and the bad-row policy. Held in memory: where each line begins.
    """

    def __init__(
        self,
        source: LiveSource,
        rows: Callable[[Row | Broken, int, BadRows], Sequence[Numbered]],
        encoder: Encoder[T],
        fingerprint: str,
        seed: int,
        shuffle: bool,
    ) -> None:
        self.source, self._rows, self._encoder, self.fingerprint = source, rows, encoder, fingerprint
        self.seed, self.shuffle = seed, shuffle
        self._starts = array("q")  # where each row that was drawn begins
        self._offset = 0  # where the next one does
        self._digest = hashlib.sha256()  # of the rows drawn: a restored position belongs to the same file
        self._order: PromptOrder | None = None  # of the repeated rows
        self._spare: list[T] = []  # of row `_latest`, where a row gives two examples and one was wanted
        self._latest = 0
        self._news, self._closed, self._stopped = threading.Event(), False, False
        self._endpoint = None
        if source.port is not None:
            self._endpoint = Endpoint(source.port, source.file, self._refuse, self._news)

    @property
    def address(self) -> str | None:
        """Where rows can be posted, ``http://127.0.0.1:PORT/``."""
        return self._endpoint.address if self._endpoint is not None else None

    @property
    def counts(self) -> Mapping[str, int]:
        """Of the rows that arrived; repeats don't count."""
        return self._encoder.counts

    @property
    def size(self) -> int | None:
        return None

    @property
    def epoch(self) -> float:
        """Passes over earlier rows; 0 while all rows are new."""
        return float(self._order.taken // self._order.n) if self._order is not None else 0.0

    def take(self, k: int) -> list[T]:
        """Rows that arrived since, in their order; with too few of them earlier ones, or it waits for more.

        Earlier rows come in a seeded order, each once in a pass over all that had arrived when the pass began. While
        there is nothing to repeat, ``repeat`` waits too. DataError after ``wait_timeout`` without a new row, for a bad
        row, and when the feed is closed meanwhile; the position is then where it was before.
        """
        before = self._offset, len(self._starts), self._digest.copy(), list(self._spare), self._latest
        order, counts = self._order.state() if self._order is not None else None, dict(self.counts)
        try:
            return self._take(k)
        except BaseException:
            self._offset, drawn, self._digest, self._spare, self._latest = before
            del self._starts[drawn:]
            self._set_order(order)
            self._set_counts(counts)
            raise

    def _take(self, k: int) -> list[T]:
        items: list[T] = []
        since = time.monotonic()
        while len(items) < k:
            if self._spare:
                items.append(self._spare.pop(0))
            elif (line := _line_at(self.source.file, self._offset)) is not None:
                self._spare, self._latest = self._draw(*line), len(self._starts) - 1
                since = time.monotonic()
            elif self.source.when_empty == "repeat" and self.counts["kept"]:
                self._latest = self._next_repeated()
                self._spare = self._again(self._latest)
            else:
                self._wait(since, k - len(items))
        return items

    def _draw(self, text: bytes, end: int) -> list[T]:
        """The items of the row that begins at ``_offset``."""
        number = len(self._starts)
        self._starts.append(self._offset)
        self._offset = end
        self._digest.update(text + b"\n")
        return self._encode(text, number)

    def _encode(self, text: bytes, number: int) -> list[T]:
        rows = self._rows(read_line(text, str(self.source.file)), number, self._encoder.bad)
        self._encoder.bad.check()
        return list(self._encoder(rows))

    def _again(self, number: int) -> list[T]:
        """The items of an earlier row, from the file."""
        line = _line_at(self.source.file, self._starts[number])
        if line is None:
            raise DataError(f"{self.source.file}: row {number} is gone; rows may only be added while a run goes on")
        counts = dict(self.counts)
        items = self._encode(line[0], number)
        self._set_counts(counts)
        return items

    def _next_repeated(self) -> int:
        order = self._order
        if order is None or order.taken % order.n == 0:  # the next pass has all rows that arrived meanwhile
            passes = order.taken // order.n if order is not None else 0
            order = self._order = PromptOrder(len(self._starts), self.seed, self.shuffle)
            order.taken = passes * order.n
        return order.take(1)[0]

    def _wait(self, since: float, missing: int) -> None:
        limit = self.source.wait_timeout
        if limit is not None and time.monotonic() - since > limit:
            raise DataError(f"{self.source.file}: no new row for {limit:g} s, {missing} more are needed for the lap")
        if not self._stopped:
            self._news.wait(POLL)
            self._news.clear()
        if self._stopped:
            raise Stopped
        if self._closed:
            raise DataError(f"{self.source.file}: the feed was closed while it waited for rows")

    def _refuse(self, row: Row, number: int) -> str | None:
        """Why a posted row can't be used; None when its columns fit."""
        bad = BadRows("the body")
        try:
            self._rows(row, number, bad)
            bad.check()
        except DataError as error:
            return str(error)
        return None

    def state(self) -> dict[str, Any]:
        return {
            "rows": len(self._starts),
            "digest": self._digest.hexdigest(),
            "order": self._order.state() if self._order is not None else None,
            "latest": self._latest,
            "spare": len(self._spare),
            "counts": dict(self.counts),
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken; DataError for another seed, or when the file's rows are others."""
        check_saved(state, seed=self.seed, shuffle=self.shuffle)
        self._starts, self._offset, self._digest = array("q"), 0, hashlib.sha256()
        while len(self._starts) < state["rows"] and (line := _line_at(self.source.file, self._offset)) is not None:
            text, end = line
            self._starts.append(self._offset)
            self._digest.update(text + b"\n")
            self._offset = end
        if self._digest.hexdigest() != state["digest"]:
            raise DataError(
                f"{self.source.file}: its first {state['rows']} rows aren't those that the saved position counts; "
                "rows may only be added"
            )
        self._set_order(state["order"])
        self._latest = int(state["latest"])
        left = int(state["spare"])
        self._spare = self._again(self._latest)[-left:] if left else []
        self._set_counts(state["counts"])

    def stop(self) -> None:
        self._stopped = True
        self._news.set()

    def close(self) -> None:
        """Close the port; a ``take`` that waits in another thread raises."""
        self._closed = True
        self._news.set()
        if self._endpoint is not None:
            self._endpoint.close()

    def _set_order(self, state: dict[str, Any] | None) -> None:
        self._order = None
        if state is not None:
            self._order = PromptOrder(int(state["n"]), self.seed, self.shuffle)
            self._order.restore(state)

    def _set_counts(self, counts: Mapping[str, int]) -> None:
        self._encoder.counts.update(counts)


def _line_at(file: Path, offset: int) -> tuple[bytes, int] | None:
    """``(line, where the next begins)`` of the first line from ``offset`` on that isn't blank.

    None while there is none, or only a half-written one.
    """
    try:
        with file.open("rb") as stream:
            if offset > stream.seek(0, 2):
                raise DataError(f"{file} got shorter than what was read of it; rows may only be added")
            stream.seek(offset)
            while line := stream.readline():
                text = line.strip()
                if text and (line.endswith(b"\n") or is_object(text)):
                    return text, stream.tell()
                if text:
                    return None
    except FileNotFoundError:
        pass
    except OSError as error:
        raise DataError(f"{file} can't be read: {error}") from error
    return None
