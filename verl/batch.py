"""Rows of different lengths without padding: ragged token columns and plain row columns.

Worked example: two responses ``[5, 6, 2]`` and ``[7, 2]`` are ``Ragged(values=[5, 6, 2, 7, 2], lengths=[3, 2])``.
A row's mask is a fact about its length, so no token id (pad or end of sequence) ever has to be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """``B`` rows concatenated: ``values [T, ...]`` and ``lengths [B]`` (int64, on the CPU), ``T = lengths.sum()``."""

    values: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        if int(self.lengths.sum()) != self.values.shape[0]:
            raise ValueError(f"{self.values.shape[0]} values for rows of {int(self.lengths.sum())} in total")

    @staticmethod
    def from_rows(rows: Iterable[Tensor | Sequence], dtype: torch.dtype | None = None) -> Ragged:
        """Concatenate rows (tensors or sequences of numbers)."""
        tensors = [torch.as_tensor(r, dtype=dtype) for r in rows]
        lengths = torch.tensor([t.shape[0] for t in tensors], dtype=torch.int64)
        values = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype)
        return Ragged(values, lengths)

    @staticmethod
    def cat(parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts, in order."""
        return Ragged(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))

    def __len__(self) -> int:
        return self.lengths.shape[0]

    @property
    def offsets(self) -> Tensor:
        """``[B + 1]`` cumulative lengths; row ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @property
    def row_index(self) -> Tensor:
        """``[T]`` row number of each value, on the values' device."""
        index = torch.repeat_interleave(torch.arange(len(self)), self.lengths)
        return index.to(self.values.device)

    def rows(self) -> Iterator[Tensor]:
        return iter(self.values.split(self.lengths.tolist()))

    def select(self, rows: Sequence[int]) -> Ragged:
        """The named rows, in the named order (a row may be named twice). A few of many cost what the few do."""
        if not rows:
            return Ragged(self.values[:0], self.lengths[:0])
        lengths, ends = self.lengths[list(rows)], self.lengths.cumsum(0)[list(rows)]
        places = zip((ends - lengths).tolist(), ends.tolist(), strict=True)
        return Ragged(torch.cat([self.values[start:end] for start, end in places]), lengths)

    def with_values(self, values: Tensor) -> Ragged:
        """Other values for the same rows."""
        return Ragged(values, self.lengths)

    def to(self, device: torch.device | str) -> Ragged:
        return Ragged(self.values.to(device), self.lengths)

    def padded(self, fill: float = 0) -> Tensor:
        """``[B, max length, ...]``, right-padded; for tests and tables, never on the training path."""
        return torch.nn.utils.rnn.pad_sequence(list(self.rows()), batch_first=True, padding_value=fill)


Value = Ragged | Tensor | list


@dataclass
class Batch:
    """Columns of the same rows. ``ids`` names the rows (``"<prompt id>/<sample>"``); see ``columns.COLUMNS``."""

    ids: list[str]
    columns: dict[str, Value] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, name: str) -> Value:
        if name not in self.columns:
            raise KeyError(f"column {name!r} is not in the batch; it has {sorted(self.columns)}")
        return self.columns[name]

    def __setitem__(self, name: str, value: Value) -> None:
        if len(value) != len(self):
            raise ValueError(f"column {name!r} has {len(value)} rows, the batch has {len(self)}")
        self.columns[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def ragged(self, name: str) -> Ragged:
        value = self[name]
        if not isinstance(value, Ragged):
            raise TypeError(f"column {name!r} is not ragged")
        return value

    def tensor(self, name: str) -> Tensor:
        value = self[name]
        if not isinstance(value, Tensor):
            raise TypeError(f"column {name!r} is not a tensor")
        return value

    def select(self, rows: Sequence[int]) -> Batch:
        """The named rows, in the named order."""

        def pick(value: Value) -> Value:
            if isinstance(value, Ragged):
                return value.select(rows)
            return value[list(rows)] if isinstance(value, Tensor) else [value[i] for i in rows]

        return Batch([self.ids[i] for i in rows], {name: pick(value) for name, value in self.columns.items()})

    @staticmethod
    def cat(parts: Sequence[Batch]) -> Batch:
        """The rows of all parts, in order; every part must carry the same columns."""
        if not parts:
            raise ValueError("no batches to join")
        names = parts[0].columns.keys()
        for part in parts[1:]:
            if part.columns.keys() != names:
                raise ValueError(f"batches carry different columns: {sorted(names)} and {sorted(part.columns)}")
        joined: dict[str, Value] = {}
        for name in names:
            values = [part.columns[name] for part in parts]
            if isinstance(values[0], Ragged):
                joined[name] = Ragged.cat(values)  # type: ignore[arg-type]
            elif isinstance(values[0], Tensor):
                joined[name] = torch.cat(values)  # type: ignore[arg-type]
            else:
                joined[name] = [item for value in values for item in value]  # type: ignore[union-attr]
        return Batch([i for part in parts for i in part.ids], joined)
