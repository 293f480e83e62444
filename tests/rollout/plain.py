"""What the kernels of ``verl/rollout/kernels.py`` compute, in plain torch on a CPU, where Triton's interpreter takes a
second for what a GPU does in microseconds. ``test_kernels.py`` compares the two."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from tests.rollout.interpreter import TRITON
from verl.rollout.base import Sampling
from verl.rollout.sampling import choose

if not TRITON:  # what imports the kernels can be tested with these
    sys.modules["verl.rollout.kernels"] = nothing = ModuleType("verl.rollout.kernels")
    vars(nothing).update(dict.fromkeys(("add_norm", "silu_mul", "rotate_store", "attend", "sample")))
from verl.rollout import graph


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x is not None:
        residual.add_(x)
    return norm(residual, weight, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def stored(address: int, slots: int, heads: int, length: int, like: Tensor, dim: int) -> Tensor:
    """The memory at an address as ``[slots, H_kv, length, D]``."""
    n = slots * heads * length * dim
    memory = (ctypes.c_char * (n * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype, count=n).view(slots, heads, length, dim)


def rotate_store(q, k, v, norms, eps, cos, sin, table, slot, place) -> None:
    rows, dim = len(q), cos.shape[1]
    heads = [x.view(rows, -1, dim) for x in (q, k)]
    if norms is not None:
        heads = [norm(x, w, eps) for x, w in zip(heads, norms, strict=True)]
    turned = apply_rotary_pos_emb(*(x.transpose(0, 1)[None] for x in heads), cos[None], sin[None])
    q_new, k_new = (x[0].transpose(0, 1) for x in turned)
    q.copy_(q_new.reshape(q.shape))
    entry, kept = table.tolist(), slot >= 0
    if kept.any():
        for address, new in ((entry[2], k_new), (entry[3], v.view(k_new.shape))):
            store = stored(address, int(slot.max()) + 1, k_new.shape[1], entry[5], k, dim)
            store[slot[kept], :, place[kept]] = new[kept]


def attend(q, dim, kv_heads, table, slot, group, prompt, place, *, together) -> Tensor:
    entry, heads = table.tolist(), q.shape[1] // dim
    out = torch.zeros_like(q).view(len(q), heads, dim)
    prompts = [stored(a, int(group.max()) + 1, kv_heads, entry[4], q, dim) for a in entry[:2]]
    responses = [stored(a, max(0, int(slot.max())) + 1, kv_heads, entry[5], q, dim) for a in entry[2:4]]
    for row, (s, g, p, at) in enumerate(zip(*(x.tolist() for x in (slot, group, prompt, place)), strict=True)):
        if s >= 0:
            k, v = (
                torch.cat([a[g, :, :p], b[s, :, : at + 1]], 1).float() for a, b in zip(prompts, responses, strict=True)
            )
            k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
            out[row] = F.scaled_dot_product_attention(q.view(-1, heads, 1, dim)[row].float(), k, v)[:, 0].to(q.dtype)
    return out.view(q.shape)


def sample(z, noise, options, ids, logprobs, *, greedy, cut) -> None:
    temperature, top_p, top_k = options.tolist()
    sampling = Sampling(temperature, top_p if cut else 1.0, int(top_k) if cut else 0, greedy=greedy)
    got = choose(z.clone(), noise, sampling)
    ids.copy_(got[0])
    logprobs[: len(z)].copy_(got[1])


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Let ``Decode`` call these."""
    for function in (add_norm, silu_mul, rotate_store, attend, sample):
        patch.setattr(graph, function.__name__, function)
