"""Triton kernels of one decode step, and what calls them. Elementwise roundings are those of transformers' modules.

No kernel depends on the number of rows, so none is compiled anew as a batch shrinks. Imported only where there is a
GPU, or with ``TRITON_INTERPRET=1``, which runs all of them on a CPU.

Keys and values lie where a *table* says, read on the device: a captured graph stays valid when the cache moves. A
layer's entry is eight int64: the addresses of prompts' keys and values and of responses' keys and values (each
``[slots, H_kv, length, D]``), the two lengths, and two that pad it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # logits whose maximum and mass are known
RUN = 8  # such blocks of one program
FEW = 2  # of them that are searched together
WAYS = 4  # thresholds tried by one pass over the logits
ROOM = 4 * BLOCK  # logits among which top_k and top_p decide; where more may be the last to stay, all are looked at
PIECE = 128  # of which so many are looked at together
PROGRAMS = 132 * 8  # of decode attention: what fills a large GPU
NEAR = 8  # rows side by side, of which those of one prompt read it together


@triton.jit
def _unit(x, w, eps, size):
    """RMS norm along the last axis of ``x`` (float32), rounded as ``w`` is before and after its weight ``w``."""
    return _round(_round(x * tl.rsqrt(tl.sum(x * x, -1, keep_dims=True) / size + eps), w) * w.to(tl.float32), w)


@triton.jit
def _round(x, like):
    return x.to(like.dtype).to(tl.float32)


@triton.jit
def _add_norm(x, residual, weight, out, eps, size: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64) * size, tl.arange(0, WIDTH)
    inside = i < size
    h = tl.load(residual + row + i, mask=inside, other=0.0)
    if ADD:
        h = (h.to(tl.float32) + tl.load(x + row + i, mask=inside, other=0.0).to(tl.float32)).to(h.dtype)
        tl.store(residual + row + i, h, mask=inside)
    w = tl.load(weight + i, mask=inside, other=0.0)
    tl.store(out + row + i, _unit(h.to(tl.float32), w, eps, size), mask=inside)


def add_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add ``x [N, D]`` to ``residual [N, D]`` in place; gives the RMS norm of the sum."""
    out, width = torch.empty_like(residual), residual.shape[1]
    _add_norm[(residual.shape[0],)](
        x, residual, weight, out, eps, width, triton.next_power_of_2(width), x is not None, num_warps=8
    )
    return out


