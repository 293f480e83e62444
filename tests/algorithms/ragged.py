"""Random rows in flat ragged form, with NaN wherever the mask is False, for the tests of this folder."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.reduce import row_counts
from verl.seats import Totals


class Rows(NamedTuple):
    """``mask`` and ``row`` of ``n`` rows; row 1 is masked out entirely, the others have holes (tool tokens)."""

    mask: Tensor
    row: Tensor
    n: int

    def values(self, seed: int, scale: float = 1.0) -> Tensor:
        """``[T]`` float64 normal values; NaN outside the mask."""
        drawn = torch.randn(len(self.row), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return torch.where(self.mask, drawn * scale, torch.nan)

    def tokens(self, i: int) -> list[int]:
        """Flat positions of row i's masked tokens."""
        return [t for t in range(len(self.row)) if self.row[t] == i and self.mask[t]]

    def cut(self, first: int, last: int) -> tuple[slice, Tensor, Tensor, int]:
        """Rows ``first`` to ``last - 1`` alone: their flat slice, mask, row numbers from 0, and count."""
        where = ((self.row >= first) & (self.row < last)).nonzero().flatten()
        part = slice(int(where[0]), int(where[-1]) + 1)
        return part, self.mask[part], self.row[part] - first, last - first


def rows(lengths: tuple[int, ...] = (5, 3, 9, 1, 4, 6, 7, 2), seed: int = 0) -> Rows:
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = torch.rand(len(row), generator=torch.Generator().manual_seed(seed)) < 0.7
    for i in range(len(lengths)):
        mask[(row == i).nonzero()[0]] = True
    mask[row == 1] = False
    return Rows(mask, row, len(lengths))


def totals_of(mask: Tensor, row: Tensor, n_rows: int) -> Totals:
    """The denominators of these rows, which ``seats`` knows from lengths alone."""
    counts = row_counts(mask, row, n_rows)
    return Totals(tokens=int(counts.sum()), rows=int((counts > 0).sum()))
