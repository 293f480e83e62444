"""Rows without padding: what is selected, and what selecting costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verl.batch import Batch, Ragged


def ragged(lengths: list[int], inner: tuple[int, ...] = ()) -> Ragged:
    return Ragged.from_rows([torch.randn(n, *inner) for n in lengths])


@pytest.mark.parametrize("inner", [(), (3,)], ids=["scalars", "vectors"])
@pytest.mark.parametrize("rows", [[], [2], [0, 1, 2, 3, 4], [4, 1, 1, 3], [-1, 0]], ids=str)
def test_selected_rows_are_the_named_ones(rows: list[int], inner: tuple[int, ...]) -> None:
    whole = ragged([2, 0, 3, 1, 4], inner)
    each = list(whole.rows())
    found = whole.select(rows)
    assert found.lengths.tolist() == [len(each[i]) for i in rows] and found.values.shape[1:] == inner
    assert all(torch.equal(row, each[i]) for row, i in zip(found.rows(), rows, strict=True))


def test_a_few_of_many_cost_what_the_few_do() -> None:
    """Whatever the batch's size: a pass over micro-batches selects as often as there are some."""

    class Count(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **kwargs or {})
            self.made += len(out) if isinstance(out, (list, tuple)) else 1
            return out

    def tensors(size: int) -> int:
        batch = Batch([str(i) for i in range(size)], {"response_ids": ragged([3] * size)})
        with Count() as count:
            batch.select([0, 5, 7])
        return count.made

    assert tensors(8) == tensors(800) < 30
