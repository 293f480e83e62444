"""G03, G04 and G08 with a model sharded over two ranks: temperature, neighbours, the reference of an adapter."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

from tests.engines.ranks import run
from tests.engines.test_fsdp import loss_fn
from tests.models.test_adapters import trained_adapter
from tests.tiny import f_bpe, f_gpt2, f_llama, save
from verl.batch import Batch, Ragged
from verl.config.model import ModelConfig, OptimizerConfig
from verl.engines.fsdp import FsdpEngine
from verl.engines.sharding import device_mesh
from verl.layout import Layout
from verl.models.factory import load_model
from verl.models.policy import Policy

ROW, LONG = [5, 6, 7, 8, 9], list(range(6, 22))
LOGPROBS = frozenset({"logprobs"})
TEMPERATURES = (0.5, 1.0, 2.0)


def engine(source: Any) -> FsdpEngine:
    """Sharded where there are ranks."""
    policy = Policy(load_model(ModelConfig(model_name_or_path=source), "cpu", torch.float32))
    if policy.has_adapters:
        policy.keep_reference()
    mesh = device_mesh(Layout(dp=2), "cpu") if dist.is_initialized() else None
    return FsdpEngine(policy, OptimizerConfig(lr=1e-2), mesh=mesh)


def batch(rows: list[list[int]]) -> Batch:
    """Two prompt tokens each, the rest is response."""
    made = Batch([str(i) for i in range(len(rows))])
    made["prompt_ids"] = Ragged.from_rows([row[:2] for row in rows])
    made["response_ids"] = Ragged.from_rows([row[2:] for row in rows])
    made["group"] = torch.arange(len(rows))
    mask = torch.ones(sum(len(row) - 2 for row in rows), dtype=torch.bool)
    made["response_mask"] = made.ragged("response_ids").with_values(mask)
    made["weight"] = made.ragged("response_ids").with_values(torch.linspace(-1, 1, len(mask)))
    return made


def scored(make: Any) -> list[torch.Tensor]:
    """``ROW``'s log-probabilities at each temperature; its neighbours differ from rank to rank."""
    made = engine(make())
    first = dist.is_initialized() and dist.get_rank() == 1
    rows = [LONG, ROW] if first else [ROW, LONG[:9]]
    at = rows.index(ROW)
    return [
        list(made.forward(batch(rows), [[0, 1]], LOGPROBS, temperature)["logprobs"].rows())[at].clone()
        for temperature in TEMPERATURES
    ]


@pytest.mark.parametrize("make", [f_gpt2, f_llama])
def test_g03_g04_temperature_and_neighbours(make: Any):
    logits = make()(torch.tensor([ROW])).logits[0, 1:-1].float()
    for told in run(2, scored, make):
        for temperature, logprobs in zip(TEMPERATURES, told, strict=True):
            truth = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ROW[2:])[:, None])[:, 0]
            torch.testing.assert_close(logprobs, truth.detach(), atol=1e-5, rtol=0)


def reference(folder: str) -> dict[str, torch.Tensor]:
    """Log-probabilities of policy and reference before and after a step that moves the policy."""
    made, rows = engine(folder), batch([ROW, LONG])
    policy: Any = made.module
    told = {}
    for when in ("before", "after"):
        told[f"policy {when}"] = made.forward(rows, [[0, 1]], LOGPROBS, 1.0)["logprobs"].values.clone()
        with policy.as_reference():
            told[f"reference {when}"] = made.forward(rows, [[0, 1]], LOGPROBS, 1.0)["logprobs"].values.clone()
        made.update(rows, [[0], [1]], loss_fn, LOGPROBS, 1.0)
    return told


def test_g08_the_reference_of_an_adapter_stays(tmp_path: Path):
    base = save(tmp_path / "base", f_llama(), f_bpe())
    trained_adapter(LlamaForCausalLM.from_pretrained(base)).save_pretrained(tmp_path / "sft")
    alone = copy.deepcopy(reference(str(tmp_path / "sft")))
    for told in run(2, reference, str(tmp_path / "sft")):
        torch.testing.assert_close(told["reference before"], told["policy before"], atol=1e-5, rtol=0)
        torch.testing.assert_close(told["reference after"], told["reference before"], atol=1e-6, rtol=0)
        torch.testing.assert_close(told["reference before"], alone["reference before"], atol=1e-5, rtol=0)
        assert (told["policy after"] - told["policy before"]).abs().max() > 1e-2
