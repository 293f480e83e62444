"""What controller and hosts say to each other. Rows are numbers within their lap; tokens are never part of it."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.batch import Batch, Ragged
from verl.hybrid.publish import Transfer
from verl.rewards.base import Scores
from verl.rollout.base import Sampling
from verl.seats import Seats
from verl.workers.lap import Mean, Most
from verl.workers.rollout import Draw

POOL = -1  # the "lap" of sampled rows that no lap has accepted yet; numbered by the controller as it asks for them


def compact(rows: list[int]) -> Sequence[int]:
    """The same numbers; a run of them takes no room."""
    run = range(rows[0], rows[-1] + 1) if rows else range(0)
    return run if len(run) == len(rows) and rows == list(run) else rows


@dataclass(frozen=True)
class Fetch:
    """Columns of rows that another host holds."""

    host: int
    rows: Sequence[int]
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Order:
    """One op on the rows of one rank. ``forward`` and ``update`` are that rank's seats alone; ``others``: rows that the
    op sees beside those, or all its rows where it has no seats."""

    role: str
    op: str
    step: int
    kl_coef: float
    columns: tuple[str, ...]  # that the op may see
    forward: Seats | None = None
    update: Seats | None = None
    others: Sequence[int] = ()
    fetch: tuple[Fetch, ...] = ()

    @property
    def rows(self) -> Sequence[int]:
        """All rows of the op here, ascending."""
        seated = [seats.rows(0) for seats in (self.forward, self.update) if seats is not None]
        if not seated:
            return self.others
        return compact(sorted({row for micros in seated for micro in micros for row in micro}.union(self.others)))


@dataclass(frozen=True)
class Done:
    """What an op leaves for the controller. Times are the machine's clock (``time.time``)."""

    start: float
    end: float
    metrics: dict[str, float | Mean | Most | None]
    columns: tuple[str, ...]  # written for the order's rows
    trained: list[bool] | None = None
    kl_per_response: float | None = None
    fetched: Sequence[Transfer] = ()  # columns that came from other hosts
    waited: float = 0.0  # seconds for all of them


def transfer_of(part: Batch, seconds: float, source: int, target: int) -> Transfer:
    """Columns that came from another host; of those that are no tensors the size isn't counted."""
    values = {name: column.values if isinstance(column, Ragged) else column for name, column in part.columns.items()}
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    return Transfer(
        tuple(values),
        tuple(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)),
        sum(tensor.numel() for tensor in tensors),
        sum(tensor.nbytes for tensor in tensors),
        seconds, source, target,
    )  # fmt: skip


def mark_of(draws: Sequence[Draw]) -> int:
    """Another one for prompts of other tokens, but for one time in four billion."""
    mark = 0
    for draw in draws:
        mark = zlib.crc32(array("q", draw.prompt.ids), mark)
    return mark


@dataclass(frozen=True)
class Ask:
    """``n`` responses to each draw; row ``first + i * n + k`` of the pool is response ``k`` to draw ``i``.

    Draws are told whole or, where hosts can look them up, as their numbers and rows of the training data, with
    ``mark_of`` them.
    """

    draws: Sequence[Draw] | tuple[list[int], list[int], int]
    first: int
    n: int
    sampling: Sampling
    feeders: int
    score: bool  # here, while other rows are still sampled
    stops: bool  # ``Stopped`` as soon as sampling is to stop


@dataclass(frozen=True)
class Sampled:
    """Facts of the rows asked for, in their order."""

    lengths: list[int]  # response tokens
    sampled: list[int]  # those of them that the policy chose
    turns: list[int]  # messages of the policy
    finish_reasons: list[str]
    versions: list[int]
    seconds: array[float]
    logprobs: array[float]  # sum over the sampled tokens, under the density they were drawn from
    scores: Scores | None
    generate_seconds: float
    reward_seconds: float


@dataclass(frozen=True)
class Accept:
    """Rows of the pool become a lap's rows, under new numbers; all others of the pool go."""

    step: int
    pool: Sequence[int]
    rows: Sequence[int]
    scores: array[float]  # NaN: none
    kept: list[bool]  # False: in no loss and no statistics
    greedy: list[float] | None = None  # of the prompt's greedy answer
    parts: list[dict[str, float | None]] | None = None  # each reward by itself
    more: tuple[str, ...] = ()  # columns of the pool that the lap has, too


@dataclass(frozen=True)
class Shown:
    """A sampled row, for people."""

    ids: array[int]
    logprobs: array[float]
    chosen: tuple[bool, ...] | None = None  # as many as logprobs: False where nothing was sampled; None: all were

    def text(self, tokenizer: PreTrainedTokenizerBase) -> str:
        return str(tokenizer.decode(self.ids.tolist(), skip_special_tokens=True))


@dataclass
class Put:
    """Rows of the data set, for a lap that trains on them as they are."""

    step: int
    rows: Sequence[int]
    batch: Batch = field(repr=False)
