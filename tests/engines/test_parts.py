"""A sharded model of which each rank reads its part alone: the same training, and less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engines.ranks import run
from tests.engines.test_fsdp import loss_fn
from tests.engines.test_spread import MODELS, MUON, PLAIN, Case, agree, mine, rows
from tests.tiny import f_bpe, f_llama, save
from verl.config.errors import RequestError
from verl.config.model import ModelConfig
from verl.engines.context_parallel import context_group
from verl.engines.fsdp import FsdpEngine
from verl.engines.sharding import device_mesh, read, shard
from verl.layout import Layout
from verl.models.factory import load_model
from verl.models.packing import Packed
from verl.models.policy import Policy
from verl.models.value import Value


def engine(case: Case, folder: str, in_parts: bool) -> FsdpEngine:
    layout = Layout.of(dist.get_world_size(), tp=case.tp, cp=case.cp)
    lm = load_model(ModelConfig(model_name_or_path=folder), "cpu", getattr(torch, case.dtype), in_parts)
    module = Value(lm) if case.kind == "value" else Policy(lm)
    assert (module.unread is not None) == in_parts
    mesh = device_mesh(layout, "cpu", case.replicas)
    return FsdpEngine(module, case.optimizer, None, case.recompute, mesh, case.sharding, context=context_group(layout))


def train(case: Case, folder: str, in_parts: bool) -> dict[str, Any]:
    e, data, cut = engine(case, folder, in_parts), rows(), mine(case)
    order = sorted(row for micro in cut for row in micro)
    data = data.select(order)
    cut = [[order.index(row) for row in micro] for micro in cut]
    outputs = e.forward(data, cut, case.want, 0.8)
    reports = [e.update(data, cut, loss_fn, case.want, 0.8) for _ in range(case.steps)]
    return {
        "outputs": {name: dict(zip(order, x.rows(), strict=True)) for name, x in outputs.items()},
        "reports": reports,
        "shards": {n: t.clone() for n, t in e.shards()},
    }


@pytest.mark.parametrize(
    ("n", "case"),
    [
        (2, Case()),
        (2, Case(model="tied", optimizer=MUON)),
        (2, Case(model="gpt2", optimizer=PLAIN)),
        (2, Case("SHARD_GRAD_OP", kind="value", optimizer=PLAIN)),
        (4, Case("HYBRID_SHARD", replicas=2, cp=2)),
        (4, Case(tp=2, model="qwen3", optimizer=PLAIN)),
    ],
)
def test_reading_by_parts_changes_no_number(n, case, tmp_path):
    folder = save(tmp_path, MODELS[case.model](), f_bpe())
    for whole, parts in zip(*(run(n, train, case, folder, in_parts) for in_parts in (False, True)), strict=True):
        agree(replace_outputs(whole, parts), [parts])


def replace_outputs(whole: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """``agree`` wants all rows: what this rank doesn't hold is taken as it is."""
    assert all(whole["outputs"][name].keys() == rows.keys() for name, rows in parts["outputs"].items())
    for name, found in parts["outputs"].items():
        for row in set(range(6)) - found.keys():
            found[row] = whole["outputs"][name][row] = torch.zeros(1)
    return whole


def wrong(folder: str) -> str:
    """What is said where packed attention is a little off."""
    right = Packed.attend
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RequestError) as error:
        patch.setattr(Packed, "attend", lambda *args: 1.1 * right(*args))
        engine(Case(), folder, True)
    return str(error.value)


def test_each_rank_proves_the_model_that_it_has_a_part_of(tmp_path):
    folder = save(tmp_path, f_llama(), f_bpe())
    said = run(2, wrong, folder)
    assert all(message.startswith("LlamaForCausalLM gives other logits on packed rows than by") for message in said)


def growth(folder: str, in_parts: bool) -> float:
    """By how many MiB this process' memory at most grew while it loaded and sharded the model."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def now(key: str) -> float:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(key)) / 1024

    reset.write_text("5")  # the highest so far is the present
    before = now("VmRSS")
    module = Policy(load_model(ModelConfig(model_name_or_path=folder), "cpu", torch.float32, in_parts))
    shard(module, device_mesh(Layout(dp=dist.get_world_size()), "cpu"), "FULL_SHARD", None)
    read(module, "cpu")
    assert next(module.parameters()).to_local().is_cpu
    return now("VmHWM") - before


def test_no_rank_holds_the_whole(tmp_path):
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    size = sum(p.numel() for p in model.parameters()) * 4 / 2**20
    folder = save(tmp_path, model, f_bpe())
    run(2, growth, save(tmp_path / "tiny", f_llama(), f_bpe()), True)  # imports
    for parts, whole in zip(*(run(2, growth, folder, in_parts) for in_parts in (True, False)), strict=True):
        assert size > 90 and parts < 0.7 * size < 0.9 * size < whole  # what was free is used first
