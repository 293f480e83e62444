from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.tiny import f_bpe, f_gpt2, f_llama, save
from verl.checkpoint.export import export, model_files
from verl.checkpoint.store import CheckpointStore
from verl.config.errors import RequestError, RunError
from verl.config.model import ModelConfig

IDS = torch.tensor([[1, 4, 5, 6, 7]])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def checkpoint(root, model, tensors=None, cfg=None):
    files = {"hf": model_files(model, f_bpe(template="plain"), cfg)}
    return CheckpointStore(root / "checkpoints").save(1, {"actor": tensors or model.state_dict()}, files)


@pytest.mark.parametrize(
    "build", [f_llama, lambda: f_llama(tied=True), f_gpt2], ids=["llama", "tied llama", "gpt2, tied by default"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_transformers_loads_the_same_policy(build, dtype, tmp_path):
    model = build()
    for parameter in model.parameters():  # not model.to(dtype): that rounds the rotary frequencies too
        parameter.data = parameter.data.to(dtype)
    model.generation_config.eos_token_id = [2, 6]
    out = export(checkpoint(tmp_path, model), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert loaded.dtype == dtype and torch.equal(logits(loaded), logits(model))
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied
    assert loaded.generation_config.eos_token_id == [2, 6]
    assert json.loads((out / "config.json").read_text())["architectures"] == [type(model).__name__]
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("xab")["input_ids"] == f_bpe()("xab")["input_ids"] and tokenizer.chat_template
    assert not list(tmp_path.glob(".*"))


def test_second_name_of_an_untied_model_is_written_out(tmp_path):
    model = f_llama()
    tensors = dict(model.state_dict())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # equal by chance, not by configuration
    out = export(checkpoint(tmp_path, model, tensors), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(loaded.lm_head.weight, model.model.embed_tokens.weight)


@pytest.fixture
def lora(tmp_path, monkeypatch):
    """A base model in a folder named relative to the current one, and an adapter that changes it."""
    monkeypatch.chdir(tmp_path)
    save("base", f_llama(), f_bpe())
    model = get_peft_model(LlamaForCausalLM.from_pretrained("base"), LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


CFG = ModelConfig(model_name_or_path="base", use_lora=True)


def test_adapter_is_merged_into_its_base(lora, tmp_path, monkeypatch):
    folder = checkpoint(tmp_path, lora, get_peft_model_state_dict(lora), CFG)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    out = export(folder, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(out)
    assert (logits(merged) - logits(lora)).abs().max() < 1e-4
    assert (logits(merged) - logits(f_llama())).abs().max() > 0.1
    assert not list(out.glob("adapter*")) and AutoTokenizer.from_pretrained(out).chat_template


@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
def test_adapter_is_kept_apart_when_asked(prefix, lora, tmp_path):
    tensors = {n.replace("base_model.model.", prefix): t for n, t in get_peft_model_state_dict(lora).items()}
    out = export(checkpoint(tmp_path, lora, tensors, CFG), tmp_path / "adapter", merge=False)
    loaded = PeftModel.from_pretrained(f_llama(), out)
    assert torch.equal(logits(loaded), logits(lora)) and not (out / "model.safetensors").exists()


def test_an_adapter_that_does_not_fit_is_an_error(lora, tmp_path):
    tensors = dict(list(get_peft_model_state_dict(lora).items())[1:])
    folder = checkpoint(tmp_path, lora, tensors, CFG)
    with pytest.raises(RunError, match=r"the adapter doesn't fit .*base: .*lora"):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_missing_base_is_named(lora, tmp_path):
    cfg = ModelConfig(model_name_or_path=str(tmp_path / "gone"), use_lora=True)
    with pytest.raises(RequestError, match=r"base model .*gone can't be loaded"):
        export(checkpoint(tmp_path, lora, get_peft_model_state_dict(lora), cfg), tmp_path / "out")


def test_lora_without_an_adapter_is_refused():
    with pytest.raises(TypeError, match="carries no peft adapter"):
        model_files(f_llama(), None, CFG)


def test_output_folder(tmp_path):
    folder = checkpoint(tmp_path, f_llama())
    (tmp_path / "empty").mkdir()
    assert (export(folder, tmp_path / "empty") / "model.safetensors").exists()
    for taken in (tmp_path / "empty", tmp_path / "empty" / "config.json"):
        with pytest.raises(RequestError, match="exists and isn't empty"):
            export(folder, taken)
    assert (export(folder, tmp_path / "a" / "b") / "config.json").exists()


@pytest.mark.parametrize("out", ["/proc/nowhere", "file/out"])
def test_a_folder_that_cannot_be_written_is_named(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=f"can't write to {out}: N"):  # No such file, Not a directory
        export(checkpoint(tmp_path, f_llama()), Path(out))


def test_what_is_no_policy(tmp_path):
    with pytest.raises(RequestError, match="no complete checkpoint"):
        export(tmp_path / "nowhere", tmp_path / "out")
    folder = CheckpointStore(tmp_path / "checkpoints").save(1, {"critic": {"w": torch.ones(1)}})
    with pytest.raises(RequestError, match=r"holds no policy to export; it has \['critic"):
        export(folder, tmp_path / "out")
