"""Keys and values of rows being decoded: a prompt's once per group, a response's per row.

Slots are dense: rows ``0..N-1`` and groups ``0..G-1`` are in use, so a decode step reads views, never copies. When
some leave, the last ones move into the holes (``keep``).

A store grows as it is written to: old and new storage exist together for a moment. Under a ``Budget`` room is reserved
once, exactly, and never grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Context, Decimal
from typing import TypeVar

import torch
from torch import Tensor

from verl.batch import Ragged
from verl.config.errors import RequestError
from verl.models.packing import AttentionOptions, Packed, common_prefix
from verl.models.policy import Policy

GIB = 1 << 30

Owner = TypeVar("Owner")


class Store:
    """Keys and values of every layer as ``[capacity, H_kv, length, D]``; grows by half at least, new places hold zeros.

    Zeros, because attention weights of exactly 0 fall on unused places and 0 times garbage may be NaN.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.slots = self.length = 0

    def reserve(self, slots: int, length: int) -> None:
        """Make room for this many slots of this length."""
        if slots > self.slots:
            self.slots = max(slots, self.slots * 3 // 2)
        if length > self.length:
            self.length = max(length, self.length * 3 // 2)

    def allocate(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Storage of what is reserved, for keys and values such as ``like [0, H_kv, D]``, before any is written."""
        kept = self.layers[layer] = self._grown(None, like), self._grown(None, like)
        return kept

    def write(self, layer: int, slot: Tensor, place: Tensor, k: Tensor, v: Tensor) -> None:
        """Put ``k`` and ``v [T, H_kv, D]`` at ``slot [T]``, ``place [T]``."""
        kept = self.layers.get(layer)
        if kept is None or kept[0].shape[0] < self.slots or kept[0].shape[2] < self.length:
            k_old, v_old = kept or (None, None)
            kept = self.layers[layer] = self._grown(k_old, k), self._grown(v_old, v)
        for store, new in zip(kept, (k, v), strict=True):
            store[slot, :, place] = new

    def _grown(self, old: Tensor | None, new: Tensor) -> Tensor:
        store = new.new_zeros(self.slots, new.shape[1], self.length, new.shape[2])
        if old is not None:
            store[: old.shape[0], :, : old.shape[2]] = old
        return store

    def read(self, layer: int, slots: int, length: int) -> tuple[Tensor, Tensor]:
        k, v = self.layers[layer]
        return k[:slots, :, :length], v[:slots, :, :length]

    def keep(self, owners: list[Owner], kept: Sequence[bool]) -> list[Owner]:
        """Make the slots of ``kept`` dense again: the last ones move into the holes. Gives the new order of owners."""
        n = sum(kept)
        source = [i for i in range(n, len(kept)) if kept[i]]
        target = [i for i in range(n) if not kept[i]]
        if source:
            for layer in self.layers.values():
                for store in layer:
                    store[target] = store[source]
        order = list(range(n))
        for a, b in zip(source, target, strict=True):
            order[b] = a
        return [owners[i] for i in order]


@dataclass
class Cache:
    """``prompts`` by group slot, ``responses`` by row slot."""

    prompts: Store = field(default_factory=Store)
    responses: Store = field(default_factory=Store)


class _Probe:
    """A layout that attends to nothing and counts the bytes that a token would leave in the cache."""

    def __init__(self) -> None:
        self.bytes = 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        del layer, options
        self.bytes += (k[0].numel() + v[0].numel()) * k.element_size()
        return v.new_zeros(*q.shape[:2], v.shape[2])


def bytes_per_token(policy: Policy) -> int:
    """What one token leaves in the cache, found by a forward of one token: right for every architecture."""
    probe, zero = _Probe(), torch.zeros(1, dtype=torch.int64, device=policy.device)
    with torch.no_grad():
        policy.hidden(zero, zero, probe)
    return probe.bytes


@dataclass(frozen=True)
class Budget:
    """``gib`` GiB for keys and values of ``per_token`` bytes a token."""

    gib: float
    per_token: int

    @property
    def tokens(self) -> int:
        return int(self.gib * GIB) // self.per_token

    def check(self, tokens: int, what: str = "") -> None:
        """``RequestError`` unless ``what``, a row of ``tokens`` (else the run's longest), fits; it says what would."""
        what = what or f"a row of max_prompt_length + max_response_length = {tokens} tokens"
        if tokens > self.tokens:
            least = Context(prec=3, rounding=ROUND_CEILING).divide(Decimal(tokens * self.per_token), Decimal(GIB))
            raise RequestError(
                f"rollout.cache_gib is {self.gib:g}, but {what} takes {least:f} GiB of keys and values "
                f"({self.per_token:,} bytes per token): rollout.cache_gib {least:f} or more would fit"
            )

    def room(self, rows: int, group: float, prompt_length: int, response_length: int) -> tuple[int, int]:
        """How many of ``rows`` and how many prompts to hold side by side; a prompt and a response always fit.

        ``group``: rows of a prompt, on average. As many rows as fit beside twice the prompts of so many rows: groups
        whose last rows are long stay with their prompts while others begin. What is left over is for more prompts.
        """

        def left(n: int) -> int:  # tokens for prompts beside n rows
            return self.tokens - n * response_length

        fit = (n for n in range(rows, 1, -1) if left(n) >= prompt_length * min(n, math.ceil(2 * n / group)))
        n = next(fit, 1)
        return n, min(n, left(n) // prompt_length)


class PrefillLayout:
    """New prompts, packed end to end; each sees itself, causally. Their keys and values are put into the cache."""

    def __init__(
        self, cache: Cache, prompts: Sequence[Sequence[int]], slots: Sequence[int], device: torch.device
    ) -> None:
        lengths = [len(p) for p in prompts]
        shared = common_prefix(prompts)  # computed once, kept in every slot
        runs = ([shared] if shared else []) + [n - shared for n in lengths]
        ends = torch.tensor(runs).cumsum(0).tolist()
        own = [(end - n, end) for n, end in zip(runs, ends, strict=True)]
        prefix = [own.pop(0)] if shared else []
        self.store = cache.prompts
        self.store.reserve(max(slots) + 1, max(lengths))
        self.packed = Packed(
            ids=torch.tensor([*prompts[0][:shared], *(i for p in prompts for i in p[shared:])]),
            positions=torch.cat([torch.arange(b, e) for b, e in [(0, shared), *((shared, n) for n in lengths)]]),
            predict=Ragged.from_rows([], torch.int64),
            q_lengths=runs,
            k_spans=[[span] for span in prefix] + [[*prefix, span] for span in own],
        ).to(device)
        self.slot = torch.tensor(slots).repeat_interleave(torch.tensor(lengths)).to(device)
        self.place = torch.cat([torch.arange(n) for n in lengths]).to(device)
        source = [torch.arange(b, e) for span in own for b, e in (*prefix, span)]
        self.source = torch.cat(source).to(device)  # packed position of each slot's places
        self.last = torch.tensor([end for _, end in own], device=device) - 1  # [prompts] of the last tokens

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        self.store.write(layer, self.slot, self.place, k[self.source], v[self.source])
        return self.packed.attend(layer, q, k, v, options)


class DecodeLayout:
    """One new token for each of ``N`` rows: it sees its group's prompt and its row's earlier tokens.

    The rows of a group read their prompt's keys together: queries are arranged as ``[G, n]`` (``n`` the most rows of a
    group; short groups repeat some row), one matrix product per group instead of one per row.
    """

    def __init__(
        self,
        cache: Cache,
        groups: Sequence[int],
        prompt_lengths: Sequence[int],
        places: Sequence[int],
        device: torch.device,
    ) -> None:
        """For each row its ``groups`` slot and its token's ``places`` in the response; ``prompt_lengths`` by group."""
        self.cache = cache
        self.rows, self.groups = len(groups), len(prompt_lengths)
        self.prompt_length, self.response_length = max(prompt_lengths), max(places) + 1
        cache.responses.reserve(self.rows, self.response_length)
        members: list[list[int]] = [[] for _ in prompt_lengths]
        column = []
        for row, g in enumerate(groups):
            column.append(len(members[g]))
            members[g].append(row)
        self.width = max(len(m) for m in members)
        arranged = [row for m in members for row in m + [0] * (self.width - len(m))]
        self.arranged = torch.tensor(arranged, device=device)  # [G * n] row at each place of the arrangement
        self.back = torch.tensor([g * self.width + c for g, c in zip(groups, column, strict=True)], device=device)
        self.row = torch.arange(self.rows, device=device)
        self.place = torch.tensor(places, device=device)  # [N]
        self.prompt = torch.tensor([prompt_lengths[g] for g in groups], device=device)  # [N]
        self.positions = self.prompt + self.place
        self._biases: dict[int | None, Tensor] = {}

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """``[N, 1, 1, P + S]``: 0 where a row's token sees the key, else -inf."""
        if window not in self._biases:
            p = torch.arange(self.prompt_length, device=self.row.device)[None]
            s = torch.arange(self.response_length, device=self.row.device)[None]
            prompt, place = self.prompt[:, None], self.place[:, None]
            seen = torch.cat([p < prompt, s <= place], 1)
            if window is not None:
                key = torch.cat([p.expand(self.rows, -1), prompt + s], 1)
                seen &= self.positions[:, None] - key < window
            bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
            self._biases[window] = bias[:, None, None]
        return self._biases[window]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        rows, groups, width = self.rows, self.groups, self.width
        heads, dim = k.shape[1], q.shape[2]
        share = q.shape[1] // heads  # query heads of one key head
        self.cache.responses.write(layer, self.row, self.place, k, v)
        k_row, v_row = self.cache.responses.read(layer, rows, self.response_length)
        k_group, v_group = self.cache.prompts.read(layer, groups, self.prompt_length)

        def arrange(x: Tensor) -> Tensor:  # [N, H_kv, share, X] -> [G, H_kv, n * share, X]
            x = x.index_select(0, self.arranged).view(groups, width, heads, share, -1)
            return x.transpose(1, 2).reshape(groups, heads, width * share, -1)

        def by_row(x: Tensor) -> Tensor:  # and back
            x = x.view(groups, heads, width, share, -1).transpose(1, 2)
            return x.reshape(groups * width, heads, share, -1).index_select(0, self.back)

        query = q.reshape(rows, heads, share, dim) * (dim**-0.5 if options.scale is None else options.scale)
        scores = torch.cat([by_row(arrange(query) @ k_group.mT), query @ k_row.mT], -1)
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        scores = scores + self._bias(options.window, scores.dtype)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype)
        on_prompt, on_response = weights.split([self.prompt_length, self.response_length], -1)
        out = by_row(arrange(on_prompt) @ v_group) + on_response @ v_row
        return out.reshape(rows, heads * share, -1)
