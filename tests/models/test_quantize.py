"""QLoRA: a 4-bit base under adapters trains, samples and is exported on its own unquantised weights."""

from __future__ import annotations

import asyncio
import copy
import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.test_scorer import SCORES, batch, bradley_terry
from tests.models.zoo import FAMILIES, built, rows
from tests.tiny import EOS, f_bpe, f_gpt2, f_llama, save
from verl.batch import Ragged
from verl.checkpoint.export import export, model_files
from verl.checkpoint.store import CheckpointStore
from verl.config.errors import RequestError
from verl.config.model import ModelConfig, OptimizerConfig
from verl.engines.fsdp import FsdpEngine
from verl.models import quantize
from verl.models.factory import load_model, load_scorer
from verl.models.packing import pack
from verl.models.policy import Policy
from verl.models.scorer import Scorer
from verl.rollout.base import Request, Sampling
from verl.rollout.native import NativeEngine

bnb = pytest.importorskip("bitsandbytes")
LOGPROBS = frozenset({"logprobs"})
MODELS = {"llama": f_llama, "tied llama": lambda: f_llama(tied=True), "gpt2": f_gpt2}
FOUR = {"load_in_4bit": True, "use_lora": True, "lora_r": 4}


def policy(source, dtype=torch.float32, **options) -> Policy:
    torch.manual_seed(0)
    return Policy(load_model(ModelConfig(model_name_or_path=source, **FOUR | options), "cpu", dtype))


def logprobs(policy: Policy) -> torch.Tensor:
    prompts, responses, groups = rows(32)
    packed = pack(Ragged.from_rows(prompts), Ragged.from_rows(responses), groups)
    return policy(packed, torch.cat(responses), LOGPROBS, 1.0)["logprobs"]


def dequantised(policy: Policy, plain):
    """``plain`` with the 4-bit weights written out."""
    from bitsandbytes.functional import dequantize_4bit

    plain = copy.deepcopy(plain)
    quantised = {
        n.replace(".base_layer", ""): p
        for n, p in policy.lm.get_base_model().named_parameters()
        if p.dtype == torch.uint8
    }
    assert quantised
    own = dict(plain.named_parameters())
    with torch.no_grad():
        for name, p in quantised.items():
            weight = dequantize_4bit(p.data, p.quant_state)
            transposed = type(plain.get_submodule(name.removesuffix(".weight"))).__name__ == "Conv1D"
            own[name].copy_(weight.t() if transposed else weight)
    return plain


@pytest.fixture(params=MODELS)
def folder(request, tmp_path):
    return save(tmp_path / "base", MODELS[request.param](), f_bpe()), MODELS[request.param]


def test_it_computes_as_its_weights_written_out(folder):
    where, make = folder
    ours = policy(where)
    kinds = {n: type(m).__name__ for n, m in ours.lm.get_base_model().named_modules() if not list(m.children())}
    assert "Linear" in kinds["lm_head"] and "4bit" not in kinds["lm_head"]
    assert all(p.dtype != torch.uint8 for n, p in ours.lm.named_parameters() if "embed" in n or "wte" in n)
    plain = Policy(load_model(ModelConfig(model_name_or_path=dequantised(ours, make())), "cpu", torch.float32))
    with torch.no_grad():
        torch.testing.assert_close(logprobs(ours), logprobs(plain), atol=1e-4, rtol=1e-4)
        there = Policy(load_model(ModelConfig(model_name_or_path=make()), "cpu", torch.float32))
        assert (logprobs(ours) - logprobs(there)).abs().max() > 1e-3  # 4 bits are not 32


def test_gradients_survive_passes_without_them(folder):
    ours = policy(folder[0])
    assert all(not m.support_avx512bf16_for_cpu for m in ours.lm.modules() if isinstance(m, bnb.nn.Linear4bit))
    ours.eval()
    with torch.no_grad():
        logprobs(ours)
    ours.train()
    logprobs(ours).sum().backward()
    trained = list(ours.trainable())
    assert trained and all("lora_" in n for n, _ in trained)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for n, p in trained if "lora_B" in n)


