"""AdamW with moments of 8 bits: beside AdamW, saved and restored, on one rank and on two."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engines.pieces import gathered_state, saved_state
from tests.engines.ranks import run
from tests.engines.test_fsdp import BOTH, batch, loss_fn, policy
from tests.tiny import f_llama
from verl.config.errors import RequestError
from verl.config.model import OptimizerConfig
from verl.engines import adam8
from verl.engines.fsdp import FsdpEngine
from verl.engines.optim import Optimizer
from verl.engines.sharding import device_mesh
from verl.layout import Layout

pytest.importorskip("bitsandbytes")
SHAPES = {
    "large": (96, 100),
    "short": (1, 5000),
    "small": (8, 4),
    "bias": (96,),
}  # a short one has blocks unlike others


def params(dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    g = torch.Generator().manual_seed(0)
    return [(n, nn.Parameter(torch.randn(shape, generator=g).to(dtype))) for n, shape in SHAPES.items()]


def steps(named: list[tuple[str, nn.Parameter]], optimizer: Optimizer, seeds: range) -> None:
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        sum((p.float() * torch.randn(p.shape, generator=g)).sum() for _, p in named).backward()
        assert optimizer.step()[1]


def cfg(name: str = "adamw8bit") -> OptimizerConfig:
    return OptimizerConfig(name=name, lr=0.01, weight_decay=0.1, max_grad_norm=1e9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_goes_adamw_s_way_in_a_quarter_of_the_memory(dtype):
    ours, theirs = params(dtype), params(dtype)
    start = {n: p.detach().clone() for n, p in ours}
    optimizer = Optimizer(ours, cfg(), None)
    steps(ours, optimizer, range(4))
    steps(theirs, Optimizer(theirs, cfg("adamw"), None), range(4))
    for (name, p), (_, q) in zip(ours, theirs, strict=True):
        moved = (q - start[name]).float().norm()
        assert (p - q).float().norm() < 0.1 * moved and moved > 0
    large = optimizer._torch[0].state[optimizer.masters["large"]]
    assert large["state1"].dtype == large["state2"].dtype == torch.uint8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restoring_goes_on_to_its_rounding(dtype):
    straight, first = params(dtype), params(dtype)
    steps(straight, Optimizer(straight, cfg(), None), range(4))
    optimizer = Optimizer(first, cfg(), None)
    steps(first, optimizer, range(2))
    saved, facts = gathered_state(optimizer), optimizer.facts
    assert {n.partition("/")[0] for n in saved} - {"master"} == {"step", "exp_avg", "exp_avg_sq"}
    second = [(n, nn.Parameter(p.detach().clone())) for n, p in first]
    again = Optimizer(second, cfg(), None)
    again.restore(saved, facts)
    kept = gathered_state(again)
    for name, tensor in saved.items():
        loose = 0 if tensor.numel() < 4096 else tensor.abs().max().item() / 128
        torch.testing.assert_close(kept[name], tensor, atol=loose, rtol=0, msg=name)
    steps(second, again, range(2, 4))
    for (name, p), (_, q) in zip(second, straight, strict=True):
        assert (p - q).float().norm() < 0.05 * (p - dict(params(dtype))[name]).float().norm(), name
    plain = [(n, nn.Parameter(p.detach().clone())) for n, p in first]
    adamw = Optimizer(plain, cfg("adamw"), None)
    adamw.restore(saved, facts)
    steps(plain, adamw, range(2, 4))
    for (name, p), (_, q) in zip(plain, straight, strict=True):
        assert (p - q).float().norm() < 0.1 * (p - dict(params(dtype))[name]).float().norm(), name


def trained(saved: Any = None) -> tuple[Any, ...]:
    """Two updates (more), and all that a checkpoint would keep."""
    mesh = device_mesh(Layout(dp=dist.get_world_size()), "cpu") if dist.is_initialized() else None
    config = LlamaConfig.from_dict(
        f_llama().config.to_dict() | {"intermediate_size": 512}
    )  # 8 bits on each of two ranks
    torch.manual_seed(0)
    e = FsdpEngine(policy(LlamaForCausalLM(config)), cfg(), mesh=mesh)
    if saved is not None:
        e.restore(*saved)
    cut = [[0, 1, 2, 3, 4, 5]] if mesh is None else [[[0, 4, 2]], [[1, 3, 5]]][dist.get_rank()]
    for _ in range(2):
        e.update(batch(), cut, loss_fn, BOTH, 0.8)
    moments = [state["state1"].dtype for state in e.optimizer._torch[0].state.values()]
    assert torch.uint8 in moments and torch.float32 in moments
    return {n: t.detach().clone() for n, t in e.shards()}, *saved_state(e)


def test_two_ranks_save_what_one_goes_on_with():
    alone, both = trained(), run(2, trained)[0]
    further = [trained(alone)[0], trained(both)[0], run(2, trained, alone)[0][0], run(2, trained, both)[0][0]]
    for other in further[1:]:
        for name, tensor in further[0].items():
            assert (other[name] - tensor).norm() < 0.1 * (tensor - alone[0][name]).norm(), name


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(adam8, "find_spec", lambda name: None if name == "bitsandbytes" else find_spec(name))
    with pytest.raises(RequestError, match=r"adamw8bit needs the package bitsandbytes.*pip install"):
        Optimizer(params(torch.float32), cfg(), None)
