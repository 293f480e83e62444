"""Rows packed end to end on one token axis; a group's prompt is stored once, and so is what all prompts start with.

A packed micro-batch is cut into *segments*: runs of queries that see a run of keys, causally and aligned at their ends.
A prompt is one segment (its keys are itself). A response is another: its keys are its prompt followed by itself, so
eight samples of a prompt read the prompt's keys eight times but compute them once, forward and backward. A prompt with
one response is one segment with it.

Example, prompt ``[p q]`` with responses ``[a b c]`` and ``[d e]``. The last token of a response predicts nothing that
is trained, so it is left out::

    ids        p q a b d          segments  queries [0:2] keys p q
    positions  0 1 2 3 2                    queries [2:4] keys p q a b
    predict    1 2 3 | 1 4                  queries [4:5] keys p q d

``predict[t]`` is the packed position whose hidden state predicts response token ``t``. A model that reads the tokens
themselves (a scorer) wants ``pack(..., ends=True)``: nothing is left out, and ``predict[t]`` is where ``t`` lies::

    ids        p q a b c d e      predict   2 3 4 | 5 6
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel

from verl.batch import Ragged

ATTENTION = "verl_packed"
WORTH_SHARING = 8  # tokens; a shorter common start isn't worth a segment of its own


class Layout(Protocol):
    """Where the keys of each query lie. Passed to the model's forward as ``layout=``."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """``q [T, H, D]``, ``k`` and ``v [T, H_kv, D]`` of this call's tokens -> ``[T, H, D]``."""


@dataclass(frozen=True)
class AttentionOptions:
    """What a model asks of its attention besides the mask."""

    scale: float | None = None
    dropout: float = 0.0
    window: int | None = None  # a query sees this many keys, itself included
    softcap: float | None = None


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Adapter to transformers' attention interface: ``[1, H, T, D]`` in, ``[1, T, H, D]`` out."""
    layout: Layout | None = kwargs.get("layout")
    if layout is None:
        raise RuntimeError("this model generates and trains on packed rows: pass layout= (a Packed or a decode layout)")
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError(f"{type(module).__name__} uses attention sinks, which packed attention doesn't have")
    options = AttentionOptions(
        scale=kwargs.get("scaling"),
        dropout=kwargs.get("dropout", 0.0),
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
    )
    layer = module.layer_idx
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return layout.attend(layer, q, k, v, options)[None], None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, _attention)


