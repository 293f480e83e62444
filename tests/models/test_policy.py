"""Policies of many families give the numbers of the plain Hugging Face model; those that can't, say so at load."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf

from tests.models.zoo import FAMILIES, HEAD, REFUSED, built, loaded, rows
from tests.tiny import f_gpt2, f_llama
from verl.batch import Ragged
from verl.config.errors import RequestError, RunError
from verl.models.packing import pack


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
        policy.keep_reference()
        with torch.no_grad():
            for name, p in policy.trainable():
                if "lora_B" in name:
                    p.normal_(std=0.3)
        assert (logprobs(policy) - base).abs().max() > 1e-2
        with policy.as_reference():
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

    def test_a_policy_without_adapters_has_no_reference_in_it(self):
        with pytest.raises(RuntimeError, match="no adapters"):
            loaded(f_llama()).keep_reference()

    def test_a_reference_that_was_not_kept_is_not_made_up(self):
        policy = loaded(f_llama(), use_lora=True)
        with pytest.raises(RuntimeError, match="before training"), policy.as_reference():
            pass
