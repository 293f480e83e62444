"""Ways to draw from a data set: in a seeded order from a table, or while reading a stream."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from verl.config.errors import DataError
from verl.data.order import PromptOrder, check_saved
from verl.data.policies import BadRows, Encoder, Numbered

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Stopped(Exception):
    """Rows that were waited for aren't wanted any more."""


class Feed(Protocol[T]):
    """Prompts or examples in training order; the position is part of a checkpoint."""

    @property
    def fingerprint(self) -> str:
        """Changes with data, template, tokenizer and limits."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Rows kept, filtered, truncated; bad ones where they are dropped."""

    @property
    def size(self) -> int | None:
        """Items per epoch; None when only the end of a stream could tell."""

    @property
    def epoch(self) -> float:
        """Epochs drawn so far; whole ones only when the size is not known."""

    def take(self, k: int) -> list[T]: ...

    def state(self) -> dict[str, Any]:
        """JSON values from which ``restore`` goes on."""

    def restore(self, state: dict[str, Any]) -> None: ...

    def stop(self) -> None:
        """A ``take`` that waits for rows, now or later, raises `Stopped`."""

    def close(self) -> None:
        """Give back what the feed holds open; it is not drawn from again."""


class Table(Protocol[T_co]):
    """Everything tokenised: random access, what the policies did, and its mark."""

    counts: dict[str, int]
    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


class OrderedFeed(Generic[T]):
    """Draws from tokenised rows in a ``PromptOrder``."""

    def __init__(self, table: Table[T], seed: int, shuffle: bool) -> None:
        self.table, self.order = table, PromptOrder(len(table), seed, shuffle)
        self.fingerprint = table.fingerprint

    @property
    def counts(self) -> Mapping[str, int]:
        return self.table.counts

    @property
    def size(self) -> int | None:
        return len(self.table)

    @property
    def epoch(self) -> float:
        return self.order.epoch

    def take(self, k: int) -> list[T]:
        return [self.table[i] for i in self.order.take(k)]

    def state(self) -> dict[str, Any]:
        return self.order.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.order.restore(state)

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


class StreamFeed(Generic[T]):
    """Reads the data set anew each epoch and tokenises what is drawn; at most ``buffer`` rows are held.

    Shuffling is that of a buffer: a random row of it leaves when the next one comes in, as a function of
    ``(seed, epoch)``. ``restore`` reads up to the saved position again without tokenising. Row errors and
    ``overlong: error`` can only show up when the row is drawn.
    """

    def __init__(
        self,
        rows: Callable[[BadRows], Iterable[Numbered]],
        encoder: Encoder[T],
        fingerprint: str,
        seed: int,
        shuffle: bool,
        buffer: int = 1000,
    ) -> None:
        self._rows, self._encoder, self.fingerprint = rows, encoder, fingerprint
        self.seed, self.shuffle, self.buffer = seed, shuffle, buffer
        self._epoch, self._drawn = 0, 0  # whole epochs; rows drawn in this one, filtered ones too
        self._kept_before = 0  # `kept` when the epoch began
        self._left: Iterator[Numbered] | None = None

    @property
    def counts(self) -> Mapping[str, int]:
        return self._encoder.counts

    @property
    def size(self) -> int | None:
        return None

    @property
    def epoch(self) -> float:
        return float(self._epoch)

    def take(self, k: int) -> list[T]:
        """The next ``k`` items; may cross into the next epoch."""
        items: list[T] = []
        while len(items) < k:
            drawn = self._draw(k - len(items))
            if drawn:
                items += self._encoder(drawn)
                continue
            if self._encoder.counts["kept"] == self._kept_before:
                raise self._encoder.nothing_left()
            self._epoch, self._drawn, self._left = self._epoch + 1, 0, None
            self._kept_before = self._encoder.counts["kept"]
        return items

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "drawn": self._drawn,
            "kept_before": self._kept_before,
            "counts": dict(self._encoder.counts),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "buffer": self.buffer,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken; DataError for another seed or buffer, or when the stream got shorter."""
        check_saved(state, seed=self.seed, shuffle=self.shuffle, buffer=self.buffer)
        self._epoch, self._drawn, self._left = int(state["epoch"]), 0, None
        self._draw(int(state["drawn"]), keep=False)
        if self._drawn != int(state["drawn"]):
            raise DataError(
                f"{self._encoder.where} ends after {self._drawn} rows, the saved position is {state['drawn']}"
            )
        self._kept_before = int(state["kept_before"])
        self._encoder.counts.update(state["counts"])

    def stop(self) -> None:
        pass

    def close(self) -> None:
        self._left = None

    def _draw(self, k: int, keep: bool = True) -> Sequence[Numbered]:
        if self._left is None:
            rows = self._rows(self._encoder.bad)
            self._left = self._shuffled(rows) if self.shuffle else iter(rows)
        drawn = []
        for _ in range(k):
            row = next(self._left, None)
            if row is None:
                break
            self._drawn += 1
            if keep:
                drawn.append(row)
        return drawn

    def _shuffled(self, rows: Iterable[Numbered]) -> Iterator[Numbered]:
        rng = random.Random(f"{self.seed}/{self._epoch}")
        held: list[Numbered] = []
        for row in rows:
            if len(held) < self.buffer:
                held.append(row)
                continue
            place = rng.randrange(self.buffer)
            held[place], row = row, held[place]
            yield row
        rng.shuffle(held)
        yield from held