def test_repacking_is_forbidden_where_bitsandbytes_would_do_it(folder, monkeypatch):
    """As on a CPU with AVX512-BF16."""
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: True)
    ours = policy(folder[0])
    layers = [m for m in ours.lm.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert layers and not any(m.support_avx512bf16_for_cpu for m in layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sampler_s_log_probabilities_are_the_trainer_s(dtype, tmp_path):
    ours = policy(save(tmp_path, f_llama(), f_bpe()), dtype)
    for name, p in ours.trainable():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    engine = NativeEngine(ours, frozenset({EOS}), max_rows=4)

    async def sample():
        requests = [Request(f"r{i}", f"p{i // 2}", (3, 4, 5 + i // 2), i) for i in range(4)]
        return [r async for r in engine.generate(requests, Sampling(max_new_tokens=6, seed=1))]

    responses = sorted(asyncio.run(sample()), key=lambda r: r.row_id)
    prompts = Ragged.from_rows([torch.tensor((3, 4, 5 + i // 2)) for i in range(4)])
    ids = Ragged.from_rows([torch.tensor(r.ids) for r in responses])
    with torch.no_grad():
        trained = ours(pack(prompts, ids, [0, 0, 1, 1]), ids.values, LOGPROBS, 1.0)["logprobs"]
    sampled = torch.tensor([x for r in responses for x in r.logprobs])
    gap = (trained - sampled).abs().max().item()
    assert gap < (1e-4 if dtype == torch.float32 else 0.3)


def nll(outputs, micro):
    return -outputs["logprobs"].sum() / 20, {}


def test_a_step_changes_the_adapter_alone_and_checkpoints_hold_nothing_else(folder):
    ours = policy(folder[0])
    frozen = {n: p.detach().clone() for n, p in ours.lm.named_parameters() if not p.requires_grad}
    ours.keep_reference()
    before = logprobs(ours).detach()
    engine = FsdpEngine(ours, OptimizerConfig(lr=1e-2), gradient_checkpointing=True)
    assert engine.update(batch(), [[0, 1], [2, 3]], nll, LOGPROBS, 1.0).skipped is None
    assert all(torch.equal(p, frozen[n]) for n, p in ours.lm.named_parameters() if n in frozen)
    assert (logprobs(ours) - before).abs().max() > 1e-3
    with ours.as_reference(), torch.no_grad():
        assert torch.equal(logprobs(ours), before)
    shards = {n: t.detach().clone() for n, t in engine.shards()}
    assert shards and all("lora_" in n for n in shards)
    after = logprobs(ours).detach()
    fresh = policy(folder[0])
    fresh.load(shards)
    torch.testing.assert_close(logprobs(fresh), after, atol=0, rtol=0)


def test_export_merges_into_the_unquantised_base(folder, tmp_path):
    where, _ = folder
    ours = policy(where)
    with torch.no_grad():
        for name, p in ours.trainable():
            if "lora_B" in name:
                p.normal_(std=0.1)
    files = {"hf": model_files(ours.lm, f_bpe(), ModelConfig(model_name_or_path=where, **FOUR))}
    saved = CheckpointStore(tmp_path / "checkpoints").save(1, {"actor": dict(ours.shards())}, files)
    merged = AutoModelForCausalLM.from_pretrained(export(saved, tmp_path / "out"))
    assert not hasattr(merged.config, "quantization_config")
    full = Policy(load_model(ModelConfig(model_name_or_path=where, use_lora=True, lora_r=4), "cpu", torch.float32))
    full.load(dict(ours.shards()))
    ids = torch.tensor([[1, 4, 5, 6, 7]])
    full.lm.set_attn_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, full.lm(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_scorer_s_head_stays_whole_and_learns(tmp_path):
    source = save(tmp_path, f_llama(), f_bpe())
    ours = Scorer(load_scorer(ModelConfig(model_name_or_path=source, **FOUR), "cpu", torch.float32))
    assert ours.head.weight.dtype == torch.float32
    before = ours.head.weight.detach().clone()
    FsdpEngine(ours, OptimizerConfig(lr=1e-2)).update(batch(), [[0, 1, 2, 3]], bradley_terry, SCORES, 1.0)
    assert not torch.equal(ours.head.weight, before)


def test_experts_stay_in_full_size_and_that_is_said(tmp_path, caplog):
    built(FAMILIES["mixtral"]).save_pretrained(tmp_path)
    ours = policy(str(tmp_path))
    assert "0.0369 million weights of MixtralForCausalLM" in caplog.text
    logprobs(ours).sum().backward()
    assert all(p.grad is not None for _, p in ours.trainable())


def test_without_adapters_4_bits_are_frozen(tmp_path):
    source = save(tmp_path, f_llama(), f_bpe())
    assert not list(policy(source, use_lora=False).trainable())


def test_what_can_t_be_quantised_says_what_would_be_right(tmp_path, monkeypatch):
    with pytest.raises(RequestError, match="give its name or folder"):
        policy(f_llama())
    find = importlib.util.find_spec
    monkeypatch.setattr(quantize, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(RequestError, match=r"pip install 'bitsandbytes>=0\.50'"):
        policy(save(tmp_path, f_llama(), f_bpe()))
