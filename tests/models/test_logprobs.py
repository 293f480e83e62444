"""Chunked log-probabilities against the plain formula: values, gradients, finite differences."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from verl.models.logprobs import add_product, head_logits, token_logprobs

N, D, V = 11, 6, 17


def plain(hidden, weight, bias, targets, temperature, scale, softcap):
    z = hidden @ weight.t() if bias is None else hidden @ weight.t() + bias
    z = z * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    log_p = torch.log_softmax(z / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(dtype=torch.float32, bias=True):
    g = torch.Generator().manual_seed(0)
    hidden, weight, b = (torch.randn(*s, generator=g, dtype=dtype) for s in ((N, D), (V, D), (V,)))
    leaves = [t.requires_grad_() for t in (hidden, weight, b)]
    return leaves[0], leaves[1], leaves[2] if bias else None, torch.randint(0, V, (N,), generator=g)


@pytest.mark.parametrize("keep_bytes", [0, 1 << 20], ids=["recomputed", "kept"])
@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize(("scale", "softcap", "bias"), [(1.0, None, False), (0.3, None, True), (2.0, 3.0, True)])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_equal_the_plain_formula(keep_bytes, chunk, scale, softcap, bias, with_entropy):
    options = {"temperature": 0.7, "scale": scale, "softcap": softcap}
    g1, g2 = torch.randn(2, N, generator=torch.Generator().manual_seed(1))
    grads = []
    for ours in (True, False):
        h, w, b, t = inputs(bias=bias)
        if ours:
            lp, ent = token_logprobs(
                h, w, b, t, **options, with_entropy=with_entropy, chunk=chunk, keep_bytes=keep_bytes
            )
            values = [lp, ent]
        else:
            lp, ent = plain(h, w, b, t, **options)
            torch.testing.assert_close(values[0], lp, atol=1e-5, rtol=0)
            if with_entropy:
                torch.testing.assert_close(values[1], ent, atol=1e-5, rtol=0)
        loss = (lp * g1).sum() + ((ent * g2).sum() if with_entropy else 0)
        loss.backward()
        grads.append([x.grad for x in (h, w, b) if x is not None])
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("keep_bytes", [0, 1 << 20])
def test_finite_differences_in_float64(softcap, keep_bytes):
    h, w, b, t = inputs(torch.float64)

    def f(h, w, b):
        return token_logprobs(
            h, w, b, t, temperature=1.3, scale=0.8, softcap=softcap, with_entropy=True, chunk=4, keep_bytes=keep_bytes
        )

    assert torch.autograd.gradcheck(f, (h, w, b))


def test_entropy_alone_and_a_second_backward_give_the_right_gradient():
    h, w, _, t = inputs(bias=False)
    _, entropy = token_logprobs(h, w, None, t, with_entropy=True)
    entropy.sum().backward(retain_graph=True)
    once = h.grad.clone()
    entropy.sum().backward()
    torch.testing.assert_close(h.grad, 2 * once)
    h2, w2, _, _ = inputs(bias=False)
    plain(h2, w2, None, t, 1.0, 1.0, None)[1].sum().backward()
    torch.testing.assert_close(once, h2.grad, atol=1e-5, rtol=1e-5)


def test_only_the_gradients_that_are_asked_for():
    h, w, _, t = inputs(bias=False)
    w.requires_grad_(False)
    token_logprobs(h, w, None, t)[0].sum().backward()
    assert w.grad is None and h.grad.abs().sum() > 0


def test_bf16_gives_float32_results_and_bf16_gradients():
    h, w, _, t = inputs(torch.bfloat16, bias=False)
    lp, ent = token_logprobs(h, w, None, t, with_entropy=True, chunk=2)
    assert lp.dtype == ent.dtype == torch.float32
    lp.sum().backward()
    assert h.grad.dtype == w.grad.dtype == torch.bfloat16
    h32, w32 = (x.detach().float().requires_grad_() for x in (h, w))
    plain(h32, w32, None, t, 1.0, 1.0, None)[0].sum().backward()
    torch.testing.assert_close(w.grad.float(), w32.grad, atol=0.1, rtol=0.05)


def test_extreme_logits_stay_finite():
    h = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    w = torch.tensor([[1.0], [-1.0], [0.0]])
    lp, ent = token_logprobs(h, w, None, torch.tensor([1, 1]), with_entropy=True)
    (lp.sum() + ent.sum()).backward()
    torch.testing.assert_close(lp, torch.tensor([-600.0, 0.0]))
    assert torch.isfinite(h.grad).all() and (ent >= 0).all()


def test_sampler_logits_are_the_trainer_s():
    h, w, b, t = inputs()
    z = head_logits(h, w, b, scale=0.5, softcap=3.0)
    lp, _ = token_logprobs(h, w, b, t, scale=0.5, softcap=3.0)
    torch.testing.assert_close(z.log_softmax(-1).gather(1, t[:, None])[:, 0], lp)


def test_temperature_zero_has_no_density():
    h, w, b, t = inputs()
    with pytest.raises(ValueError, match="above 0"):
        token_logprobs(h, w, b, t, temperature=0.0)


INTERPRETED = """
import torch
from tests.models.test_logprobs import plain
from verl.models import logprobs
logprobs._fused = lambda hidden, bias, softcap: True
logprobs._kernels().BLOCK = 64
for keep_bytes in (0, 1 << 20):
    for sides in ((0, 1), (0,), (1,)):  # log-probabilities, entropy
        results = []
        for ours in (True, False):
            g = torch.Generator().manual_seed(0)
            h, w, slopes = (torch.randn(*s, generator=g) for s in ((7, 8), (201, 8), (2, 7)))
            h, w, t = h.requires_grad_(), w.requires_grad_(), torch.arange(7) * 33 % 201
            if ours:
                out = logprobs.token_logprobs(
                    h, w, None, t, temperature=0.7, scale=0.9, with_entropy=True, chunk=3, keep_bytes=keep_bytes)
            else:
                out = plain(h, w, None, t, 0.7, 0.9, None)
            sum((out[i] * slopes[i]).sum() for i in sides).backward()
            results.append([*out, h.grad, w.grad])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
"""


def test_the_kernels_of_a_gpu_compute_the_same():
    """In Triton's interpreter, which only a process that began with it has."""
    pytest.importorskip("triton")
    env, root = {**os.environ, "TRITON_INTERPRET": "1"}, Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_runs_add_up_in_float32(dtype):
    g = torch.Generator().manual_seed(0)
    total, expected = torch.zeros(9, 5), torch.zeros(9, 5, dtype=torch.float64)
    for _ in range(40):
        slopes, hidden = (torch.randn(6, n, generator=g).to(dtype) for n in (9, 5))
        add_product(total, slopes.t(), hidden)
        expected += slopes.t().double() @ hidden.double()
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)
