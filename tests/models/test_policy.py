"""Policies of many families give the numbers of the plain Hugging Face model; those that can't, say so at load."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf
from torch import nn

from tests.tiny import f_gpt2, f_llama
from verl.batch import Ragged
from verl.config.errors import RequestError, RunError
from verl.config.model import ModelConfig
from verl.models.factory import load_model
from verl.models.packing import pack
from verl.models.policy import Policy

PLAIN = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEAD = {**PLAIN, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CAPS = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0}
GRANITE = {
    "logits_scaling": 3.0, "attention_multiplier": 0.2, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
}  # fmt: skip
GPT2 = {
    "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**HEAD)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**PLAIN)),
    "qwen2 window": lambda: tf.Qwen2ForCausalLM(
        tf.Qwen2Config(**PLAIN, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    ),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**HEAD)),
    "qwen3 moe": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**HEAD, **EXPERTS)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**HEAD, sliding_window=4)),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**HEAD, num_local_experts=4)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**HEAD, sliding_window=4, query_pre_attn_scalar=20, **CAPS)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**{**HEAD, "num_hidden_layers": 6}, sliding_window=4, query_pre_attn_scalar=20)
    ),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
    "granite": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**PLAIN, **GRANITE)),
    "cohere": lambda: tf.CohereForCausalLM(tf.CohereConfig(**PLAIN, logit_scale=0.3)),
    "cohere2": lambda: tf.Cohere2ForCausalLM(
        tf.Cohere2Config(**{**HEAD, "num_hidden_layers": 4}, logit_scale=0.3, sliding_window=4)
    ),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**PLAIN)),
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**PLAIN)),
}
REFUSED = {
    "alibi": lambda: tf.BloomForCausalLM(tf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)),
    "recurrent": lambda: tf.MambaForCausalLM(
        tf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    ),
    "chunked": lambda: tf.Llama4ForCausalLM(
        tf.Llama4TextConfig(**HEAD, num_local_experts=2, attention_chunk_size=4, intermediate_size_mlp=48)
    ),
    "sinks": lambda: tf.GptOssForCausalLM(
        tf.GptOssConfig(**HEAD, num_local_experts=4, num_experts_per_tok=2, sliding_window=4)
    ),
    "length-dependent rope": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**HEAD, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    ),
}


def built(make):
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    return model


def loaded(model: nn.Module, **options) -> Policy:
    return Policy(load_model(ModelConfig(model_name_or_path=model, **options), "cpu", torch.float32))


def rows(vocab=64):
    """Three rows, the first two of one prompt; long enough to leave a window of 4."""
    g = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, vocab, (n,), generator=g) for n in (7, 3)]
    responses = [torch.randint(3, vocab, (n,), generator=g) for n in (6, 1, 9)]
    return [prompts[0], prompts[0], prompts[1]], responses, [0, 0, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_entropy_equal_the_plain_model(family):
    plain = built(FAMILIES[family])
    policy = loaded(copy.deepcopy(plain))
    plain.set_attn_implementation("eager")
    prompts, responses, groups = rows()
    packed = pack(Ragged.from_rows(prompts), Ragged.from_rows(responses), groups)
    with torch.no_grad():
        out = policy(packed, torch.cat(responses), frozenset({"logprobs", "entropy"}), 0.7)
        at = 0
        for p, r in zip(prompts, responses, strict=True):
            logits = plain(torch.cat([p, r])[None], use_cache=False).logits[0, len(p) - 1 : -1]
            log_p = (logits / 0.7).log_softmax(-1)
            part = slice(at, at + len(r))
            torch.testing.assert_close(out["logprobs"][part], log_p.gather(1, r[:, None])[:, 0], atol=1e-4, rtol=0)
            torch.testing.assert_close(out["entropy"][part], -(log_p.exp() * log_p).sum(-1), atol=1e-4, rtol=0)
            at += len(r)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_packed_rows_dont_suit_is_refused_by_name(family):
    model = built(REFUSED[family])
    with pytest.raises(RequestError, match=type(model).__name__):
        loaded(model)


def test_a_model_that_computes_something_else_beside_its_attention_is_refused():
    class Odd(tf.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 1.1  # a scale that no configuration tells
            return out

    with pytest.raises(RequestError, match="other logits on packed rows"):
        loaded(built(lambda: Odd(tf.LlamaConfig(**HEAD))))


def test_no_dropout_even_in_training_mode():
    policy = loaded(f_gpt2())
    prompts, responses, groups = rows(32)
    packed = pack(Ragged.from_rows(prompts), Ragged.from_rows(responses), groups)
    want = frozenset({"logprobs"})
    policy.train()
    a, b = (policy(packed, torch.cat(responses), want, 1.0)["logprobs"] for _ in range(2))
    assert torch.equal(a, b)


def test_tied_embeddings_get_the_gradient_of_both_uses():
    plain = f_llama(tied=True)
    policy = loaded(copy.deepcopy(plain))
    prompts, responses, _ = rows(32)
    packed = pack(Ragged.from_rows(prompts[2:]), Ragged.from_rows(responses[2:]))
    policy(packed, responses[2], frozenset({"logprobs"}), 1.0)["logprobs"].sum().backward()
    logits = plain(torch.cat([prompts[2], responses[2]])[None]).logits[0, len(prompts[2]) - 1 : -1]
    logits.log_softmax(-1).gather(1, responses[2][:, None]).sum().backward()
    assert [n for n, _ in policy.trainable()].count("model.embed_tokens.weight") == 1
    torch.testing.assert_close(
        policy.lm.model.embed_tokens.weight.grad, plain.model.embed_tokens.weight.grad, atol=1e-5, rtol=1e-4
    )


def test_unknown_outputs_are_refused():
    policy = loaded(f_llama())
    prompts, responses, groups = rows(32)
    packed = pack(Ragged.from_rows(prompts), Ragged.from_rows(responses), groups)
    with pytest.raises(ValueError, match="values"):
        policy(packed, torch.cat(responses), frozenset({"values"}), 1.0)


@pytest.mark.parametrize("make", [lambda: f_llama(tied=True), f_gpt2, FAMILIES["mixtral"], FAMILIES["qwen3 moe"]])
def test_shards_have_the_names_of_save_pretrained_and_load_back(make, tmp_path):
    from safetensors.torch import load_file

    policy = loaded(built(make))
    policy.lm.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    shards = {n: t.detach().clone() for n, t in policy.shards()}
    assert shards.keys() == saved.keys()
    assert all(torch.equal(shards[n], saved[n]) for n in saved)
    before = {n: p.detach().clone() for n, p in policy.trainable()}
    with torch.no_grad():
        for _, p in policy.trainable():
            p.zero_()
    policy.load(shards)
    assert all(torch.equal(p, before[n]) for n, p in policy.trainable())
    name = sorted(shards)[0]
    with pytest.raises(RunError, match=name):
        policy.load({n: t for n, t in shards.items() if n != name})


class TestLora:
    def test_starts_at_the_base_trains_and_steps_aside(self):
        plain = f_llama()
        policy = loaded(copy.deepcopy(plain), use_lora=True, lora_r=4)
        names = [n for n, _ in policy.trainable()]
        assert names and all("lora_" in n for n in names)
        assert not any("lm_head" in n for n in names)
        prompts, responses, groups = rows(32)
        packed = pack(Ragged.from_rows(prompts), Ragged.from_rows(responses), groups)

        def logprobs(p):
            with torch.no_grad():
                return p(packed, torch.cat(responses), frozenset({"logprobs"}), 1.0)["logprobs"]

        base = logprobs(loaded(plain))
        assert torch.equal(logprobs(policy), base)
        with torch.no_grad():
            for name, p in policy.trainable():
                if "lora_B" in name:
                    p.normal_(std=0.3)
        assert (logprobs(policy) - base).abs().max() > 1e-2
        with policy.adapters_off():
            assert torch.equal(logprobs(policy), base)
        assert all(p.requires_grad for n, p in policy.lm.named_parameters() if "lora_" in n)
        shards = {n: t.clone() for n, t in policy.shards()}
        assert all("lora_" in n and ".default" not in n for n in shards)
        after = logprobs(policy)
        with torch.no_grad():
            for _, p in policy.trainable():
                p.zero_()
        policy.load(shards)
        assert torch.equal(logprobs(policy), after)

    def test_gpt2_s_transposed_layers_take_adapters(self):
        assert list(loaded(f_gpt2(), use_lora=True).trainable())

    @pytest.mark.parametrize(
        ("targets", "message"), [(["nonsense"], "nonsense"), (["q_proj", "lm_head"], "output head")]
    )
    def test_wrong_targets_are_refused(self, targets, message):
        with pytest.raises(RequestError, match=message):
            loaded(f_llama(), use_lora=True, lora_target_modules=targets)

    def test_a_second_adapter_is_refused(self):
        policy = loaded(f_llama(), use_lora=True)
        with pytest.raises(RequestError, match="already has one"):
            loaded(policy.lm, use_lora=True)

    def test_a_policy_without_adapters_has_none_to_turn_off(self):
        with pytest.raises(RuntimeError, match="no adapters"):
            loaded(f_llama()).adapters_off()
