"""Masters and optimizer state cut over ranks: the numbers of an optimizer that has them whole, in less memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engines.ranks import run
from tests.engines.test_fsdp import BOTH, loss_fn
from tests.engines.test_megatron import Case, engine, mine
from tests.engines.test_spread import Watched, rows
from verl.config.model import OptimizerConfig
from verl.engines.distributed_optimizer import DistributedOptimizer
from verl.engines.optim import Optimizer

# as they lie: of "split" two ranks have 4352 and 5648 values, three have 768, 7424 and 1808
SHAPES = {"first": (60, 100), "bias": (300,), "split": (1, 10000), "last": (50, 90), "small": (3, 5)}
GRADIENTS = 3  # of as many ranks or micro-batches, however these are spread


def params(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return {n: nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for n, shape in SHAPES.items()}


def backward(named: dict[str, nn.Parameter], step: int, i: int) -> None:
    """Gradients whose sums are exact in any order."""
    g = torch.Generator().manual_seed(GRADIENTS * step + i)
    sum((p * torch.randint(-8, 9, p.shape, generator=g).to(p.dtype) / 16).sum() for p in named.values()).backward()


def config(name: str) -> OptimizerConfig:
    return OptimizerConfig(name=name, lr=0.01, weight_decay=0.1, max_grad_norm=1e9)


Trained = tuple[dict[str, Tensor], dict[str, Tensor], list[int]]


def trained(name: str, dtype: torch.dtype, offload: bool = False, apart: tuple[str, ...] = ()) -> Trained:
    """Weights and whole state after three steps, and how many values of the parameters the optimizer holds."""
    named = params(dtype)
    places = range(GRADIENTS)
    if not dist.is_initialized():
        optimizer: Any = Optimizer(named.items(), config(name), None, offload=offload)
    else:
        optimizer = DistributedOptimizer(named.items(), config(name), None, dist.group.WORLD, apart, offload)
        places = places[dist.get_rank() :: dist.get_world_size()]
    storage = [p.data_ptr() for p in named.values()]
    for step in range(3):
        for i in places:
            backward(named, step, i)
            assert all(p.grad is None for p in named.values()) or not dist.is_initialized()
        if dist.is_initialized():
            optimizer.reduce()
            assert all(bucket.grads is None for bucket in optimizer.buckets), "whole gradients are gone"
        assert optimizer.step(1.0) == (1.0, True)
    assert storage == [p.data_ptr() for p in named.values()], "written in place"
    state = {}
    for key, tensor, _ in optimizer.held():
        parameter = key.partition("/")[2]
        whole = tensor.ndim > 0 and dist.is_initialized()
        state[key] = optimizer.whole(parameter, tensor) if whole else tensor
    held = [sum(t.numel() for t in tensors) for tensors in (optimizer.masters.values(), _moments(optimizer))]
    return {n: p.detach() for n, p in named.items()}, state, held


def _moments(optimizer: Optimizer) -> Iterator[Tensor]:
    states = [state for one in optimizer._torch for state in one.state.values()]
    return (t for state in states for t in state.values() if isinstance(t, Tensor) and t.ndim > 0)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("name", "dtype", "offload"),
    [
        ("adamw", torch.float32, False),
        ("adamw", torch.bfloat16, False),
        ("adamw", torch.float32, True),
        ("adamw", torch.bfloat16, True),
        ("sgd", torch.bfloat16, False),
    ],
)
def test_each_rank_steps_its_part_and_gets_all(n, name, dtype, offload):
    """Matrices decay and biases don't, in parts as well."""
    weights, state, held = trained(name, dtype, offload)
    apart = ("first",) if offload else ()
    ranks = run(n, trained, name, dtype, offload, apart)
    for ours in ranks:
        assert all(torch.equal(ours[0][key], p) for key, p in weights.items())
        assert ours[1].keys() == state.keys()
        assert all(torch.equal(ours[1][key], t) for key, t in state.items())
        for part, all_ in zip(ours[2], held, strict=True):
            assert part <= 1.1 * all_ / n
    assert [sum(parts) for parts in zip(*(ours[2] for ours in ranks), strict=True)] == held


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_in_8_bits_have_the_same_blocks(n, dtype):
    """But for parts of less than 4096 values, whose moments aren't rounded."""
    weights, state, _ = trained("adamw8bit", dtype)
    start, short = params(dtype), {"split"} if n == 3 else set()
    for ours in run(n, trained, "adamw8bit", dtype):
        for key, tensor in state.items():
            if key.partition("/")[2] in short:
                loose = 0 if key.startswith("step/") else tensor.abs().max().item() / 64
                torch.testing.assert_close(ours[1][key], tensor, atol=loose, rtol=0)
            else:
                assert torch.equal(ours[1][key], tensor), key
        for name, p in weights.items():
            gap = (ours[0][name] - p).float().norm()
            assert gap <= (0.05 if name in short else 0) * (p - start[name]).float().norm(), name


class Sizes(Watched):
    """Bytes of the largest tensor, too."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            sizes = [x.nbytes for x in args if isinstance(x, Tensor)]
            name = func.overloadpacket.__name__
            self.bytes[name] = max([*sizes, self.bytes.get(name, 0)])
        return super().__torch_dispatch__(func, types, args, kwargs)


def collectives(case: Case) -> tuple[int, Any, Any, int]:
    """Passes, collectives and their bytes in one update; values of the parameters."""
    e, cut = engine(case), mine(case)
    with Sizes() as watched:
        e.update(rows(), cut, loss_fn, BOTH, 0.8)
    return len(cut), watched.counts, watched.bytes, sum(p.numel() for p in e.parameters.values())


def test_a_step_is_one_reduce_scatter_in_fp32_and_one_all_gather_in_bf16():
    case = Case(dtype="bfloat16", recompute=False)
    (passes, one, sizes, values), (more, many, *_) = (
        run(2, collectives, replace(case, micro_rows=rows))[0] for rows in (6, 1)
    )
    assert passes == 1 and more == 3 and one == many
    assert one["_reduce_scatter_base_"] == one["_allgather_base_"] == 1 and not one["allreduce_"]
    assert 4 * values <= sizes["_reduce_scatter_base_"] == 2 * sizes["_allgather_base_"] < 1.1 * 4 * values


def copies(case: Case) -> Tensor | None:
    """A stage's copy of tied embeddings, after some updates."""
    e, cut = engine(case), mine(case)
    for _ in range(case.steps):
        assert e.update(rows(), cut, loss_fn, BOTH, 0.8).skipped is None
    assert e._tied is not None
    return e.parameters[e._tied].detach().clone()


def test_both_copies_of_tied_embeddings_stay_alike():
    """Bit for bit, though they lie beside other parameters. With three ranks the order of a sum matters."""
    found = run(6, copies, Case(pp=2, model="tied", steps=4, micro_rows=1))
    assert all(torch.equal(copy, found[0]) for copy in found)
