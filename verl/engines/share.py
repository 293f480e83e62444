"""What engines of all kinds do alike: rows that keep a rank in step, what ranks tell each other, the optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl.batch import Batch, Ragged
from verl.engines.base import UpdateReport
from verl.engines.optim import Optimizer
from verl.models.packing import Packed, pack, send
from verl.models.value import HIDDEN

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """One rank's part of an optimizer step: what its loss function counted, tokens in its rows' loss masks, and its
    part of the gradient's squared norm."""

    stats: Mapping[str, float]
    tokens: int
    square_sum: float


def of_all(mesh: DeviceMesh, axes: Iterable[str], mine: T) -> list[T]:
    """What each rank of the mesh has, in the same order everywhere; ``axes`` from the innermost on."""
    parts = [mine]
    for axis in axes:
        group = mesh.get_group(axis)
        found: list[list[T]] = [[] for _ in range(group.size())]
        dist.all_gather_object(found, parts, group=group)
        parts = [one for part in found for one in part]
    return parts


def step(optimizer: Optimizer, shares: Iterable[Share]) -> UpdateReport:
    """The optimizer step of all ranks' shares, which each rank has in the same order."""
    report, square_sum, tokens = UpdateReport(lr=optimizer.lr), 0.0, 0
    for share in shares:
        report.add(share.stats)
        tokens += share.tokens
        square_sum += share.square_sum
    if tokens:
        report.grad_norm, stepped = optimizer.step(square_sum)
        report.skipped = None if stepped else "nonfinite"
    else:
        optimizer.skip()
        report.skipped = "empty"
    return report


def order_of(batch: Batch, micro_batches: Sequence[Sequence[int]]) -> list[int]:
    """The rows as the micro-batches have them; ``ValueError`` unless each is there once."""
    order = [row for rows in micro_batches for row in rows]
    if sorted(order) != list(range(len(batch))):
        raise ValueError(f"micro-batches hold {len(order)} rows, not each of the batch's {len(batch)} once")
    return order


def in_batch_order(values: Tensor, batch: Batch, order: Sequence[int]) -> Ragged:
    """``values [R]`` of rows in that ``order``, as a column of the batch."""
    back = torch.tensor(order, dtype=torch.int64).argsort().tolist()
    return Ragged(values, batch.ragged("response_ids").lengths[list(order)]).select(back)


def packed(rows: Batch, *, ends: bool = False) -> Packed:
    """The rows on one token axis, those of a group sharing their prompt."""
    groups = rows.tensor("group").tolist() if "group" in rows else None
    prompts, responses = rows.ragged("prompt_ids").to("cpu"), rows.ragged("response_ids").to("cpu")
    return pack(prompts, responses, groups, ends=ends)


def beside(rows: Batch, device: torch.device) -> Batch:
    """The rows with their token columns on the device; row columns stay, for who asks which rows belong together."""
    near = Batch(rows.ids, dict(rows.columns))
    for name, column in rows.columns.items():
        if isinstance(column, Ragged):  # hidden states are large: no copy in pinned memory
            values = column.values
            near[name] = column.with_values(send(values, device) if values.ndim == 1 else values.to(device))
    return near


def padding(batch: Batch) -> Batch:
    """One row of one prompt and one response token, which takes ``batch``'s rows' way through the module."""
    row = Batch(["padding"])
    row["prompt_ids"] = row["response_ids"] = Ragged.from_rows([[1]])
    if HIDDEN in batch:
        hidden = batch.ragged(HIDDEN).values
        row[HIDDEN] = Ragged.from_rows([hidden.new_zeros(1, hidden.shape[1])])
    return row


def unweighted(outputs: Mapping[str, Tensor]) -> Tensor:
    """A loss of exactly 0 whose backward pass is a whole one, for a micro-batch of ``padding``."""
    return 0.0 * torch.stack([x.sum() for x in outputs.values()]).sum()
