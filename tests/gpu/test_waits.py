"""On a GPU nothing waits for it between a micro-batch's forward and its backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.workers.test_ranks import CASES, Case, play
from verl.engines.fsdp import FsdpEngine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_nobody_waits(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each update also happens on a copy on the GPU, where whoever waits for it in a loss function raises."""
    update, seen = FsdpEngine.update, []

    def both(engine: FsdpEngine, batch: Any, micro_batches: Any, loss_fn: Any, *how: Any) -> Any:
        assert engine.optimizer is not None
        other = FsdpEngine(copy.deepcopy(engine.module).to("cuda"), engine.optimizer.cfg)

        def strict(outputs: Any, rows: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                found = loss_fn(outputs, rows)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            seen.append(found)
            return found

        update(other, batch, micro_batches, strict, *how)
        return update(engine, batch, micro_batches, loss_fn, *how)

    monkeypatch.setattr(FsdpEngine, "update", both)
    play(case, laps=1)
    assert seen
