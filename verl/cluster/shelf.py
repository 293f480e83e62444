"""The rows that lie on one worker: each with the columns that were written or brought there."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Any

import torch

from verl.batch import Batch, Ragged, Value


class Shelf:
    """Rows by number. Threads may use it at once: peers take columns while an op computes."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, Value]] = {}
        self._empty: dict[str, Value] = {}  # each column without rows: its kind, dtype and inner shape
        self._ids: dict[int, str] = {}
        self._lock = threading.Lock()

    def put(self, rows: Sequence[int], batch: Batch) -> None:
        """``batch``'s columns for ``rows``, in its order; a column that lies there already is replaced."""
        with self._lock:
            for row, name in zip(rows, batch.ids, strict=True):
                self._rows.setdefault(row, {})
                self._ids[row] = name
            for name, column in batch.columns.items():
                if isinstance(column, Ragged):
                    self._empty[name] = Ragged(column.values[:0].clone(), column.lengths[:0].clone())
                    values: Sequence = column.values.split(column.lengths.tolist())
                elif isinstance(column, torch.Tensor):
                    self._empty[name], values = column[:0].clone(), column.unbind()
                else:
                    self._empty[name], values = [], column
                for row, value in zip(rows, values, strict=True):
                    self._rows[row][name] = value

    def batch(self, rows: Sequence[int], columns: Collection[str]) -> Batch:
        """The ``columns`` of ``rows``, in this order. ``KeyError`` names a column that a row lacks."""
        with self._lock:
            found = Batch([self._ids[row] for row in rows])
            lying = [self._rows[row] for row in rows]
            for name in columns:
                try:
                    values: Any = [row[name] for row in lying]
                except KeyError:
                    lacks = next(i for i, row in enumerate(lying) if name not in row)
                    raise KeyError(f"row {rows[lacks]} has no column {name!r}; it has {sorted(lying[lacks])}") from None
                empty = self._empty.get(name, [])
                if not values:
                    found[name] = empty
                elif isinstance(empty, Ragged):
                    found[name] = Ragged.from_rows(values)
                elif isinstance(empty, torch.Tensor):
                    found[name] = torch.stack(values)
                else:
                    found[name] = values
            return found

    def release(self, columns: Collection[str]) -> None:
        """These columns go, of every row."""
        with self._lock:
            for name in columns:
                self._empty.pop(name, None)
                for row in self._rows.values():
                    row.pop(name, None)

    def clear(self) -> None:
        with self._lock:
            self._rows.clear()
            self._ids.clear()
            self._empty.clear()
