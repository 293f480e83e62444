"""The optimizer's part in CPU memory, the parameters on a GPU; beside one process on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.engines.pieces import gathered_state, saved_state
from tests.engines.ranks import run
from tests.engines.test_fsdp import BOTH, batch, loss_fn, policy
from tests.engines.test_spread import DECAYING, MUON, PLAIN, Case, agree, engine, mine, rows, train
from tests.tiny import f_llama
from verl.engines.fsdp import FsdpEngine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", [DECAYING, PLAIN, MUON], ids=lambda cfg: cfg.name)
def test_one_gpu_steps_on_the_cpu(dtype, optimizer):
    engines = [
        FsdpEngine(policy(f_llama(), dtype).to("cuda"), optimizer, cpu_offload=offload) for offload in (False, True)
    ]
    for _ in range(3):
        inside, outside = (e.update(batch(), [[0, 2, 3], [1, 4, 5]], loss_fn, BOTH, 0.8) for e in engines)
        near = 1e-2 if optimizer is MUON else 1e-3
        assert outside.skipped is None and outside.grad_norm == pytest.approx(inside.grad_norm, rel=near)
    offloaded = engines[1].optimizer
    assert all(p.is_cuda for _, p in engines[1].module.trainable())
    assert all(not t.is_cuda for t in gathered_state(offloaded).values()) and all(
        not p.is_cuda for p in offloaded.masters.values()
    )
    loose = 1e-4 if dtype == torch.float32 and optimizer is not MUON else 0.06
    for (name, ours), (_, theirs) in zip(engines[1].shards(), engines[0].shards(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=loose, rtol=loose, msg=lambda m, n=name: f"{n}: {m}")


def goes_on(case: Case) -> list[bool]:
    """Saved and restored on ranks that offload: whether all shards are as without a break."""
    straight, first, second = engine(case), engine(case), engine(case)
    cut = mine(case)

    def step(e: FsdpEngine) -> None:
        e.update(rows(), cut, loss_fn, case.want, 0.8)

    step(straight), step(straight), step(first)
    second.restore({n: t.detach().clone() for n, t in first.shards()}, *saved_state(first))
    step(second)
    return [torch.equal(a, b) for (_, a), (_, b) in zip(straight.shards(), second.shards(), strict=True)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("sharding", ["FULL_SHARD", "NO_SHARD"])
def test_two_gpus_step_on_the_cpu(sharding):
    case = Case(sharding, cpu_offload=True, optimizer=DECAYING)
    both = "cpu:gloo,cuda:nccl"
    agree(train(replace(case, cpu_offload=False)), run(2, train, replace(case, micro_rows=2), backend=both), 1e-4)
    assert all(all(equal) for equal in run(2, goes_on, case, backend=both))
