"""The order in which prompts are drawn: seeded, another one each epoch, resumable at any point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from verl.config.errors import DataError


def check_saved(state: Mapping[str, Any], **now: Any) -> None:
    """``DataError`` where a saved position belongs to other data or another order than what is there now."""
    for name, value in now.items():
        if state[name] != value:
            what = "rows" if name == "n" else name
            raise DataError(f"the saved data position is for {what} {state[name]}, this run has {what} {value}")


class PromptOrder:
    """Row numbers ``0..n-1``, each once per epoch; ``take`` may cross from one epoch into the next.

    The whole position is one number, the rows drawn so far, so the end of an epoch is the start of the next one. The
    order of an epoch is a function of ``(seed, epoch)`` alone; without ``shuffle`` it is the data set's own.
    """

    def __init__(self, n: int, seed: int = 0, shuffle: bool = True) -> None:
        if n < 1:
            raise DataError("0 rows after filtering: there is nothing to draw from")
        self.n, self.seed, self.shuffle = n, seed, shuffle
        self.taken = 0
        self._cached: tuple[int, np.ndarray] | None = None

    @property
    def epoch(self) -> float:
        """Epochs drawn so far, in fractions."""
        return self.taken / self.n

    def take(self, k: int) -> list[int]:
        """The next ``k`` row numbers."""
        rows: list[int] = []
        while len(rows) < k:
            epoch, start = divmod(self.taken, self.n)
            part = self._permutation(epoch)[start : start + k - len(rows)].tolist()
            self.taken += len(part)
            rows += part
        return rows

    def state(self) -> dict[str, Any]:
        """JSON values from which ``restore`` goes on."""
        return {"n": self.n, "seed": self.seed, "shuffle": self.shuffle, "taken": self.taken}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken; DataError when it belongs to other data or another seed."""
        check_saved(state, n=self.n, seed=self.seed, shuffle=self.shuffle)
        self.taken = int(state["taken"])

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._cached is None or self._cached[0] != epoch:
            order = np.arange(self.n)
            if self.shuffle:
                # Sorting PCG64's uniform numbers: both are fixed by definition, `permutation` may change with numpy.
                noise = np.random.Generator(np.random.PCG64([self.seed % 2**63, epoch])).random(self.n)
                order = np.argsort(noise, kind="stable")
            self._cached = (epoch, order)
        return self._cached[1]
