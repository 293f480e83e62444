"""Weights that lie one behind the other."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tiny import f_llama
from verl.models.adjacent import as_one, put_together


def of(lm: nn.Module, layer: int = 1) -> tuple[list[nn.Module], list[nn.Module]]:
    block = lm.model.layers[layer]
    attention = block.self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj], [block.mlp.gate_proj, block.mlp.up_proj]


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_is_all_of_them_and_the_model_stays_what_it_is(bias: bool) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=bias,
    )  # fmt: skip
    torch.manual_seed(0)
    lm = LlamaForCausalLM(config)
    for p in lm.parameters():
        nn.init.normal_(p)
    before, parameters = copy.deepcopy(lm), dict(lm.named_parameters())
    assert all(as_one(*parts) is None for parts in of(lm))
    optimizer = torch.optim.SGD(lm.parameters(), lr=0.1)
    put_together(lm)
    ids = torch.arange(12)[None] % 32
    for model in (lm, before):
        model(input_ids=ids, labels=ids).loss.backward()
    for (name, p), q in zip(lm.named_parameters(), before.parameters(), strict=True):
        assert p is parameters[name] and p.is_contiguous() and torch.equal(p, q) and torch.equal(p.grad, q.grad)
    optimizer.step()
    for parts in of(lm):
        one = as_one(*parts)
        assert one is not None and (one[1] is not None) == (bias and len(parts) == 3)
        x = torch.randn(3, 16)
        split = nn.functional.linear(x, *one).split([part.out_features for part in parts], -1)
        for part, y in zip(parts, split, strict=True):
            torch.testing.assert_close(y, part(x))
        with torch.no_grad():  # new values are seen
            parts[-1].weight.fill_(1.0)
        assert one[0][-1].eq(1).all()


def test_where_they_do_not_lie_so_or_more_is_computed() -> None:
    lm = f_llama()
    put_together(lm)
    qkv, mlp = of(lm)
    assert as_one(*qkv) and as_one(*mlp)
    assert as_one(*qkv[::-1]) is None and as_one(qkv[0], qkv[2]) is None
    at = [part.weight.data_ptr() for part in qkv]
    put_together(lm)
    assert [part.weight.data_ptr() for part in qkv] == at
    mlp[1].weight.data = mlp[1].weight.data.clone()
    assert as_one(*mlp) is None
    hook = qkv[1].register_forward_hook(lambda *_: None)
    assert as_one(*qkv) is None
    hook.remove()
    qkv[1].forward = qkv[1].forward
    assert as_one(*qkv) is None
    del qkv[1].forward
    assert as_one(*qkv)
    adapted = get_peft_model(lm, LoraConfig(r=2, target_modules=["q_proj"])).get_base_model()
    assert as_one(*of(adapted)[0]) is None and as_one(*of(adapted, 0)[1])
