"""Schedules, masters, clipping, decay and exact restoring."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.engines.pieces import gathered_state
from verl.config.errors import RequestError, RunError
from verl.config.model import OptimizerConfig
from verl.engines.optim import Optimizer, learning_rate


def test_schedules_warm_up_and_end_with_the_run():
    def curve(schedule, warmup=2, total=6):
        cfg = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=warmup)
        return [round(learning_rate(cfg, i, total), 6) for i in range(total + 1)]

    assert curve("constant") == [0.5, 1, 1, 1, 1, 1, 1]
    assert curve("linear") == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    half = [round((1 + math.cos(math.pi * x / 4)) / 2, 6) for x in range(5)]
    assert curve("cosine") == [0.5, 1, *half]
    assert curve("linear", warmup=0, total=1) == [1, 0]


def test_a_schedule_that_ends_needs_the_end():
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(RequestError, match="total_steps"):
        Optimizer([("p", p)], OptimizerConfig(schedule="linear", warmup_steps=5), None)


def params(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return [
        ("w", nn.Parameter(torch.randn(4, 3, generator=g).to(dtype))),
        ("b", nn.Parameter(torch.randn(4, generator=g).to(dtype))),
    ]


def backward(named, seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    sum((p.float() * torch.randn(p.shape, generator=g)).sum() * scale for _, p in named).backward()


def test_adamw_is_torch_s_with_decay_on_matrices_only():
    ours, theirs = params(), params()
    cfg = OptimizerConfig(lr=0.1, weight_decay=0.5, max_grad_norm=1e9)
    optimizer = Optimizer(ours, cfg, None)
    reference = torch.optim.AdamW(
        [{"params": [theirs[0][1]], "weight_decay": 0.5}, {"params": [theirs[1][1]], "weight_decay": 0.0}],
        lr=0.1,
        betas=cfg.betas,
    )
    for seed in range(3):
        for named in (ours, theirs):
            backward(named, seed)
        optimizer.step()
        reference.step()
        reference.zero_grad()
    for (_, a), (_, b) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_clipping_uses_the_norm_over_all_parameters():
    named = params()
    before = [p.detach().clone() for _, p in named]
    optimizer = Optimizer(named, OptimizerConfig(name="sgd", lr=1.0, max_grad_norm=0.5), None)
    backward(named, 1)
    expected = torch.cat([p.grad.flatten() for _, p in named]).norm().item()
    norm, stepped = optimizer.step()
    moved = torch.cat([(p - b).flatten() for (_, p), b in zip(named, before, strict=True)]).norm().item()
    assert stepped and norm == pytest.approx(expected) and moved == pytest.approx(0.5, rel=1e-5)
    assert all(p.grad is None for _, p in named)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_isnt_finite_changes_nothing_but_the_clock(bad):
    named = params()
    optimizer = Optimizer(named, OptimizerConfig(lr=0.1, weight_decay=0.1, warmup_steps=4), None)
    backward(named, 0)
    optimizer.step()
    before = [p.detach().clone() for _, p in named]
    state = gathered_state(optimizer)
    backward(named, 1, scale=bad)
    norm, stepped = optimizer.step()
    assert not stepped and not math.isfinite(norm)
    assert all(torch.equal(p, b) for (_, p), b in zip(named, before, strict=True))
    assert all(torch.equal(t, state[n]) for n, t in gathered_state(optimizer).items())
    assert optimizer.step_number == 2


def test_bf16_parameters_learn_below_their_last_digit():
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    storage = p.data_ptr()
    optimizer = Optimizer([("p", p)], OptimizerConfig(name="sgd", lr=1.0, max_grad_norm=1e9), None)
    for i in range(8):  # bf16 near 1 has steps of 1/128 below: one update of 1/1024 is lost without a master
        (p.float().sum() / 1024).backward()
        assert p.grad is None, "the gradient went to the master"
        optimizer.step()
        assert i or torch.equal(p, torch.ones_like(p))
    assert p.data_ptr() == storage, "written in place"
    torch.testing.assert_close(optimizer.masters["p"].detach(), torch.full((3,), 1 - 8 / 1024))
    assert (p.float() < 1).all()


def test_bf16_gradients_add_up_in_float32():
    p = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = Optimizer([("p", p)], OptimizerConfig(name="sgd", lr=1.0, max_grad_norm=1e9), None)
    for value in (1.0, *[1 / 512] * 64):  # each is too small to change a bf16 sum of 1
        (p.float() * value).sum().backward()
    norm, _ = optimizer.step()
    assert norm == pytest.approx(1 + 64 / 512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", torch.optim.NAdam])
def test_restoring_goes_on_bit_for_bit(dtype, name):
    cfg = OptimizerConfig(name=name, lr=0.03, weight_decay=0.1, schedule="cosine", warmup_steps=1)

    def run(named, optimizer, seeds):
        for seed in seeds:
            backward(named, seed)
            optimizer.step()

    straight = params(dtype)
    run(straight, Optimizer(straight, cfg, 4, matrices={"w"}), range(4))

    first = params(dtype)
    optimizer = Optimizer(first, cfg, 4, matrices={"w"})
    run(first, optimizer, range(2))
    tensors, facts = gathered_state(optimizer), optimizer.facts
    second = [(n, nn.Parameter(p.detach().clone())) for n, p in first]
    again = Optimizer(second, cfg, 4, matrices={"w"})
    again.restore(tensors, facts)
    run(second, again, range(2, 4))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(straight, second, strict=True))


def trained(dtype, name, offload, start=None):
    """Two steps, or two more; parameters, optimizer."""
    named = params(dtype) if start is None else [(n, nn.Parameter(p.detach().clone())) for n, p in start[0]]
    cfg = OptimizerConfig(name=name, lr=0.03, weight_decay=0.1, max_grad_norm=0.5)
    optimizer = Optimizer(named, cfg, None, matrices={"w"}, offload=offload)
    if start is not None:
        optimizer.restore(gathered_state(start[1]), start[1].facts)
    for seed in (0, 1) if start is None else (2, 3):
        for micro in range(2):
            backward(named, 10 * seed + micro)
        assert optimizer.step()[1]
    return named, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_masters_of_their_own_change_no_number(dtype, name):
    """Also where one half of the training had them and the other hadn't."""
    straight, apart = trained(dtype, name, False), trained(dtype, name, True)
    assert {p.dtype for p in apart[1].masters.values()} == {torch.float32}
    assert all(apart[1].masters[n].data_ptr() != p.data_ptr() and p.grad is None for n, p in apart[0])
    for first, then in ((straight, True), (apart, False), (apart, True)):
        goes_on, expected = trained(dtype, name, then, first)[0], trained(dtype, name, False, straight)[0]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(goes_on, expected, strict=True))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(straight[0], apart[0], strict=True))


def test_state_of_other_parameters_is_refused():
    named = params()
    optimizer = Optimizer(named, OptimizerConfig(), None)
    with pytest.raises(RunError, match="exp_avg/other"):
        optimizer.restore({"exp_avg/other": torch.zeros(1)}, {"step": 1})
    with pytest.raises(RunError, match="master/w"):
        Optimizer(params(torch.bfloat16), OptimizerConfig(), None).restore({}, {"step": 1})


def test_a_factory_gets_the_masters_and_the_learning_rate():
    named = params()
    optimizer = Optimizer(named, OptimizerConfig(name=torch.optim.RMSprop, lr=0.25), None)
    backward(named, 0)
    assert optimizer.step()[1]
    assert optimizer._torch[0].param_groups[0]["lr"] == 0.25