@triton.jit
def _silu_mul(gate, up, out, stride, size, WIDTH: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    g = tl.load(gate + row * stride + i, mask=i < size, other=0.0)
    x = g.to(tl.float32)
    x = _round(x / (1.0 + tl.exp(-x)), g)
    x *= tl.load(up + row * stride + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + i, x, mask=i < size)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, both ``[N, I]``, their rows as far apart."""
    rows, size = gate.shape
    out = gate.new_empty(rows, size)
    _silu_mul[(rows, triton.cdiv(size, 2048))](gate, up, out, gate.stride(0), size, 2048)
    return out


@triton.jit
def _turned(x, weight, cos, sin, head, half, inside, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Both halves of the rotated heads at ``x``, normalised before where the model does that."""
    at = head[:, None] * D + half[None, :]
    like = tl.load(x + at, mask=inside, other=0.0)
    a, b = like.to(tl.float32), tl.load(x + at + D // 2, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        r = tl.rsqrt((tl.sum(a * a, 1, keep_dims=True) + tl.sum(b * b, 1, keep_dims=True)) / D + eps)
        a = _round(_round(a * r, like) * tl.load(weight + half).to(tl.float32)[None, :], like)
        b = _round(_round(b * r, like) * tl.load(weight + D // 2 + half).to(tl.float32)[None, :], like)
    cos_a, sin_a = tl.load(cos + half).to(tl.float32)[None, :], tl.load(sin + half).to(tl.float32)[None, :]
    cos_b = tl.load(cos + D // 2 + half).to(tl.float32)[None, :]
    sin_b = tl.load(sin + D // 2 + half).to(tl.float32)[None, :]
    first = _round(a * cos_a, like) - _round(b * sin_a, like)
    return first.to(like.dtype), (_round(b * cos_b, like) + _round(a * sin_b, like)).to(like.dtype)


@triton.jit
def _rotate_store(
    q, k, v, q_stride, kv_stride, q_weight, k_weight, cos, sin, table, slot, place, eps,
    H: tl.constexpr, H_KV: tl.constexpr, H_WIDTH: tl.constexpr, KV_WIDTH: tl.constexpr, D: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    row, half = tl.program_id(0).to(tl.int64), tl.arange(0, D // 2)
    cos, sin, q, k, v = cos + row * D, sin + row * D, q + row * q_stride, k + row * kv_stride, v + row * kv_stride
    head, kv_head = tl.arange(0, H_WIDTH), tl.arange(0, KV_WIDTH)
    inside = (head < H)[:, None]
    a, b = _turned(q, q_weight, cos, sin, head, half, inside, eps, D, NORM)
    at = head[:, None] * D + half[None, :]
    tl.store(q + at, a, mask=inside)
    tl.store(q + at + D // 2, b, mask=inside)
    mine = tl.load(slot + row)
    kept = (kv_head < tl.where(mine < 0, 0, H_KV))[:, None]  # below 0: a place that no row has
    to = (mine * H_KV + kv_head[:, None]) * tl.load(table + 5) * D + tl.load(place + row) * D + half[None, :]
    keys, values = tl.load(table + 2).to(k.dtype), tl.load(table + 3).to(v.dtype)
    k_a, k_b = _turned(k, k_weight, cos, sin, kv_head, half, kept, eps, D, NORM)
    tl.store(keys + to, k_a, mask=kept)
    tl.store(keys + to + D // 2, k_b, mask=kept)
    v_at = kv_head[:, None] * D + half[None, :]
    tl.store(values + to, tl.load(v + v_at, mask=kept), mask=kept)
    tl.store(values + to + D // 2, tl.load(v + v_at + D // 2, mask=kept), mask=kept)


def rotate_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    table: Tensor,
    slot: Tensor,
    place: Tensor,
) -> None:
    """Rotate ``q [N, H * D]`` in place; put rotated ``k`` and ``v [N, H_kv * D]``, whose rows are as far apart, at
    ``slot [N]``, ``place [N]`` of the responses. ``cos``, ``sin`` ``[N, D]``; ``norms``: weights ``[D]`` for query and
    key heads. Slot -1: nowhere."""
    dim = cos.shape[1]
    heads, kv = q.shape[1] // dim, k.shape[1] // dim
    q_weight, k_weight = norms or (q, q)
    _rotate_store[(q.shape[0],)](
        q, k, v, q.stride(0), k.stride(0), q_weight, k_weight, cos, sin, table, slot, place, eps, heads, kv,
        triton.next_power_of_2(heads), triton.next_power_of_2(kv), dim, norms is not None,
        enable_fp_fusion=False,  # which would leave out a rounding
    )  # fmt: skip


@triton.jit
def _over(
    q, ends, k, v, start, stop, most, mass, acc, scale, D: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Go on with an online softmax (base 2) over keys ``start..stop`` of ``k`` and ``v [length, D]``; each
    query sees those before its own of the ``ends``."""
    d = tl.arange(0, D)
    for at in range(start, stop, TILE):
        i = at + tl.arange(0, TILE)
        seen = i[:, None] < stop
        offset = i[:, None] * D + d[None, :]
        keys = tl.load(tl.multiple_of(k + offset, [16, 16]), mask=seen, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        scores = tl.where(i[None, :] < ends[:, None], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        p, shrink = tl.exp2(scores - higher[:, None]), tl.exp2(most - higher)
        values = tl.load(tl.multiple_of(v + offset, [16, 16]), mask=seen, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
        mass, most = mass * shrink + tl.sum(p, 1), higher
    return most, mass, acc


@triton.jit
def _share(part, length, PARTS: tl.constexpr, TILE: tl.constexpr):
    """From where to where a part of ``length`` keys goes."""
    chunk = tl.cdiv(tl.cdiv(length, PARTS), TILE) * TILE
    start = tl.minimum(part * chunk, length)
    return start, tl.minimum(start + chunk, length)


@triton.jit
def _put(parts, heights, at, inside, most, mass, acc, D: tl.constexpr):
    """A part's result, and how much it weighs beside others."""
    acc = acc / tl.where(mass > 0, mass, 1.0)[:, None]
    tl.store(parts + at[:, None] * D + tl.arange(0, D)[None, :], acc, mask=inside[:, None])
    tl.store(heights + at, tl.where(mass > 0, most + tl.log2(mass), -1e30), mask=inside)


@triton.jit
def _attend_prompts(
    q, q_stride, parts, heights, table, slot, group, prompt, rows, scale,
    NEAR: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr,
    PARTS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i, kv, part = tl.arange(0, WIDTH), tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0).to(tl.int64) * NEAR + i // SHARE
    inside = (i < NEAR * SHARE) & (row < rows)
    head = kv * SHARE + i % SHARE
    queries = tl.load(
        q + (row * q_stride + head * D)[:, None] + tl.arange(0, D)[None, :], mask=inside[:, None], other=0.0
    )
    most, mass = tl.full([WIDTH], -1e30, tl.float32), tl.zeros([WIDTH], tl.float32)
    acc = tl.zeros([WIDTH, D], tl.float32)
    before = tl.load(prompt + row, mask=inside, other=0).to(tl.int32)
    waits = inside & (tl.load(slot + row, mask=inside, other=-1) >= 0)
    left = tl.where(waits, tl.load(group + row, mask=inside, other=0), -1)
    g = tl.max(left, 0)
    while g >= 0:
        mine = left == g
        length = tl.where(mine, before, 0)
        start, stop = _share(part, tl.max(length, 0), PARTS, TILE)
        base = (g * H_KV + kv) * tl.load(table + 4) * D
        k, v = tl.load(table).to(q.dtype) + base, tl.load(table + 1).to(q.dtype) + base
        ends = tl.minimum(length, stop)
        most, mass, acc = _over(queries, ends, k, v, start, stop, most, mass, acc, scale, D, TILE, PRECISION)
        left = tl.where(mine, -1, left)
        g = tl.max(left, 0)
    _put(parts, heights, (row * H_KV * SHARE + head) * PARTS + part, inside, most, mass, acc, D)


@triton.jit
def _attend(
    q, q_stride, out, parts, heights, table, slot, group, prompt, place, prompt_parts, prompt_heights, scale,
    SHARE: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, PROMPT_PARTS: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, kv, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    mine = tl.load(slot + row)
    before = 0 if PROMPT_PARTS > 0 else tl.load(prompt + row).to(tl.int32)
    length = tl.where(mine < 0, 0, before + tl.load(place + row).to(tl.int32) + 1)
    start, stop = _share(part, length, PARTS, TILE)
    head, d = tl.arange(0, 16), tl.arange(0, D)  # 16: the least rows of a product
    inside = head < SHARE
    at = kv * SHARE + head
    queries = tl.load(q + row * q_stride + at[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
    most, mass = tl.full([16], -1e30, tl.float32), tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    at += row * H_KV * SHARE
    if PROMPT_PARTS > 0:
        for i in range(part, PROMPT_PARTS, PARTS):
            height = tl.load(prompt_heights + at * PROMPT_PARTS + i, mask=inside, other=-1e30)
            more = tl.load(
                prompt_parts + (at * PROMPT_PARTS + i)[:, None] * D + d[None, :], mask=inside[:, None], other=0.0
            )
            higher = tl.maximum(most, height)
            add, shrink = tl.where(height > -1e30, tl.exp2(height - higher), 0.0), tl.exp2(most - higher)
            acc = acc * shrink[:, None] + more * add[:, None]
            mass, most = mass * shrink + add, higher
    else:
        base = (tl.load(group + row) * H_KV + kv) * tl.load(table + 4) * D
        k, v = tl.load(table).to(q.dtype) + base, tl.load(table + 1).to(q.dtype) + base
        end = tl.minimum(stop, before)
        ends = tl.zeros([16], tl.int32) + end
        most, mass, acc = _over(
            queries, ends, k, v, tl.minimum(start, before), end, most, mass, acc, scale, D, TILE, PRECISION
        )
    base = (mine * H_KV + kv) * tl.load(table + 5) * D
    k, v = tl.load(table + 2).to(q.dtype) + base, tl.load(table + 3).to(q.dtype) + base
    end = tl.maximum(stop - before, 0)
    ends = tl.zeros([16], tl.int32) + end
    most, mass, acc = _over(
        queries, ends, k, v, tl.maximum(start - before, 0), end, most, mass, acc, scale, D, TILE, PRECISION
    )
    if PARTS == 1:
        acc = acc / tl.where(mass > 0, mass, 1.0)[:, None]
        tl.store(out + at[:, None] * D + d[None, :], acc, mask=inside[:, None])
    else:
        _put(parts, heights, at * PARTS + part, inside, most, mass, acc, D)


@triton.jit
def _combine(parts, heights, out, D: tl.constexpr, PARTS: tl.constexpr):
    at, d = tl.program_id(0).to(tl.int64), tl.arange(0, D)  # a head of a row
    i = at * PARTS + tl.arange(0, PARTS)
    height = tl.load(heights + i)
    share = tl.exp2(height - tl.max(height, 0))
    x = tl.sum(share[:, None] * tl.load(parts + i[:, None] * D + d[None, :]), 0) / tl.sum(share, 0)
    tl.store(out + at * D + d, x)


def parts_for(programs: int, full: int) -> int:
    """Into how many parts keys are cut so that few programs become the ``full`` number."""
    return min(16, triton.next_power_of_2(triton.cdiv(full, programs)))


def attend(
    q: Tensor,
    dim: int,
    kv_heads: int,
    table: Tensor,
    slot: Tensor,
    group: Tensor,
    prompt: Tensor,
    place: Tensor,
    *,
    together: bool,
) -> Tensor:
    """Attention of one token per row: ``q [N, H * D]`` -> ``[N, H * D]``. A row sees the first ``prompt [N]`` places
    of prompt slot ``group [N]`` and places ``0..place [N]`` of response slot ``slot [N]``; slot -1 sees nothing.
    ``together``: rows side by side read a prompt that they share once, at the price of another kernel."""
    rows, heads = q.shape[0], q.shape[1] // dim
    share, scale = heads // kv_heads, dim**-0.5 * 1.4426950408889634
    out, parts = q.new_empty(q.shape), parts_for(rows * kv_heads, PROGRAMS)
    exact = q.dtype == torch.float32
    precision = "ieee" if exact else "tf32"

    def room(parts: int) -> tuple[Tensor, Tensor]:
        n = rows * heads * parts
        return q.new_empty(n * dim, dtype=torch.float32), q.new_empty(n, dtype=torch.float32)

    of_prompts, prompt_parts = (q, q), 0
    if together:
        near = max(1, 16 // share) if exact else NEAR
        blocks, width = triton.cdiv(rows, near), max(16, triton.next_power_of_2(near * share))
        prompt_parts = parts_for(blocks * kv_heads, PROGRAMS // 5)
        of_prompts = room(prompt_parts)
        _attend_prompts[(blocks, kv_heads, prompt_parts)](
            q, q.stride(0), *of_prompts, table, slot, group, prompt, rows, scale, near, width, share, kv_heads, dim,
            prompt_parts, 32, precision, num_stages=2 if exact else 3, num_warps=4 if exact else min(8, width // 16),
        )  # fmt: skip
    partial = room(parts) if parts > 1 else (q, q)
    light = not exact and dim <= 128
    _attend[(rows, kv_heads, parts)](
        q, q.stride(0), out, *partial, table, slot, group, prompt, place, *of_prompts, scale, share, kv_heads, dim,
        parts, prompt_parts, 32, precision, num_stages=2 if exact else 3, num_warps=1 if light else 4,
    )  # fmt: skip
    if parts > 1:
        _combine[(rows * heads,)](*partial, out, dim, parts)
    return out


@triton.jit
def _mass(x, top, temperature):
    """exp of tempered logits below their highest; ``top`` -inf (a whole block was cut off) leaves nothing."""
    return tl.exp((x - tl.where(top == float("-inf"), 0.0, top)) / temperature)


@triton.jit
def _blocks(
    z, least, tops, masses, chosen_by, vocabulary, blocks,
    BLOCK: tl.constexpr, RUN: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1) * RUN + tl.arange(0, RUN)
    i = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = i < vocabulary
    if CUT:  # blocks that go as a whole needn't be read again
        bound = tl.load(least + row)
        gone = tl.load(tops + row * blocks + block, mask=block < blocks, other=float("-inf")) < bound
        mass = tl.load(masses + row * blocks + block, mask=block < blocks, other=0.0)
        inside &= ~(gone & (mass == mass))[:, None]  # a NaN must show
    x = tl.load(z + row * vocabulary + i, mask=inside, other=float("-inf"))
    if CUT:
        x = tl.where(x < bound, float("-inf"), x)
    top = tl.max(x, 1)
    mass = tl.sum(_mass(x, top[:, None], tl.load(chosen_by).to(tl.float32)), 1)
    tl.store(tops + row * blocks + block, top, mask=block < blocks)
    tl.store(masses + row * blocks + block, mass, mask=block < blocks)


@triton.jit
def _key(x):
    """int32 of the same order as float32 ``x``; its own inverse as bits."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _above(
    z, tops, bounds, counts, top, temperature, vocabulary, blocks, BLOCK: tl.constexpr, WAYS: tl.constexpr
):  # fmt: skip
    """How many of the logits ``z [V]`` lie above each of the keys ``bounds [WAYS]``, or their mass; float64."""
    acc = tl.zeros([WAYS, BLOCK], tl.float32)
    lowest = tl.min(bounds, 0)
    for block in range(0, blocks):
        if _key(tl.load(tops + block)) > lowest:
            i = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(z + i, mask=i < vocabulary, other=float("-inf"))
            weight = tl.where(counts, 1.0, _mass(x, top, temperature))
            acc += tl.where(_key(x)[None, :] > bounds[:, None], weight[None, :], 0.0)
    return tl.sum(acc.to(tl.float64), 1)


@triton.jit
def _narrow(
    z, tops, low, high, more, wanted, counts, top, temperature, vocabulary, blocks,
    BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """One step of the search for the least key in ``low..high`` above which there is less than ``wanted``; above
    ``high`` there must be less. ``more`` comes on top of what is above in ``z``. The bounds now, and what is above the
    upper."""
    j = tl.arange(0, WAYS).to(tl.int64)
    bounds = low + (high - low) * j // WAYS
    above = more + _above(z, tops, bounds.to(tl.int32), counts, top, temperature, vocabulary, blocks, BLOCK, WAYS)
    n = tl.sum((above >= wanted).to(tl.int64), 0)  # falls with j: between the n-th and the one before
    width = high - low
    high = low + width * n // WAYS
    low = tl.where(n > 0, low + width * (n - 1) // WAYS + 1, low)
    return low, high, tl.sum(tl.where(j == n, above, 0.0), 0)


@triton.jit
def _search(
    z, tops, low, high, more, wanted, counts, top, temperature, vocabulary, blocks,
    BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    while low < high:
        low, high, _ = _narrow(
            z, tops, low, high, more, wanted, counts, top, temperature, vocabulary, blocks, BLOCK, WAYS
        )
    return low


@triton.jit
def _gather(z, tops, low, high, found, vocabulary, blocks, BLOCK: tl.constexpr, RUN: tl.constexpr, ROOM: tl.constexpr):
    """How many of the logits ``z [V]`` lie above the key ``low`` and not above ``high``; they are put into
    ``found [ROOM]`` in their order. More than ``ROOM``, and it stops to look."""
    count, start, j = 0, 0, tl.arange(0, BLOCK)[None, :]
    while (start < blocks) & (count <= ROOM):
        block = start + tl.arange(0, RUN)
        live = _key(tl.load(tops + block, mask=block < blocks, other=float("-inf"))) > low
        if tl.max(live.to(tl.int32), 0) > 0:
            i = block[:, None] * BLOCK + j
            x = tl.load(z + i, mask=live[:, None] & (i < vocabulary), other=float("-inf"))
            inside = ((_key(x) > low) & (_key(x) <= high)).to(tl.int32)
            size = tl.sum(inside, 1)
            place = count + (tl.cumsum(size, 0) - size)[:, None] + tl.cumsum(inside, 1) - inside
            tl.store(found + place, x, mask=(inside > 0) & (place < ROOM))
            count += tl.sum(size, 0)
        start += RUN
    return count


@triton.jit
def _least(
    z, tops, masses, found, highest, least, chosen_by, vocabulary, blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr, WAYS: tl.constexpr, ROOM: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature, top_p, top_k = tl.load(chosen_by).to(tl.float32), tl.load(chosen_by + 1), tl.load(chosen_by + 2)
    z, tops, b = z + row * vocabulary, tops + row * blocks, tl.arange(0, BLOCKS)
    found, highest = found + row * ROOM, highest + row * (ROOM // PIECE)
    heights = tl.load(tops + b, mask=b < blocks, other=float("-inf"))
    top = tl.max(heights, 0)
    tl.store(highest + tl.arange(0, ROOM // PIECE), top)  # in place of ``tops`` where every piece is to be looked at
    tl.debug_barrier()
    low, end = tl.full([], -2139095041, tl.int64), _key(top).to(tl.int64)  # from the key of -inf
    by_k = (top_k > 0) & (top_k < vocabulary)
    if by_k:  # the highest values of so many blocks are as many values: the k-th of all can't lie below theirs
        wanted, few = top_k, tl.cdiv(blocks, PIECE)
        low = _search(tops, highest, low, end, 0.0, top_k, by_k, top, temperature, blocks, few, PIECE, WAYS)
    else:  # all that lies below can't make up what is cut off; half of it, for rounding's sake
        mass = tl.load(masses + row * blocks + b, mask=b < blocks, other=0.0) * _mass(heights, top, temperature)
        wanted = tl.sum(mass.to(tl.float64), 0)
        share = (1 - top_p) / 2 * wanted / vocabulary
        low = tl.maximum(low, _key(top + temperature * tl.log(share).to(tl.float32)).to(tl.int64))
        wanted = tl.where(top_p < 1, top_p * wanted, float("inf"))
    high, limit, more = end, end, tl.zeros([], tl.float64)
    count = _gather(z, tops, low, limit, found, vocabulary, blocks, BLOCK, RUN, ROOM)
    while (count > ROOM) & (low < high):
        low, high, above = _narrow(
            z, tops, low, high, 0.0, wanted, by_k, top, temperature, vocabulary, blocks, BLOCK, WAYS
        )
        if not by_k:  # what lies above is counted; for the k it must be at hand later
            limit, more = high, tl.where(high < limit, above, more)
        count = _gather(z, tops, low, limit, found, vocabulary, blocks, BLOCK, RUN, ROOM)
    tl.debug_barrier()
    if count <= ROOM:  # what decides is there, in little memory
        few = tl.cdiv(count, PIECE)
        low = _cut(found, highest, low, high, more, wanted, by_k, end, top_p, top, temperature, count, few, PIECE, WAYS)
    else:
        low = _cut(z, tops, low, high, 0.0, wanted, by_k, end, top_p, top, temperature, vocabulary, blocks, BLOCK, WAYS)
    tl.store(least + row, _value(low.to(tl.int32)))


@triton.jit
def _cut(
    z, tops, low, high, more, wanted, by_k, end, top_p, top, temperature, vocabulary, blocks,
    BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """The key of the least logit that stays: of the ``wanted`` largest those that make up ``top_p`` of their mass."""
    low = _search(z, tops, low, high, more, wanted, by_k, top, temperature, vocabulary, blocks, BLOCK, WAYS)
    if by_k & (top_p < 1):
        bounds = tl.zeros([WAYS], tl.int32) + low.to(tl.int32)  # of values that tie, as many as k leaves room for
        count = tl.max(_above(z, tops, bounds, True, top, temperature, vocabulary, blocks, BLOCK, WAYS), 0)
        total = tl.max(_above(z, tops, bounds, False, top, temperature, vocabulary, blocks, BLOCK, WAYS), 0)
        total += (wanted - count) * _mass(_value(low.to(tl.int32)), top, temperature)
        low = _search(z, tops, low, end, 0.0, top_p * total, False, top, temperature, vocabulary, blocks, BLOCK, WAYS)
    return low


@triton.jit
def _first(running, weights, mark, i, SIZE: tl.constexpr):
    """The first index at which the running sum exceeds ``mark`` and the weight isn't 0; the last such at the end."""
    index = tl.min(tl.where((running > mark) & (weights > 0), i, SIZE), 0)
    return tl.minimum(index, tl.max(tl.where(weights > 0, i, 0), 0))


@triton.jit
def _draw(
    z, least, tops, masses, noise, chosen_by, ids, logprobs, vocabulary, blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, GREEDY: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    row, b = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    temperature = tl.load(chosen_by).to(tl.float32)
    high = tl.load(tops + row * blocks + b, mask=b < blocks, other=float("-inf"))
    top = tl.max(high, 0)
    mass = tl.load(masses + row * blocks + b, mask=b < blocks, other=0.0).to(tl.float64)
    mass *= _mass(high, top, temperature)
    total = tl.sum(mass, 0)
    running = tl.cumsum(mass, 0)
    mark = tl.load(noise + row) * total
    if GREEDY:
        hit = tl.min(tl.where(high == top, b, BLOCKS - 1), 0)
    else:
        hit = _first(running, mass, mark, b, BLOCKS)
    j = tl.arange(0, BLOCK)
    i = hit * BLOCK + j
    x = tl.load(z + row * vocabulary + i, mask=i < vocabulary, other=float("-inf"))
    if CUT:
        x = tl.where(x < tl.load(least + row), float("-inf"), x)
    if GREEDY:
        place = tl.min(tl.where(x == top, j, BLOCK - 1), 0)
    else:
        weights = _mass(x, top, temperature).to(tl.float64)
        inside = tl.sum(tl.where(b == hit, mass, 0.0), 0)
        share = (mark - tl.sum(tl.where(b == hit, running, 0.0), 0) + inside) / inside
        place = _first(tl.cumsum(weights, 0), weights, share * tl.sum(weights, 0), j, BLOCK)
    chosen = tl.sum(tl.where(j == place, x, 0.0), 0)
    tl.store(ids + row, tl.minimum(hit * BLOCK + place, vocabulary - 1))
    tl.store(logprobs + row, ((chosen - top) / temperature - tl.log(total)).to(tl.float32))


def sample(
    z: Tensor, noise: Tensor, chosen_by: Tensor, ids: Tensor, logprobs: Tensor, *, greedy: bool, cut: bool
) -> None:
    """``sampling.choose`` into ``ids [N]`` (int64) and ``logprobs [N]`` (float32), but ``z [N, V]`` stays as it is.

    ``chosen_by [3]`` (float64) are temperature, ``top_p`` and ``top_k``, the latter two read where ``cut``.
    """
    rows, vocabulary = z.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    width = triton.next_power_of_2(blocks)
    tops, masses = z.new_empty(2, rows, blocks).unbind()
    least = z.new_empty(rows)

    def measure(cut: bool) -> None:
        _blocks[(rows, triton.cdiv(blocks, RUN))](
            z, least, tops, masses, chosen_by, vocabulary, blocks, BLOCK, RUN, cut
        )

    measure(False)
    if cut and not greedy:
        assert blocks <= ROOM
        found, highest = z.new_empty(rows, ROOM), z.new_empty(rows, ROOM // PIECE)
        _least[(rows,)](
            z, tops, masses, found, highest, least, chosen_by, vocabulary, blocks, width, BLOCK, FEW, WAYS, ROOM, PIECE,
            num_warps=8,
        )  # fmt: skip
        measure(True)
    _draw[(rows,)](
        z, least, tops, masses, noise, chosen_by, ids, logprobs, vocabulary, blocks, width, BLOCK, greedy,
        cut and not greedy,
    )  # fmt: skip
