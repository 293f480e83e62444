"""The native engine with the decode step of a GPU, on a CPU: what a graph would replay is called.

Some of it in Triton's interpreter, which is slow; the rest with what ``plain.py`` has in place of each kernel.
"""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.rollout import test_native
from tests.rollout.interpreter import DEVICE, needs_triton
from tests.rollout.plain import stand_in
from tests.rollout_contract import PROMPTS, ask, requests
from tests.tiny import EOS, f_gpt2, f_llama
from verl.config.errors import RunError
from verl.models.adjacent import put_together
from verl.models.packing import ATTENTION
from verl.models.policy import Policy
from verl.rollout import graph
from verl.rollout.base import Response, Sampling
from verl.rollout.cache import GIB
from verl.rollout.graph import Decode, fits, size_for
from verl.rollout.native import NativeEngine

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu/test_generation.py has these on a GPU"),
]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


class Fused(NativeEngine):
    fused = True


def engine_of(lm, eos=frozenset({EOS}), max_rows=64, tokenizer=None, fused=True, gib=None) -> NativeEngine:
    lm.set_attn_implementation(ATTENTION)
    return (Fused if fused else NativeEngine)(Policy(lm), eos, max_rows, tokenizer, cache_gib=gib)


@pytest.mark.usefixtures("plain")
class TestContract(test_native.TestContract):
    def make(self, lm, eos=frozenset({EOS}), max_rows=64, tokenizer=None) -> NativeEngine:
        return engine_of(lm, eos, max_rows, tokenizer)


SMALL = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
MODELS = {
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=True, attention_bias=True),
    "yarn": LlamaConfig(**SMALL, rope_parameters=YARN),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
}


