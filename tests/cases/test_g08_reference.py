"""G08: where training goes on from an adapter, the reference is the policy with that adapter, and never moves."""

from __future__ import annotations

import math

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from tests.engines.pieces import saved_state
from tests.models.test_adapters import trained_adapter
from tests.models.zoo import rows
from tests.tiny import f_bpe, f_llama, save
from verl.algorithms.kl import kl_estimate
from verl.algorithms.preference import dpo
from verl.algorithms.reduce import row_sums
from verl.batch import Batch, Ragged
from verl.checkpoint.export import export, model_files
from verl.checkpoint.store import Checkpoint, CheckpointStore
from verl.checkpoint.tensorfile import read_tensors
from verl.config.model import ModelConfig, OptimizerConfig
from verl.engines.fsdp import FsdpEngine
from verl.models.factory import create_model, load_model
from verl.models.policy import Policy

LOGPROBS = frozenset({"logprobs"})
MICRO = [[0, 1], [2, 3]]


@pytest.fixture
def folder(tmp_path) -> str:
    """An adapter whose B isn't 0."""
    base = save(tmp_path / "base", f_llama(), f_bpe())
    trained_adapter(LlamaForCausalLM.from_pretrained(base)).save_pretrained(tmp_path / "sft")
    return str(tmp_path / "sft")


def source(folder: str, how: str):
    if how == "folder":
        return folder
    return PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(f"{folder}/../base"), folder)


def started(source, **options) -> tuple[Policy, FsdpEngine]:
    policy = Policy(load_model(ModelConfig(model_name_or_path=source, **options), "cpu", torch.float32))
    engine = FsdpEngine(policy, OptimizerConfig(lr=1e-2), gradient_checkpointing=True)
    policy.keep_reference()
    return policy, engine


def probe_batch() -> Batch:
    """Two pairs, each of one prompt."""
    prompts, responses, groups = rows(32)
    out = Batch(["0", "1", "2", "3"])
    out["prompt_ids"] = Ragged.from_rows([*prompts, prompts[2]])
    out["response_ids"] = Ragged.from_rows([*responses, responses[0]])
    total = int(out.ragged("response_ids").lengths.sum())
    out["response_mask"] = out.ragged("response_ids").with_values(torch.ones(total, dtype=torch.bool))
    out["group"] = torch.tensor([*groups, 1])
    return out


def of_reference(policy: Policy, engine: FsdpEngine, batch: Batch) -> torch.Tensor:
    with policy.as_reference():
        return engine.forward(batch, MICRO, LOGPROBS, 0.7)["logprobs"].values


def pair_loss(logprobs: torch.Tensor, ref: torch.Tensor, batch: Batch):
    column = batch.ragged("response_ids")
    sums, ref_sums = (row_sums(x, torch.ones_like(x, dtype=torch.bool), column.row_index, 4) for x in (logprobs, ref))
    return dpo(sums[0::2], sums[1::2], ref_sums[0::2], ref_sums[1::2], beta=0.5)


@pytest.mark.parametrize("how", ["folder", "loaded module"])
def test_the_reference_is_the_starting_policy_and_stays(how, folder):
    policy, engine = started(source(folder, how))
    batch = probe_batch()
    before = engine.forward(batch, MICRO, LOGPROBS, 0.7)["logprobs"].values
    ref = of_reference(policy, engine, batch)
    mask = batch.ragged("response_mask").values
    assert kl_estimate(before, ref, mask, "k3").abs().max() < 1e-6  # 0 KL at the start, so nothing pulls anywhere
    out = pair_loss(before, ref, batch)
    assert (out.losses - math.log(2)).abs().max() < 1e-6
    assert (out.chosen_rewards - out.rejected_rewards).abs().max() < 1e-6

    base = Policy(load_model(ModelConfig(model_name_or_path=f_llama()), "cpu", torch.float32))
    of_base = FsdpEngine(base, OptimizerConfig()).forward(batch, MICRO, LOGPROBS, 0.7)["logprobs"].values
    assert (of_base - ref).abs().max() > 0.1  # the base would have been another reference

    batch["ref"] = batch.ragged("response_ids").with_values(ref)

    def loss(outputs, micro):
        both = outputs["logprobs"], micro.ragged("ref").values
        kl = kl_estimate(*both, torch.ones_like(both[0], dtype=torch.bool), "k3")
        return (-outputs["logprobs"] + 0.1 * kl).sum() / 20, {}

    for _ in range(3):
        assert engine.update(batch, MICRO, loss, LOGPROBS, 0.7).skipped is None
        with policy.as_reference():
            pass
    assert torch.equal(of_reference(policy, engine, batch), ref)  # bit for bit
    after = engine.forward(batch, MICRO, LOGPROBS, 0.7)["logprobs"].values
    assert (after - before).abs().min() > 0 and (after - before).abs().max() > 1e-2


def nll(outputs, micro):
    return -outputs["logprobs"].sum() / 20, {}


def test_a_resumed_run_has_the_same_reference_and_the_trained_adapter(folder, tmp_path):
    batch = probe_batch()
    policy, engine = started(folder)
    ref = of_reference(policy, engine, batch)
    for _ in range(2):
        engine.update(batch, MICRO, nll, LOGPROBS, 1.0)
    tensors, facts = saved_state(engine)
    shards = {n: t.detach().clone() for n, t in engine.shards()}
    assert not any("reference" in n for n in [*shards, *tensors])
    here = engine.forward(batch, MICRO, LOGPROBS, 0.7)["logprobs"].values

    again, resumed = started(folder)
    resumed.restore(shards, tensors, facts)
    assert torch.equal(resumed.forward(batch, MICRO, LOGPROBS, 0.7)["logprobs"].values, here)
    assert torch.equal(of_reference(again, resumed, batch), ref)
    for e in (engine, resumed):
        e.update(batch, MICRO, nll, LOGPROBS, 1.0)
    assert all(torch.equal(t, dict(resumed.shards())[n]) for n, t in engine.shards())


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "as an adapter"])
def test_a_continued_adapter_is_exported_on_its_own_base(merge, folder, tmp_path, monkeypatch):
    batch = probe_batch()
    policy, engine = started(folder)
    engine.update(batch, MICRO, nll, LOGPROBS, 1.0)
    files = {"hf": model_files(policy.lm, f_bpe(), ModelConfig(model_name_or_path=folder))}
    saved = CheckpointStore(tmp_path / "checkpoints").save(1, {"actor": dict(engine.shards())}, files)
    assert Checkpoint.open(saved) and not any("reference" in n for n in read_tensors(saved / "actor.safetensors"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    out = export(saved, tmp_path / "out", merge=merge)
    ours = create_model(str(out))
    ids = torch.tensor([[1, 4, 5, 6, 7]])
    policy.lm.set_attn_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, policy.lm(ids).logits, atol=1e-4, rtol=1e-4)
    assert (out / "adapter_config.json").exists() != merge
