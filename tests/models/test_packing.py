"""Packing and its attention, beside the plain model's numbers in test_policy."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import f_gpt2, f_llama
from verl.batch import Ragged
from verl.models.packing import ATTENTION, AttentionOptions, common_prefix, masked_attention, pack, read
from verl.models.policy import Policy


def ragged(*rows):
    return Ragged.from_rows([list(r) for r in rows], dtype=torch.int64)


def test_the_worked_example():
    packed = pack(ragged([1, 2], [1, 2]), ragged([3, 4, 5], [6, 7]), [0, 0])
    assert packed.ids.tolist() == [1, 2, 3, 4, 6]
    assert packed.positions.tolist() == [0, 1, 2, 3, 2]
    assert packed.predict.values.tolist() == [1, 2, 3, 1, 4]
    assert packed.q_lengths == [2, 2, 1]


def test_what_all_prompts_start_with_is_stored_once():
    start = list(range(1, 10))
    packed = pack(ragged([*start, 20], [*start, 21, 22], [*start, 20]), ragged([3, 4], [5], [6, 7]), [0, 1, 0])
    assert packed.ids.tolist() == [*start, 20, 3, 6, 21, 22]
    assert packed.positions.tolist() == [*range(9), 9, 10, 10, 9, 10]
    assert packed.predict.values.tolist() == [9, 10, 13, 9, 11]
    assert packed.k_spans[2] == [(0, 9), (9, 10), (10, 11)]
    assert common_prefix([start, start]) == 8  # each keeps its last token
    assert common_prefix([start[:5], start[:6]]) == 0 and common_prefix([start]) == 0


@pytest.mark.parametrize("make", [f_llama, f_gpt2])
def test_a_shared_start_changes_neither_logprobs_nor_gradients(make):
    start = torch.randint(3, 32, (9,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = ragged([*start, 20], [*start, 21, 22], [*start, 20], [*start, 30, 4, 4])
    responses = ragged([3, 4, 9], [5], [6, 7], [8, 8, 8, 2])
    results = []
    for groups in (None, [0, 1, 0, 2]):
        lm = make()
        lm.set_attn_implementation(ATTENTION)
        out = Policy(lm)(pack(prompts, responses, groups), responses.values, frozenset({"logprobs"}), 0.7)["logprobs"]
        out.square().sum().backward()
        results.append((out, [p.grad for p in lm.parameters()]))
    (plain, plain_grads), (shared, shared_grads) = results
    torch.testing.assert_close(shared, plain, rtol=0, atol=1e-5)
    for a, b in zip(shared_grads, plain_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_without_groups_every_row_has_its_prompt():
    packed = pack(ragged([1, 2], [1, 2]), ragged([3, 4], [6, 7]))
    assert packed.ids.tolist() == [1, 2, 3, 1, 2, 6] and packed.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert packed.predict.values.tolist() == [1, 2, 4, 5]
    assert packed.q_lengths == [3, 3] and packed.k_spans == [[(0, 3)], [(3, 6)]]  # each attends to itself alone


@pytest.mark.parametrize("groups", [None, [0, 0, 1, 2]], ids=["alone", "shared"])
@pytest.mark.parametrize("window", [None, 3])
def test_what_the_kernel_is_given_means_the_same(monkeypatch, groups, window):
    """The way to ``varlen_attn``, which computes here as its documentation says: segment by segment."""

    def plainly(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, scale):
        out = []
        assert max_q == cu_q.diff().max() and max_k == cu_k.diff().max() and q.shape == (cu_q[-1], 4, 8)
        for i in range(len(cu_q) - 1):
            queries, keys, values = (x[c[i] : c[i + 1]] for x, c in ((q, cu_q), (k, cu_k), (v, cu_k)))
            gap = torch.arange(len(queries))[:, None] + len(keys) - len(queries) - torch.arange(len(keys))
            seen = (gap >= 0) & (gap <= window_size[0] if window_size[0] >= 0 else gap >= 0)
            options = AttentionOptions(scale=scale)
            args = (x.transpose(0, 1)[None] for x in (queries, keys, values))
            out.append(masked_attention(*args, seen[None, None], options)[0].transpose(0, 1))
        return torch.cat(out)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plainly, raising=False)
    g = torch.Generator().manual_seed(0)
    prompts = ragged([1, 2, 3], [1, 2, 3], [4], [*range(5, 12)])
    packed = pack(prompts, ragged([5, 6, 7], [8, 9], [3, 3], [1]), groups)
    qkv = [torch.randn(len(packed), heads, 8, generator=g) for heads in (4, 2, 2)]
    options, results = AttentionOptions(window=window), []
    for attend in (packed._attend_varlen, lambda *x: packed.attend(0, *x)):
        leaves = [x.clone().requires_grad_() for x in qkv]
        out = attend(*leaves, options)
        out.square().sum().backward()
        results.append([out, *(x.grad for x in leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("prompts", "responses", "groups", "message"),
    [
        (([1], [2]), ([3], [4]), [0, 0], "different prompts"),
        (([],), ([3],), None, "empty prompt"),
        (([1],), ([],), None, "empty response"),
        (([1],), ([2], [3]), None, "1 prompts for 2"),
    ],
)
def test_rows_that_cant_be_packed(prompts, responses, groups, message):
    with pytest.raises(ValueError, match=message):
        pack(ragged(*prompts), ragged(*responses), groups)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_attention_equals_the_slow_and_obvious_one(softcap, window, kv_heads):
    """Segments of several size classes; values narrower than keys; gradients finite although padded queries exist."""
    g = torch.Generator().manual_seed(0)
    prompts, groups = ragged(range(40), range(40), range(3)), [0, 0, 1]
    packed = pack(prompts, ragged(range(9), range(2), range(70)), groups)
    heads, t = 2, len(packed)
    q, k, v = (
        torch.randn(t, h, d, generator=g, requires_grad=True) for h, d in ((heads, 8), (kv_heads, 8), (kv_heads, 5))
    )
    ours = packed.attend(0, q, k, v, AttentionOptions(scale=0.4, window=window, softcap=softcap))
    slow = torch.empty(t, heads, 5)
    at = 0
    for n, spans in zip(packed.q_lengths, packed.k_spans, strict=True):
        keys = torch.cat([torch.arange(a, b) for a, b in spans])
        for i in range(n):
            last = len(keys) - n + i + 1
            seen = keys[max(0, last - window) if window else 0 : last]
            for h in range(heads):
                z = k[seen, h * kv_heads // heads] @ q[at + i, h] * 0.4
                z = z if softcap is None else softcap * torch.tanh(z / softcap)
                slow[at + i, h] = z.softmax(0) @ v[seen, h * kv_heads // heads]
        at += n
    torch.testing.assert_close(ours, slow, atol=1e-5, rtol=1e-5)
    weights = torch.randn(ours.shape, generator=g)
    mine = torch.autograd.grad((ours * weights).sum(), (q, k, v))
    theirs = torch.autograd.grad((slow * weights).sum(), (q, k, v))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_mask_is_a_byte_a_pair_and_is_made_for_windows_that_a_layer_has():
    packed = pack(ragged(range(40), range(3)), ragged(range(9), range(70)))
    q, k, v = torch.zeros(3, len(packed), 2, 8)
    sizes = []
    for window in (None, 3, 3, None):
        packed.attend(0, q, k, v, AttentionOptions(window=window))
        buckets, place = packed._buckets
        assert place.unique().numel() == len(packed)
        sizes.append(sum(mask.nbytes for b in buckets for mask in b._masks.values()))
    assert sizes == [48**2 + 72**2, 2 * (48**2 + 72**2), sizes[1], sizes[1]]


def test_gradients_on_several_threads_are_the_same_each_time():
    """Of what is read in many places; indexing adds those up in another order each time."""
    generator = torch.Generator().manual_seed(0)
    said = [torch.randint(3, 32, (40,), generator=generator).tolist() for _ in range(16)]
    packed = pack(ragged(*[list(range(64))] * 16), ragged(*said), [0] * 16)
    x = torch.randn(3, len(packed), 3, 64, generator=generator)
    weight = torch.randn(len(packed.predict.values), 3, 64, generator=generator)

    def gradients():
        q, k, v = (each.clone().requires_grad_() for each in x)
        out = read(packed.attend(0, q, k, v, AttentionOptions()), packed.predict.values)
        (out * weight).sum().backward()
        return q.grad, k.grad, v.grad

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = gradients()
        for _ in range(10):
            assert all(map(torch.equal, first, gradients()))
    finally:
        torch.set_num_threads(threads)