def model_of(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Every parameter, biases and norms too, is random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
        for p in lm.parameters():
            p.data += torch.randn_like(p) * 0.2
    return lm


def same(got: dict[str, Response], expected: dict[str, Response], loose: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for i, row in expected.items():
        assert got[i].ids == row.ids and got[i].finish_reason == row.finish_reason
        torch.testing.assert_close(torch.tensor(got[i].logprobs), torch.tensor(row.logprobs), atol=loose, rtol=0)


@pytest.mark.parametrize(
    ("kind", "interpreted"),
    [
        *((kind, False) for kind in [*MODELS, "lora"]),
        *(pytest.param(kind, True, marks=needs_triton) for kind in ("qwen2", "qwen3")),
    ],
)
def test_tokens_are_those_of_the_other_path(kind: str, interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not interpreted:
        stand_in(monkeypatch)
    monkeypatch.setattr(graph, "AGAIN", 0 if kind == "qwen2" else graph.AGAIN)  # with and without a kernel of prompts
    asked = requests(PROMPTS[:2], 2) if interpreted else requests()
    lm = model_of(MODELS[kind if kind != "lora" else "qwen2"])
    if kind == "lora":
        lm = get_peft_model(lm, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        lm.base_model.model.set_attn_implementation(ATTENTION)
    answers = []
    for fused in (True, False):
        own = copy.deepcopy(lm)
        if fused:  # as models on a GPU are, before they have adapters
            put_together(own)
        engine = engine_of(own, max_rows=3, fused=fused) if kind != "lora" else None
        if engine is None:
            engine = (Fused if fused else NativeEngine)(Policy(own), frozenset({EOS}), 3)
        assert (engine._decode_step() is not None) == fused
        n = 3 if interpreted else 8
        answers.append(ask(engine, asked, Sampling(max_new_tokens=n, seed=1, temperature=0.9)))
    same(*answers)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("cache_tokens", [None, 8 + 3 * 4, 8 + 5])
def test_one_prefill_per_prompt_and_ended_rows_leave(cache_tokens: int | None) -> None:
    """Also when a group is wider than what fits side by side; rows of many lengths, more than fit at once."""
    lm, eos = f_llama(), frozenset()
    lengths = {r: 2 + i % 4 for i, r in enumerate(requests(samples=4))}
    gib = None if cache_tokens is None else cache_tokens * 2 * 2 * 2 * 16 * 4 / GIB
    engine = engine_of(copy.deepcopy(lm), eos, 3, gib=gib)
    got = test_native.ask_lengths(engine, lengths)
    same(got, test_native.ask_lengths(engine_of(copy.deepcopy(lm), eos, 3, fused=False), lengths))
    assert engine.counters.prefills == len(PROMPTS)
    assert engine.counters.decode_rows == sum(n - 1 for n in lengths.values())
    assert engine._step is not None and engine._step.bytes_per_token == 2 * 2 * 2 * 16 * 4


def test_what_does_not_fit_takes_the_other_path() -> None:
    def policy(config: PreTrainedConfig) -> Policy:
        lm = model_of(config)
        lm.set_attn_implementation(ATTENTION)
        return Policy(lm)

    assert fits(policy(MODELS["qwen3"]))
    assert not fits(policy(MistralConfig(**SMALL, sliding_window=4)))
    assert not fits(policy(Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=1)))
    assert not fits(policy(LlamaConfig(**SMALL, hidden_act="gelu")))
    assert not fits(policy(LlamaConfig(**{**SMALL, "head_dim": 8})))
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert not fits(policy(LlamaConfig(**SMALL, rope_parameters=dynamic)))
    gpt2 = f_gpt2()
    gpt2.set_attn_implementation(ATTENTION)
    assert not fits(Policy(gpt2))
    hooked = policy(MODELS["llama"])
    hooked.backbone.layers[1].register_forward_pre_hook(lambda *_: None)  # type: ignore[union-attr, index]
    assert not fits(hooked)
    assert not fits(policy(MODELS["llama"]).double())


def test_prompts_are_read_together_where_it_saves_much() -> None:
    lm = f_llama()
    lm.set_attn_implementation(ATTENTION)
    step = Decode(Policy(lm), 512)

    def rows(groups: int, each: int, prompt: int) -> list[tuple[int, ...]]:
        return [(5, i, i // each, prompt, 0, 0, 9) for i in range(groups * each)]

    assert graph.AGAIN == 65536
    for groups, each, prompt, together in ((64, 8, 147, True), (64, 8, 146, False), (512, 1, 9000, False)):
        step.arrange(rows(groups, each, prompt))
        assert step.together == together


def test_sizes() -> None:
    assert [size_for(n) for n in (1, 3, 17, 65, 129, 512, 513)] == [1, 4, 24, 96, 192, 512, 640]
    assert all(size_for(n) == size_for(size_for(n)) >= n for n in range(1, 1500))


@pytest.mark.usefixtures("plain")
def test_what_asks_for_another_capture() -> None:
    """Other storage or another state of the adapters; not other values."""
    lm = get_peft_model(model_of(MODELS["llama"]), LoraConfig(r=4, target_modules=["q_proj"]))
    lm.base_model.model.set_attn_implementation(ATTENTION)
    engine = Fused(Policy(lm), frozenset(), 4)
    ask(engine, requests(samples=1)[:2], Sampling(max_new_tokens=2))
    step = engine._step
    assert isinstance(step, Decode) and len(step.graphs) == 1

    def again() -> int:
        step.graphs["kept"] = None  # type: ignore[index]
        ask(engine, requests(samples=1)[:2], Sampling(max_new_tokens=2))
        return "kept" in step.graphs

    assert again()
    with torch.no_grad():
        engine.policy.head_weight.mul_(2)
    assert again()
    with lm.disable_adapter():
        assert not again()
    assert not again()
    q = engine.policy.backbone.layers[0].self_attn.q_proj.base_layer  # type: ignore[union-attr, index]
    q.weight.data = q.weight.data.clone()
    assert not again()
    engine.sleep()
    assert again()


@pytest.mark.usefixtures("plain")
def test_a_failure_names_the_row_and_the_next_call_works() -> None:
    engine = engine_of(f_llama(), frozenset())
    good = engine.policy.head_weight.detach().clone()
    with torch.no_grad():
        engine.policy.head_weight[5] = float("nan")
    with pytest.raises(RunError, match=r"row p0/0.*not finite at response token 0"):
        ask(engine, requests(samples=1), Sampling(max_new_tokens=4))
    with torch.no_grad():
        engine.policy.head_weight.copy_(good)
    assert len(ask(engine, requests(samples=1), Sampling(max_new_tokens=4))) == len(PROMPTS)