def keep_out_of_graphs() -> None:
    """From now on ``torch.compile`` stops before attention and goes on behind it: a graph with it inside would be
    compiled anew for each layer's number and each micro-batch's layout."""
    AttentionInterface.register(ATTENTION, torch.compiler.disable(_attention))


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Plain attention: ``q [N, H, Lq, D]``, ``k, v [N, H_kv, Lk, D]``, ``mask [N, 1, Lq, Lk]`` True where seen."""
    if options.softcap is None:
        gqa = k.shape[1] != q.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=options.dropout, scale=options.scale, enable_gqa=gqa
        )
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = options.softcap * torch.tanh((q @ k.transpose(-1, -2)) * (scale / options.softcap))
    weights = torch.softmax(scores.float().masked_fill(~mask, float("-inf")), -1).to(v.dtype)
    return F.dropout(weights, options.dropout) @ v


class _Read(torch.autograd.Function):
    """``x [T, H, D]``, ``index [...]`` -> ``x[index]``. The gradients of a position that is read often (a prompt's) add
    up in float32 at least: on a GPU without the sort by which indexing's own backward finds them, on a CPU in one order
    whatever the number of threads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.positions = x.shape[0]
        return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        wide, shape = torch.promote_types(grad.dtype, torch.float32), (ctx.positions, *grad.shape[index.dim() :])
        total = torch.zeros(shape, dtype=wide, device=grad.device)
        return total.index_add_(0, index.flatten(), grad.to(wide).flatten(0, index.dim() - 1)).to(grad.dtype), None


def read(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]``, whose gradient is the same to the last bit each time: indexing's own isn't on several threads."""
    return x[index] if x.is_cuda else cast(Tensor, _Read.apply(x, index))


def send(x: Tensor, device: torch.device | str) -> Tensor:
    """``x`` on the ``device``. From the host to a GPU it goes by pinned memory and waits its turn there, so that the
    host doesn't wait for what the GPU still computes."""
    if x.device.type == "cpu" and torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


@dataclass
class _Bucket:
    """Segments of similar length, padded together: packed positions ``q_index [N, Lq]`` and ``k_index [N, Lk]``.

    ``last [N, Lq]`` is the last of its segment's keys that a query sees. A padded one sees the first alone, so that its
    softmax is finite; it is dropped."""

    q_index: Tensor
    k_index: Tensor
    last: Tensor
    _masks: dict[int | None, Tensor] = field(default_factory=dict, init=False)

    def mask(self, window: int | None) -> Tensor:
        """``[N, 1, Lq, Lk]`` True where a query sees a key."""
        if window not in self._masks:
            key, last = torch.arange(self.k_index.shape[1], device=self.last.device), self.last[:, None, :, None]
            self._masks[window] = key <= last if window is None else (key <= last) & (key > last - window)
        return self._masks[window]


@dataclass
class Packed:
    """One packed micro-batch (module docstring). ``T`` packed tokens, ``R`` response tokens, ``S`` segments."""

    ids: Tensor  # [T]
    positions: Tensor  # [T]
    predict: Ragged  # [R] packed position that predicts (with ends: that is) each response token, one run per row
    q_lengths: list[int]  # [S] queries; segments lie end to end on the packed axis
    k_spans: list[list[tuple[int, int]]]  # [S] packed ranges that make up each segment's keys

    def __len__(self) -> int:
        return self.ids.shape[0]

    def to(self, device: torch.device | str) -> Packed:
        ids, positions, predict = (send(x, device) for x in (self.ids, self.positions, self.predict.values))
        return Packed(ids, positions, self.predict.with_values(predict), self.q_lengths, self.k_spans)

    def own(self, x: Tensor) -> Tensor:
        """Of ``x [R, ...]``, those response tokens whose ``predict`` is among these tokens: all."""
        return x

    def whole(self, x: Tensor) -> Tensor:
        """What ``own`` left, computed on all its ranks -> ``[R, ...]``."""
        return x

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        del layer
        plain = not options.dropout and not options.softcap and q.shape[-1] == v.shape[-1]  # all the kernel can do
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and plain:
            return self._attend_varlen(q, k, v, options)
        parts, (buckets, place) = [], self._buckets
        for b in buckets:
            mine, keys, values = (
                _Read.apply(x, index).transpose(1, 2) for x, index in ((q, b.q_index), (k, b.k_index), (v, b.k_index))
            )
            part = masked_attention(mine, keys, values, b.mask(options.window), options)
            parts.append(part.transpose(1, 2).flatten(0, 1))
        return cast(Tensor, _Read.apply(torch.cat(parts), place))

    def _attend_varlen(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        index, cu_q, cu_k, max_q, max_k = self._varlen
        if index is not None:
            k, v = _Read.apply(k, index), _Read.apply(v, index)
        if k.shape[1] != q.shape[1]:  # the kernel wants one key head per query head
            repeat = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        window = (-1 if options.window is None else options.window - 1, 0)  # causal, aligned at the ends
        out = varlen_attn(
            q.contiguous(), k.contiguous(), v.contiguous(), cu_q, cu_k, max_q, max_k, window_size=window,
            scale=options.scale,
        )  # fmt: skip
        assert isinstance(out, Tensor)  # a pair only where return_aux asks
        return out

    @cached_property
    def _varlen(self) -> tuple[Tensor | None, Tensor, Tensor, int, int]:
        """``(packed position of each key, or None where these are all positions once, in order; where each segment's
        queries and keys begin; the longest of both)``."""
        device = self.ids.device
        k_lengths = [sum(end - start for start, end in spans) for spans in self.k_spans]
        index = None
        if any(len(spans) > 1 for spans in self.k_spans):
            index = torch.cat([torch.arange(start, end) for spans in self.k_spans for start, end in spans])
            index = send(index, device)
        cu_q, cu_k = (
            F.pad(torch.tensor(x, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
            for x in (self.q_lengths, k_lengths)
        )
        return index, send(cu_q, device), send(cu_k, device), max(self.q_lengths), max(k_lengths)

    @cached_property
    def _buckets(self) -> tuple[list[_Bucket], Tensor]:
        """Segments by size class (powers of two from 32), so that padding costs at most about a factor of two, and
        that in attention alone; and ``[T]`` where each packed position's query lies among the buckets' padded queries,
        laid end to end."""
        starts = [0]
        for n in self.q_lengths:
            starts.append(starts[-1] + n)
        classes: dict[tuple[int, int], list[int]] = {}
        for s, spans in enumerate(self.k_spans):
            queries, keys = self.q_lengths[s], sum(end - start for start, end in spans)
            classes.setdefault((max(queries, 32).bit_length(), max(keys, 32).bit_length()), []).append(s)
        place, at, buckets = torch.empty(len(self), dtype=torch.int64), 0, []
        for members in classes.values():
            width = max(self.q_lengths[s] for s in members)
            for s in members:
                place[starts[s] : starts[s + 1]] = torch.arange(at, at + self.q_lengths[s])
                at += width
            buckets.append(self._bucket(members, starts))
        return buckets, send(place, self.ids.device)

    def _bucket(self, members: list[int], starts: list[int]) -> _Bucket:
        queries = [torch.arange(starts[s], starts[s + 1]) for s in members]
        keys = [torch.cat([torch.arange(start, end) for start, end in self.k_spans[s]]) for s in members]
        # aligned at the ends: the last query sees every key
        last = [torch.arange(len(k) - len(q), len(k)) for q, k in zip(queries, keys, strict=True)]
        padded = (torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (queries, keys, last))
        return _Bucket(*(send(x, self.ids.device) for x in padded))


def common_prefix(prompts: Sequence[Sequence[int] | Tensor]) -> int:
    """Tokens that all prompts start with (a system prompt, say) and that are worth computing once; else 0.

    Each prompt keeps at least its last token for itself: that one predicts its first response token.
    """
    if len(prompts) < 2:
        return 0
    least = min(len(p) for p in prompts) - 1
    head = torch.stack([torch.as_tensor(p[:least]) for p in prompts])
    length = int((head == head[:1]).all(0).long().cumprod(0).sum())
    return length if length >= WORTH_SHARING else 0


def pack(prompts: Ragged, responses: Ragged, groups: Sequence[int] | None = None, *, ends: bool = False) -> Packed:
    """Pack ``B`` rows. Rows of equal ``groups`` number must have equal prompts, and their prompt is stored once;
    what all prompts start with is stored once for all of them.

    ``groups=None`` stores every row's prompt for itself. ``ends``: keep each response's last token too, and let
    ``predict`` point at the response tokens themselves. Every prompt and every response needs at least one token.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts for {len(responses)} responses")
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    q_lengths: list[int] = []
    k_spans: list[list[tuple[int, int]]] = []
    predict: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * len(prompts)
    at = 0

    def add(tokens: Tensor, first_position: int, keys: list[tuple[int, int]]) -> None:
        nonlocal at
        n = tokens.shape[0]
        ids.append(tokens)
        positions.append(torch.arange(first_position, first_position + n))
        q_lengths.append(n)
        k_spans.append([*keys, (at, at + n)])
        at += n

    members: dict[int, list[int]] = {}
    for row in range(len(prompts)):
        members.setdefault(row if groups is None else int(groups[row]), []).append(row)
    prompt_rows, response_rows = list(prompts.rows()), list(responses.rows())
    for row, prompt in enumerate(prompt_rows):
        if not prompt.shape[0]:
            raise ValueError(f"row {row} has an empty prompt, so nothing predicts its first response token")
    shared = 0 if groups is None else common_prefix([prompt_rows[rows[0]] for rows in members.values()])
    if shared:
        add(prompt_rows[0][:shared], 0, [])
    start = [(0, shared)] if shared else []
    for rows in members.values():
        prompt = prompt_rows[rows[0]]
        prompt_span = (at, at + prompt.shape[0] - shared)
        if len(rows) > 1:
            add(prompt[shared:], shared, start)
        for row in rows:
            if prompt_rows[row].shape != prompt.shape or not torch.equal(prompt_rows[row], prompt):
                raise ValueError(f"rows {rows[0]} and {row} have the same group number but different prompts")
            n = response_rows[row].shape[0]
            if not n:
                raise ValueError(f"row {row} has an empty response")
            own = torch.arange(n) + (at if len(rows) > 1 else prompt_span[1])
            predict[row] = own if ends else torch.cat([torch.tensor([prompt_span[1] - 1]), own[:-1]])
            kept = response_rows[row] if ends else response_rows[row][:-1]
            if len(rows) == 1:
                add(torch.cat([prompt[shared:], kept]), shared, start)
            elif len(kept):
                add(kept, prompt.shape[0], [*start, prompt_span])
    return Packed(
        torch.cat(ids), torch.cat(positions), Ragged(torch.cat(predict), responses.lengths), q_lengths, k_spans
    )


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Let ``model`` attend by the function that transformers knows under ``name``, if it can be changed."""
    for part in model.modules():  # before transformers 5.18 a backbone's copy of the configuration isn't reached
        if isinstance(part, PreTrainedModel) and type(part.config) is type(model.config):
            part.set_attn_implementation(name)


def last_hidden(backbone: torch.nn.Module, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
    """Hidden states ``[T, D]`` of a Hugging Face decoder (without its head) for packed tokens."""
    out = backbone(input_ids=ids[None], position_ids=positions[None], use_cache=False, layout=layout)
    return out.last_hidden_state[0]
