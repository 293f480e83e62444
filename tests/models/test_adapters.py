"""Training that goes on with an adapter: found in a folder or in a loaded module, checked against the settings."""

from __future__ import annotations

import json
import re

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.models.zoo import FAMILIES, built, rows
from tests.tiny import f_bpe, f_llama, save
from verl.batch import Ragged
from verl.config.errors import RequestError
from verl.config.model import CriticConfig, ModelConfig
from verl.models.adapters import unscaled
from verl.models.decoder import adapter_tensors
from verl.models.factory import create_model, load_model, load_tokenizer
from verl.models.packing import pack
from verl.models.policy import Policy
from verl.models.value import Value

IDS = torch.tensor([[1, 4, 5, 6, 7]])
TARGETS = ["q_proj", "v_proj"]
BASE = "models/small/base"  # no name that a hub could have


def trained_adapter(base, **options) -> PeftModel:
    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=TARGETS, **options)
    lm = get_peft_model(base, config)
    for name, p in lm.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    return lm.eval()


def logits(lm) -> torch.Tensor:
    with torch.no_grad():
        return lm(IDS).logits


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A base, and an adapter that names it relative to the current folder."""
    monkeypatch.chdir(tmp_path)
    save(BASE, f_llama(), f_bpe())
    trained_adapter(LlamaForCausalLM.from_pretrained(BASE)).save_pretrained("adapter")


def policy(source, dtype=torch.float32, **options) -> Policy:
    return Policy(load_model(ModelConfig(model_name_or_path=source, **options), "cpu", dtype))


@pytest.mark.parametrize(
    "options", [{}, {"use_lora": True}, {"lora_r": 4, "lora_target_modules": ["v_proj", "q_proj"]}]
)
def test_an_adapter_folder_is_its_policy_and_goes_on_being_trained(folders, options):
    expected = logits(trained_adapter(f_llama()))
    ours = policy("adapter", **options)
    names = [n for n, _ in ours.trainable()]
    assert len(names) == 2 * 2 * 2 and all("lora_" in n for n in names)
    assert {n for n, _ in ours.shards()} == set(load_file("adapter/adapter_model.safetensors"))
    ours.lm.set_attn_implementation("eager")
    torch.testing.assert_close(logits(ours.lm), expected, atol=1e-5, rtol=1e-5)


def test_a_loaded_adapter_goes_on_even_where_peft_froze_it(folders):
    frozen = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(BASE), "adapter")
    assert not any(p.requires_grad for p in frozen.parameters())
    ours = policy(frozen, use_lora=True)
    assert ours.lm is frozen and all("lora_" in n for n, _ in ours.trainable()) and list(ours.trainable())


def test_an_adapter_of_another_name_is_the_one_trained():
    lm = trained_adapter(f_llama())
    lm.add_adapter("second", LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=TARGETS))
    lm.set_adapter("second")
    ours = policy(lm)
    assert all(".second." in n for n, _ in ours.trainable())
    assert all(2 in t.shape for _, t in ours.shards())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora_r": 8}, "lora_r is 8, but the adapter in adapter has 4"),
        ({"lora_alpha": 32.0}, "lora_alpha is 32.0, but the adapter in adapter has 6"),
        ({"lora_target_modules": ["q_proj"]}, "has .'q_proj', 'v_proj'."),
    ],
)
def test_settings_that_contradict_the_adapter_are_refused(folders, options, words):
    with pytest.raises(RequestError, match=words):
        policy("adapter", **options)


def test_a_resolved_file_s_defaults_contradict_nothing(folders):
    defaults = {key: field.default for key, field in ModelConfig.model_fields.items() if "lora" in key}
    assert list(policy("adapter", **defaults).trainable())


def test_target_modules_that_are_no_regular_expression_are_refused():
    for pattern in ("[(", "a{99999999999}"):
        with pytest.raises(RequestError, match=re.escape(f"lora_target_modules '{pattern}' is no regular expression")):
            policy(f_llama(), use_lora=True, lora_target_modules=pattern)


def test_other_kinds_of_adapters_are_refused_by_name():
    lm = get_peft_model(f_llama(), IA3Config(task_type="CAUSAL_LM", target_modules=["q_proj"], feedforward_modules=[]))
    with pytest.raises(RequestError, match=r"IA3.*merge it"):
        policy(lm)


def test_an_adapter_that_fits_only_in_part_is_refused(folders):
    file = "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    save_file(dict(list(tensors.items())[1:]), file)
    with pytest.raises(RequestError, match="on one side only"):
        policy("adapter")


def test_the_base_is_found_beside_the_adapter_or_named_in_the_error(folders, tmp_path):
    (tmp_path / "models").rename(tmp_path / "adapter" / "models")
    assert list(policy("adapter").trainable())
    (tmp_path / "adapter" / "models").rename(tmp_path / "gone")
    with pytest.raises(RequestError, match=f"no causal language model '{BASE}'"):
        policy("adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    config["base_model_name_or_path"] = None
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match="names no base"):
        policy("adapter")


def test_an_adapter_s_tokenizer_is_its_own_or_its_base_s(folders):
    assert load_tokenizer("adapter").vocab == f_bpe().vocab
    f_bpe(template="plain").save_pretrained("adapter")
    assert load_tokenizer("adapter").chat_template


def test_create_model_merges_an_adapter(folders):
    model = create_model("adapter")
    assert type(model) is LlamaForCausalLM
    torch.testing.assert_close(logits(model), logits(trained_adapter(f_llama())), atol=1e-4, rtol=1e-4)


def test_a_critic_starts_from_the_adapter_too(folders):
    value = Value(load_model(CriticConfig(model_name_or_path="adapter"), "cpu", torch.float32))
    names = [n for n, _ in value.trainable()]
    assert sum("lora_" in n for n in names) == 8 and {"value_head.weight", "value_head.bias"} <= set(names)
    assert len(names) == 10


class TestReference:
    def test_is_a_frozen_copy_that_no_shard_holds(self, folders):
        ours = policy("adapter")
        trainable, shards = [n for n, _ in ours.trainable()], {n for n, _ in ours.shards()}
        state = torch.random.get_rng_state()
        ours.keep_reference()
        assert torch.equal(torch.random.get_rng_state(), state)
        assert [n for n, _ in ours.trainable()] == trainable and {n for n, _ in ours.shards()} == shards
        copies = [p for n, p in ours.lm.named_parameters() if ".reference." in n]
        assert len(copies) == 8 and not any(p.requires_grad for p in copies)

    def test_flags_and_the_active_adapter_come_back_also_after_an_error(self, folders):
        ours = policy("adapter")
        ours.keep_reference()
        frozen = next(p for _, p in ours.trainable()).requires_grad_(False)
        trainable = [n for n, _ in ours.trainable()]
        with pytest.raises(KeyError), ours.as_reference():
            assert not list(ours.trainable())
            raise KeyError
        assert [n for n, _ in ours.trainable()] == trainable and not frozen.requires_grad
        assert ours.lm.active_adapters == ["default"]

    def test_kept_again_it_is_the_present_policy(self, folders):
        ours = policy("adapter")
        ours.keep_reference()
        with torch.no_grad():
            for _, p in ours.trainable():
                p.mul_(2)
        ours.keep_reference()
        weights = dict(ours.lm.named_parameters())
        for name, p in ours.trainable():
            assert torch.equal(p, weights[name.replace(".default.", ".reference.")])

    @pytest.mark.parametrize("fresh", [True, False])
    def test_only_an_adapter_that_changes_something_is_copied(self, fresh, folders):
        ours = policy(BASE, use_lora=True) if fresh else policy("adapter")
        ours.keep_reference()
        assert ("reference" in ours.lm.peft_config) == (not fresh)


@pytest.mark.parametrize("family", ["mixtral", "deepseek v3", "gemma4", "gpt2"])
def test_adapters_reach_every_kind_of_layer_and_merge(family, tmp_path):
    """Experts too, whose weights lie in one tensor."""
    torch.manual_seed(0)
    folder, ids = str(tmp_path / "base"), torch.arange(3, 12)[None]
    built(FAMILIES[family]).save_pretrained(folder)
    first = policy(folder, use_lora=True, lora_r=4)
    with torch.no_grad():
        for name, p in first.trainable():
            if "lora_B" in name:
                p.normal_(std=0.05)
    first.lm.save_pretrained(tmp_path / "adapter")
    ours = policy(str(tmp_path / "adapter"))
    assert {n for n, _ in ours.trainable()} == {n for n, _ in first.trainable()}
    ours.keep_reference()
    prompts, responses, groups = rows()
    packed = pack(Ragged.from_rows(prompts), Ragged.from_rows(responses), groups)

    def logprobs():
        return ours(packed, torch.cat(responses), frozenset({"logprobs"}), 1.0)["logprobs"]

    start = logprobs()
    start.sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for _, p in ours.trainable())
    with torch.no_grad():
        for _, p in ours.trainable():
            p.add_(p.grad, alpha=1e-3 / p.grad.norm().item())
        assert (logprobs() - start).abs().max() > 1e-4
        with ours.as_reference():
            assert torch.equal(logprobs(), start)
        ours.lm.set_attn_implementation("eager")
        adapted = ours.lm(ids).logits
        ours.lm.save_pretrained(tmp_path / "trained", selected_adapters=["default"])
        merged = create_model(str(tmp_path / "trained"))
        torch.testing.assert_close(merged(ids).logits, adapted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("rslora", [False, True])
def test_one_factor_for_all_modules(rslora):
    """What a reader that knows neither patterns nor another rank's factor makes of an adapter is the same model."""
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=["embed_tokens", "q_proj", "up_proj", "down_proj"],
        rank_pattern={"up_proj": 8, "layers.1.self_attn.q_proj": 2}, use_rslora=rslora,
        alpha_pattern={"down_proj": 3, "0.mlp.up_proj": 12, "embed_tokens": 5},
    )  # fmt: skip
    lm = get_peft_model(f_llama(), config, autocast_adapter_dtype=False)
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in adapter_tensors(lm).values():
            tensor.normal_(std=0.1)
    settings, tensors = unscaled(lm.peft_config["default"].to_dict(), adapter_tensors(lm).items())
    assert settings["lora_alpha"] / settings["r"] == 1
    read = get_peft_model(f_llama(), LoraConfig(**settings), autocast_adapter_dtype=False)
    set_peft_model_state_dict(read, dict(tensors))
    assert {m.scaling["default"] for m in read.modules() if isinstance(m, LoraLayer)} == {1.0}
    ids = torch.arange(3, 19)[None]
    assert torch.allclose(lm(ids).logits, read(ids).logits, atol=1e-5)
    with lm.disable_adapter():
        assert (lm(ids).logits - read(ids).logits).abs().max() > 0.01


@pytest.mark.parametrize("text", ['{"peft_type": ', "[1]"])
def test_a_file_that_holds_no_settings_is_named(tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(RequestError, match=r"adapter_config\.json holds no adapter's settings"):
        load_model(ModelConfig(model_name_or_path=str(tmp_path)), "cpu", torch.float32)
