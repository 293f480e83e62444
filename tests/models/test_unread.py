"""Models without their weights: the same buffers, names and settings as whole ones, and files that can't be used so."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, MixtralConfig, MixtralForCausalLM

from tests.engines.test_spread import MODELS
from tests.tiny import f_bpe, f_llama, save
from verl.config.errors import RequestError
from verl.config.model import ModelConfig
from verl.models.factory import load_model
from verl.models.policy import Policy
from verl.models.unread import build
from verl.models.value import Value


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2", "qwen2", "qwen3", "window"])
def test_all_but_the_weights_is_there(tmp_path, name):
    model = MODELS[name]()
    model.generation_config = GenerationConfig(eos_token_id=[2, 10])
    folder = save(tmp_path, model, f_bpe())
    whole, parts = (load_model(ModelConfig(model_name_or_path=folder), "cpu", torch.float32, x) for x in (False, True))
    assert all(p.is_meta for p in parts.parameters()) and not parts.training
    assert {n: (p.shape, p.dtype) for n, p in parts.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in whole.named_parameters()
    }
    expected = dict(whole.named_buffers())
    found = dict(parts.named_buffers())
    assert found.keys() == expected.keys() and all(torch.equal(b, expected[n]) for n, b in found.items())
    assert parts.generation_config.eos_token_id == [2, 10]
    assert parts.config.to_dict() == whole.config.to_dict()
    assert (parts.get_input_embeddings().weight is parts.get_output_embeddings().weight) == (name in ("tied", "gpt2"))
    files = Policy(parts).unread
    stored = dict(files.tensors({n for n, _ in whole.named_parameters()}))
    for n, p in whole.named_parameters():
        torch.testing.assert_close(stored[n][...], p.detach(), rtol=0, atol=0)


def test_a_value_head_is_drawn_as_on_a_whole_backbone(tmp_path):
    folder = save(tmp_path, f_llama(), f_bpe())
    whole, parts = (
        Value(load_model(ModelConfig(model_name_or_path=folder), "cpu", torch.float32, x), 3) for x in (False, True)
    )
    assert torch.equal(whole.value_head.weight, parts.value_head.weight) and parts.unread is not None
    assert [n for n, _ in whole.weights()] == [n for n, _ in parts.weights()] and whole.unread is None


def mixtral():
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=2,
        )
    )  # fmt: skip


def spoil(folder, kind: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if kind == "pickled":
        torch.save(tensors, folder / "pytorch_model.bin")
        file.unlink()
    elif kind == "absent":
        del tensors["model.norm.weight"]
        save_file(tensors, file, {"format": "pt"})
    elif kind == "quantised":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("pickled", "it has no safetensors files"),
        ("absent", "its files have no model.norm.weight"),
        ("quantised", "it is quantised"),
        ("mixtral", "the layout of MixtralForCausalLM's files is not the model's"),
    ],
)
def test_files_that_cant_be_read_by_parts(tmp_path, kind, says):
    save(tmp_path, mixtral() if kind == "mixtral" else f_llama(), f_bpe())
    spoil(tmp_path, kind)
    assert build(str(tmp_path), torch.float32) == says


def test_what_cant_be_read_by_parts_is_read_whole(tmp_path, caplog):
    folder = save(tmp_path, f_llama(), f_bpe())
    spoil(tmp_path, "pickled")
    cfg = ModelConfig(model_name_or_path=folder)
    with caplog.at_level(logging.INFO):
        model = load_model(cfg, "cpu", torch.float32, in_parts=True)
    assert not any(p.is_meta for p in model.parameters())
    assert "is read whole by each rank and sharded then: it has no safetensors files" in caplog.text
    (tmp_path / "whole").mkdir()
    save(tmp_path / "whole", f_llama(), f_bpe())
    adapted = ModelConfig(model_name_or_path=str(tmp_path / "whole"), use_lora=True)
    assert not any(p.is_meta for p in load_model(adapted, "cpu", torch.float32, in_parts=True).parameters())
    spoil(tmp_path / "whole", "absent")
    with pytest.raises(RequestError, match=r"no weights for 1 of the 21 parameters .*\(model.norm.weight\)"):
        load_model(ModelConfig(model_name_or_path=str(tmp_path / "whole")), "cpu", torch.float32, in_parts=True)
    with pytest.raises(RequestError, match="no causal language model"):
        load_model(ModelConfig(model_name_or_path=str(tmp_path / "nothing")), "cpu", torch.float32, in_parts=True)


def test_several_files(tmp_path):
    f_llama().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    model = build(str(tmp_path), torch.bfloat16)
    expected = dict(f_llama().named_parameters())
    assert not isinstance(model, str) and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for name, stored in Policy(model).unread.tensors(set(expected)):
        assert torch.equal(stored[...], expected[name])
