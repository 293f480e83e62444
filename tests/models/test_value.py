"""Value models: one value before each response token."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.models.zoo import loaded, rows
from tests.tiny import f_gpt2, f_llama
from verl.batch import Ragged
from verl.models.packing import pack
from verl.models.value import SharedValue, Value

VALUES = frozenset({"values"})


def packed_rows():
    prompts, responses, groups = rows(32)
    return prompts, responses, pack(Ragged.from_rows(prompts), Ragged.from_rows(responses), groups)


@pytest.mark.parametrize("make", [f_llama, f_gpt2])
def test_values_come_from_the_state_before_each_token(make):
    plain = make()
    value = Value(loaded(copy.deepcopy(plain)).lm)
    prompts, responses, packed = packed_rows()
    ours = value(packed, None, VALUES, 1.0)["values"].detach()
    at = 0
    for p, r in zip(prompts, responses, strict=True):
        hidden = plain.get_decoder()(torch.cat([p, r])[None]).last_hidden_state[0, len(p) - 1 : -1]
        theirs = hidden @ value.value_head.weight[0] + value.value_head.bias
        torch.testing.assert_close(ours[at : at + len(r)], theirs, atol=1e-5, rtol=1e-4)
        at += len(r)


def test_the_head_starts_small_and_equal_everywhere():
    a, b = Value(f_llama()), Value(f_llama())
    assert torch.equal(a.value_head.weight, b.value_head.weight)
    assert a.value_head.weight.abs().max() < 0.2 and a.value_head.bias.item() == 0
    assert a.value_head.weight.abs().min() > 0


def test_the_language_head_is_gone_and_shards_load_back():
    value = Value(f_llama())
    shards = {n: t.detach().clone() for n, t in value.shards()}
    assert "lm_head.weight" not in shards and "model.embed_tokens.weight" in shards
    assert {"value_head.weight", "value_head.bias"} <= shards.keys()
    with torch.no_grad():
        for _, p in value.trainable():
            p.zero_()
    value.load(shards)
    assert all(torch.equal(t, shards[n]) for n, t in value.shards())


def test_the_head_computes_in_float32_on_a_bf16_backbone():
    value = Value(loaded(f_llama()).lm.to(torch.bfloat16))
    _, _, packed = packed_rows()
    assert value(packed, None, VALUES, 1.0)["values"].dtype == torch.float32


def test_a_shared_head_leaves_the_policy_alone():
    policy = loaded(f_llama())
    value = SharedValue(policy)
    assert [n for n, _ in value.named_parameters()] == ["value_head.weight", "value_head.bias"]
    _, _, packed = packed_rows()
    first = value(packed, None, frozenset({"values", "hidden"}), 1.0)
    first["values"].sum().backward()
    assert value.value_head.weight.grad is not None
    assert all(p.grad is None for p in policy.parameters())
    assert not first["hidden"].requires_grad
    again = value(None, None, VALUES, 1.0, hidden=first["hidden"])
    assert torch.equal(again["values"], first["values"])


def test_other_outputs_are_refused():
    _, _, packed = packed_rows()
    for value in (Value(f_llama()), SharedValue(loaded(f_llama()))):
        with pytest.raises(ValueError, match="logprobs"):
            value(packed, None, frozenset({"logprobs"}), 1.0)
