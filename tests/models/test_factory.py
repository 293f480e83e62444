"""Finding models and tokenizers, and saying what was looked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.tiny import EOS, f_bpe, f_gpt2, f_llama, save
from verl.config.errors import RequestError
from verl.config.model import ModelConfig
from verl.models.factory import create_model, eos_ids, load_model, load_tokenizer, resolve_dtype
from verl.models.policy import Policy


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "llama", f_llama(), f_bpe(pad=None))


def test_loads_a_folder_in_the_asked_dtype(folder):
    policy = Policy(load_model(ModelConfig(model_name_or_path=folder), "cpu", torch.bfloat16))
    assert policy.dtype == torch.bfloat16 and policy.device.type == "cpu"
    assert not policy.training


def test_a_loaded_module_is_used_itself():
    model = f_gpt2()
    assert load_model(ModelConfig(model_name_or_path=model), "cpu", torch.float32) is model


def test_a_module_that_is_no_language_model_is_refused():
    with pytest.raises(RequestError, match="Linear is not a Hugging Face causal language model"):
        load_model(ModelConfig(model_name_or_path=nn.Linear(2, 2)), "cpu", torch.float32)


@pytest.mark.parametrize("what", ["empty folder", "no folder"])
def test_a_missing_model_says_where_it_was_looked_for(what, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = tmp_path / "gone"
    if what == "empty folder":
        path.mkdir()
    for call in (
        lambda: load_model(ModelConfig(model_name_or_path=str(path)), "cpu", torch.float32),
        lambda: load_tokenizer(str(path)),
        lambda: create_model(str(path)),
    ):
        with pytest.raises(RequestError, match=str(path)) as error:
            call()
        assert "\n" not in str(error.value)


def test_no_model_at_all():
    with pytest.raises(RequestError, match="model_name_or_path"):
        load_model(ModelConfig(), "cpu", torch.float32)


def test_a_tokenizer_without_pad_token_or_template_loads(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.pad_token is None and tokenizer.chat_template is None


def test_create_model_generates_as_plain_transformers(folder):
    from verl.utils.model import create_model as door

    assert door is create_model
    model = create_model(folder)
    out = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False)
    assert out.shape[1] > 3
    assert create_model(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("as_module", [True, False], ids=["module", "folder"])
def test_half_precision_leaves_rotary_frequencies_alone(as_module, folder):
    source = f_llama() if as_module else folder
    lm = load_model(ModelConfig(model_name_or_path=source), "cpu", torch.bfloat16)
    assert lm.dtype == torch.bfloat16
    assert torch.equal(lm.model.rotary_emb.inv_freq, f_llama().model.rotary_emb.inv_freq)


def test_every_id_that_ends_a_response_is_known():
    model, tokenizer = f_llama(), f_bpe()
    assert eos_ids(model, tokenizer) == {EOS}
    model.generation_config.eos_token_id = [EOS, 10]
    assert eos_ids(model, tokenizer) == {EOS, 10}
    model.config.eos_token_id = 12
    assert eos_ids(model, tokenizer) == {EOS, 10, 12}
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token = None
    assert eos_ids(model, tokenizer) == frozenset()


def test_dtype():
    assert resolve_dtype("bf16", "cpu") == torch.bfloat16
    assert resolve_dtype("fp32", "cuda") == torch.float32
    assert resolve_dtype("auto", "cuda:1") == torch.bfloat16
    fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    assert resolve_dtype("auto", torch.device("cpu")) == (torch.bfloat16 if fast else torch.float32)
    with pytest.raises(RequestError, match="fp8"):
        resolve_dtype("fp8", "cpu")
