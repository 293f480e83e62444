"""The engine on two GPUs over NCCL beside one process on the CPU; see ``tests/engines/test_spread.py``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.engines.ranks import run
from tests.engines.test_spread import MUON, PLAIN, Case, agree, named, saved, train

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        (Case(), 1e-4),
        (Case("SHARD_GRAD_OP"), 1e-4),
        (Case("NO_SHARD"), 1e-4),
        (Case(tp=2), 1e-4),
        (Case(kind="lora"), 1e-4),
        (Case(kind="value", optimizer=PLAIN), 1e-4),
        (Case(kind="shared"), 1e-4),
        (Case(dtype="bfloat16", optimizer=PLAIN), 0.06),
        (Case("NO_SHARD", dtype="bfloat16", tp=2, optimizer=PLAIN), 0.06),
        (Case(optimizer=MUON), 0.06),  # its iteration is bf16 on a GPU
    ],
    ids=named,
)
def test_the_same_numbers(case, tolerance):
    agree(train(case), run(2, train, replace(case, micro_rows=2), backend="nccl"), tolerance)


def test_it_goes_on_bit_for_bit():
    case = Case(optimizer=PLAIN, steps=2)
    straight = run(2, saved, replace(case, steps=4), backend="nccl")[0]
    again = run(2, saved, case, run(2, saved, case, backend="nccl")[0], backend="nccl")[0]
    assert all(torch.equal(t, straight[0][name]) for name, t in again[0].items())
