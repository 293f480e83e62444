"""An update asks the device for numbers once, after its last backward: until then the host only queues work there."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workers.test_ranks import CASES, Case, play
from verl.config.model import OptimizerConfig
from verl.engines.base import counted
from verl.engines.fsdp import FsdpEngine
from verl.models import logprobs

ASKS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "equal")  # beside indexing by a mask
# of what lies on the host: KTO's baseline is told, and labels are judged there where the model is there, too
ON_THE_HOST = {"kto": ["_local_scalar_dense"], "prime": ["_local_scalar_dense"], "verifier": ["_local_scalar_dense"]}


class Asked(TorchDispatchMode):
    """``found``: operations whose result is on the host, or has a shape that the host must ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = (
            name.startswith("index")
            and isinstance(args[1], Sequence)
            and any(index is not None and index.dtype == torch.bool for index in args[1])
        )
        if by_mask or any(ask in name for ask in ASKS):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Told(Exception):
    pass


def test_a_number_that_is_asked_for_is_seen() -> None:
    x = torch.arange(3.0)
    with Asked() as asked:
        float(x[x > 1].sum() + x[[0, 1]].sum()), x.unique(), x.nonzero(), x.sum()
    assert asked.found == ["index", "_local_scalar_dense", "_unique2", "nonzero"]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_all_micro_batches_are_computed_before_anybody_asks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU by the operations that a loss function calls; and on the meta device, which has no numbers: whoever
    asks it for one, between the first forward and the last backward, raises."""
    update, sizes = FsdpEngine.update, []

    def both(engine: FsdpEngine, batch: Any, micro_batches: Any, loss_fn: Any, *how: Any) -> Any:
        sgd: Any = OptimizerConfig(name=lambda params, lr: torch.optim.SGD(params, lr))
        backwards: list[torch.Tensor] = []

        def on_meta(outputs: Any, micro: Any) -> Any:
            loss, stats = loss_fn(outputs, micro)
            assert not any(isinstance(value, torch.Tensor) and value.requires_grad for value in stats.values())
            loss.register_hook(backwards.append)
            return loss, stats

        def on_cpu(outputs: Any, micro: Any) -> Any:
            with Asked() as asked:
                found = loss_fn(outputs, micro)
            assert asked.found in ([], ON_THE_HOST.get(case.algorithm))
            return found

        def told(parts: Any) -> Any:
            assert len(backwards) == len(parts) == len(micro_batches)
            sizes.append(len(parts))
            raise Told

        with monkeypatch.context() as patched:
            patched.setattr("verl.engines.fsdp.counted", told)
            with pytest.raises(Told):
                update(FsdpEngine(copy.deepcopy(engine.module).to("meta"), sgd), batch, micro_batches, on_meta, *how)
        return update(engine, batch, micro_batches, on_cpu, *how)

    monkeypatch.setitem(logprobs.CHUNK_BYTES, "meta", 1 << 20)
    monkeypatch.setattr(FsdpEngine, "update", both)
    play(case, laps=1)
    assert max(sizes) > 1 or case.steps == 3


def test_statistics_are_counted_as_numbers_are() -> None:
    third = torch.tensor(1 / 3)
    parts = [
        {"a": third, "n": torch.tensor(2), "x_max": torch.tensor(-3.0), "own": 1},
        {"a": third.double(), "n": 3, "x_max": -4.0, "late_max": torch.tensor(True)},
    ]
    found = counted(parts)
    assert found == {"a": third.item() + third.double().item(), "n": 5, "x_max": -3, "own": 1, "late_max": 1}
    assert {type(value) for value in found.values()} == {float}
    assert counted([]) == {} and counted([{"a": 2}]) == {"a": 2}
