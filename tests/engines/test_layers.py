"""Compiled layers: the numbers of plain ones, and graphs whose number depends neither on layers nor on lengths."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.engines.ranks import run
from tests.engines.test_fsdp import ALL, BOTH, LOGPROBS, SGD, batch, loss_fn, policy
from tests.engines.test_spread import Case, agree, train
from tests.tiny import f_gpt2, f_llama
from verl.config.errors import RequestError
from verl.engines.fsdp import FsdpEngine
from verl.models.value import Value

CUTS = ([[0, 2, 3], [1, 4, 5]], [[5], [0, 1], [2, 3, 4]], ALL)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()


def graphs() -> int:
    assert not counters["frames"].get("recompile_limit")
    return counters["stats"]["unique_graphs"]


def qwen2(layers: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config).eval()


@pytest.mark.parametrize(("recompute", "backend"), [(True, "aot_eager"), (False, "eager")])
def test_many_layers_and_lengths_share_their_graphs(recompute, backend):
    plain, compiled = (
        FsdpEngine(policy(qwen2(5)), SGD, gradient_checkpointing=recompute, compile_backend=which)
        for which in (None, backend)
    )
    counts = []
    for cut in CUTS:
        ours, theirs = (e.update(batch(), cut, loss_fn, BOTH, 0.8) for e in (compiled, plain))
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4) and ours.grad_norm > 0.1
        counts.append(graphs())
    assert 0 < counts[0] == counts[1] == counts[2] <= 8  # a cut has several lengths
    for (name, a), (_, b) in zip(compiled.shards(), plain.shards(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    for cut in CUTS if recompute else ():  # without gradients there are other graphs, and nothing is recomputed
        ours, theirs = (e.forward(batch(), cut, LOGPROBS, 0.8)["logprobs"].values for e in (compiled, plain))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert graphs() <= 2 * counts[-1]


@pytest.mark.parametrize("kind", ["lora", "value"])
def test_other_models_too(kind):
    shards = []
    for backend in (None, "eager"):
        torch.manual_seed(0)
        module = policy(f_gpt2() if kind == "value" else f_llama(), use_lora=kind == "lora", lora_r=3)
        module = Value(module.lm) if kind == "value" else module
        e = FsdpEngine(module, SGD, gradient_checkpointing=True, compile_backend=backend)
        for _ in range(2):
            e.update(batch(), CUTS[0], loss_fn, frozenset({"values"}) if kind == "value" else BOTH, 0.8)
        shards.append(dict(e.shards()))
    assert graphs() > 0
    for name, a in shards[1].items():
        torch.testing.assert_close(a, shards[0][name], atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", [Case(cp=2), Case(), Case(tp=2)], ids=["cp", "fsdp", "tp"])
def test_spread_over_ranks(case):
    ours = replace(case, micro_rows=2, steps=1, compile_backend="eager")
    agree(train(replace(case, steps=1)), run(2, train, ours, timeout=280))


def test_a_copied_model_computes_with_its_own_weights():
    e = FsdpEngine(policy(f_llama()), SGD, gradient_checkpointing=True)
    copied = FsdpEngine(copy.deepcopy(e.module), SGD)
    with torch.no_grad():
        for p in e.module.parameters():
            p.zero_()
    assert copied.forward(batch(), ALL, LOGPROBS, 1.0)["logprobs"].values.std() > 0.1


def test_models_without_layers_are_refused():
    module = policy(f_llama())
    del module.backbone.layers
    with pytest.raises(RequestError, match="torch_compile: LlamaModel has no list of layers"):
        FsdpEngine(module, SGD, compile_backend="aot_eager")


def test_four_bit_weights_are_refused():
    bnb = pytest.importorskip("bitsandbytes")
    module = policy(f_llama())
    module.backbone.layers[1].mlp.up_proj = bnb.nn.Linear4bit(32, 64, bias=False)
    with pytest.raises(RequestError, match="torch_compile: products with 4-bit weights"):
        FsdpEngine(module, SGD, compile_backend="aot_eager")
