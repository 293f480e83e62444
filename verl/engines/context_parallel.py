"""Context parallelism: ranks that compute the same rows, each a run of their packed tokens (arXiv 2309.14509).

All of a decoder but its attention treats tokens one by one, so it needs no word from the others. For attention each
rank gives away its tokens' other heads and gets all tokens of its own heads, and the same way back. Positions and the
mask are those of the whole packed micro-batch. Each rank's gradient is what its own tokens add to the sum, so gradients
are summed over these ranks as over those that hold other rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.batch import Ragged
from verl.config.errors import RequestError
from verl.layout import Layout
from verl.models.packing import AttentionOptions, Packed, send


def context_group(layout: Layout, ranks: Sequence[int] | None = None) -> Any:
    """The process group of this rank and those that differ from it in ``cp`` alone; ``None`` where there are none.

    Arguments, and who calls, are as ``sharding.device_mesh``'s.
    """
    if layout.cp == 1:
        return None
    ranks = list(range(dist.get_world_size()) if ranks is None else ranks)
    mine = None
    for i in range(layout.size):
        peers = layout.peers(i, "cp")
        if peers[0] == i:
            group = dist.new_group([ranks[p] for p in peers])
            if dist.get_rank() in (ranks[p] for p in peers):
                mine = group
    return mine


def check_heads(config: Any, cp: int, tp: int) -> None:
    """``RequestError`` unless the heads of each tensor-parallel rank divide over ``cp`` ranks. Key heads needn't: they
    are repeated."""
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    if heads is not None and heads % (cp * tp):
        both = f" times tensor_parallel_size {tp}" if tp > 1 else ""
        raise RequestError(f"context_parallel_size {cp}{both} does not divide the model's num_attention_heads {heads}")


@dataclass
class Part(Packed):
    """This rank's run of ``full``: ``n`` tokens, equally many on each rank, for which the last is filled up. ``ids``,
    ``positions`` and ``predict`` speak of the run alone."""

    full: Packed
    group: Any
    mine: Tensor  # [r] which of full's R response tokens are predicted here

    @classmethod
    def of(cls, full: Packed, group: Any) -> Part:
        """Cut on the host, before it goes to a device, which so isn't asked how many response tokens are here."""
        ranks, total = dist.get_world_size(group), len(full)
        n = -(-total // ranks)
        start = dist.get_rank(group) * n
        ids, positions = (F.pad(x, (0, ranks * n - total))[start : start + n] for x in (full.ids, full.positions))
        where = full.predict.values
        mine = ((where >= start) & (where < start + n)).nonzero()[:, 0]
        rows = full.predict.row_index[mine]
        predict = Ragged(where[mine] - start, torch.bincount(rows, minlength=len(full.predict)))
        return cls(ids, positions, predict, full.q_lengths, full.k_spans, full, group, mine)

    def to(self, device: torch.device | str) -> Part:
        own, full = super().to(device), self.full.to(device)
        return replace(
            self, ids=own.ids, positions=own.positions, predict=own.predict, full=full, mine=send(self.mine, device)
        )

    def own(self, x: Tensor) -> Tensor:
        return x[self.mine]

    def whole(self, x: Tensor) -> Tensor:
        return _Whole.apply(x, self.mine, self.full.predict.values.shape[0], self.group)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        ranks, (n, heads, _) = dist.get_world_size(self.group), q.shape
        repeat = ranks // math.gcd(ranks, k.shape[1])
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        # to each rank its heads of my tokens: [ranks, n, (its heads of q, k and v) * D]
        parts = [t.reshape(n, ranks, -1).transpose(0, 1) for t in (q, k, v)]
        tokens = _Exchange.apply(torch.cat(parts, -1), self.group).flatten(0, 1)[: len(self.full)]
        mine = tokens.split([part.shape[-1] for part in parts], -1)
        q, k, v = (x.unflatten(-1, (-1, t.shape[-1])) for x, t in zip(mine, (q, k, v), strict=True))
        out = self.full.attend(layer, q, k, v, options).flatten(1)
        out = F.pad(out, (0, 0, 0, ranks * n - out.shape[0])).unflatten(0, (ranks, n))
        return _Exchange.apply(out, self.group).transpose(0, 1).reshape(n, heads, -1)


class _Exchange(torch.autograd.Function):
    """``x [ranks, ...]``: block ``i`` to rank ``i``; what each sent here, in their order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad, ctx.group), None


def _exchange(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


class _Whole(torch.autograd.Function):
    """Each rank's places ``mine`` of ``[total, ...]`` -> all places, on all ranks. Every rank computes the same with
    the result, so the gradient of a rank's places is there already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mine: Tensor, total: int, group: Any) -> Tensor:
        ctx.save_for_backward(mine)
        out = x.new_zeros(total, *x.shape[1:])
        out[mine] = x
        dist.all_reduce(out, group=group)  # one rank's number and zeros: exact
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[ctx.saved_tensors[0]], None, None, None
