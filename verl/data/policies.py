"""What happens to rows that can't be used as they are: too long ones, and bad ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeVar

from verl.config.errors import DataError

log = logging.getLogger(__name__)

Overlong = Literal["truncate", "filter", "error"]
BadRowPolicy = Literal["error", "drop"]
Numbered = tuple[str, dict[str, Any]]  # a row's number (of one that is read as two: with its side), and its columns
MOST_PROBLEMS = 5  # bad rows told in one message
MOST_WARNINGS = 3  # bad rows told in the log where they are left out
T_co = TypeVar("T_co", covariant=True)


class BadRows:
    """Rows that can't be read. ``error``: the first few go into one DataError; ``drop``: left out and counted.

    ``counts`` gets the key ``bad`` where rows are dropped.
    """

    def __init__(self, where: str, policy: BadRowPolicy = "error", counts: dict[str, int] | None = None) -> None:
        self.where, self.policy = where, policy
        self.counts = counts if counts is not None else {}
        self._problems: list[str] = []
        self._warned = 0
        if policy == "drop":
            self.counts.setdefault("bad", 0)

    @property
    def clean(self) -> bool:
        """False once a row was bad that no run may go on with."""
        return not self._problems

    def add(self, number: int | str, reason: object) -> None:
        """Row ``number`` is bad; raises when enough are known for one message."""
        if self.policy == "error":
            self.refuse(number, reason)
            return
        self.counts["bad"] += 1
        if self._warned < MOST_WARNINGS:
            self._warned += 1
            log.warning("%s: row %s left out: %s", self.where, number, reason)

    def refuse(self, number: int | str, reason: object) -> None:
        """Row ``number`` stops the run whatever the policy says, e.g. by ``overlong: error``."""
        self._problems.append(f"row {number}: {reason}")
        if len(self._problems) == MOST_PROBLEMS:
            self.check()

    def check(self) -> None:
        """One DataError for all that were refused."""
        if self._problems:
            problems, self._problems = self._problems, []
            raise DataError(f"{self.where}: " + "; ".join(problems))


class Encoder(Protocol[T_co]):
    """Rows to what is trained on, under a length policy; counts kept, filtered and truncated ones."""

    where: str
    counts: dict[str, int]
    bad: BadRows

    @property
    def kind(self) -> str:
        """What it makes."""

    def __call__(self, rows: Sequence[Numbered]) -> Sequence[T_co]:
        """Those that stay, in order; at most one for each row."""

    def nothing_left(self) -> DataError: ...
