"""Folders whose files and config.json don't make one model: what is said, and what is no fault."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel, PreTrainedModel

from tests.engines.ranks import run
from tests.engines.test_parts import Case, engine
from tests.models.test_unread import mixtral
from tests.tiny import f_bpe, f_llama, save
from verl.cli.main import main
from verl.config.errors import RequestError
from verl.config.model import ModelConfig, RewardModelConfig
from verl.models import stored
from verl.models.factory import create_model, load_model, load_scorer
from verl.models.policy import Policy
from verl.models.scorer import Scorer
from verl.models.value import Value
from verl.rewards.model import RewardModelScorer

EXPERT = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
UP = "model.layers.1.mlp.up_proj.weight"
LoadModel = Callable[[str], Any]


def load(source: Any, **options: Any) -> Any:
    return load_model(ModelConfig(model_name_or_path=source), "cpu", torch.float32, **options)


def scorer(source: str) -> Scorer:
    return Scorer(load_scorer(ModelConfig(model_name_or_path=source), "cpu", torch.float32))


def reward_model(source: str) -> RewardModelScorer:
    return RewardModelScorer(RewardModelConfig(model_name_or_path=source, dtype="fp32"), torch.device("cpu"))


def by_lora(source: str) -> Any:
    return load_model(ModelConfig(model_name_or_path=source, use_lora=True), "cpu", torch.float32)


def sharded(source: str) -> Any:
    return load(source, in_parts=True)


def headless(source: str) -> Value:
    return Value(load(source, headless=True))


LANGUAGE = [load, sharded, by_lora, create_model]


def folder(path: Path, change: Callable[[dict[str, torch.Tensor]], Any] = lambda weights: None, **config: Any) -> str:
    """F-llama with other weights in its file, or other keys in its config.json."""
    return altered(save(path, f_llama(), f_bpe()), change, **config)


def altered(name: str, change: Callable[[dict[str, torch.Tensor]], Any] = lambda weights: None, **config: Any) -> str:
    path = Path(name)
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    keys = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(keys | config))
    return name


def rewarding(path: Path) -> str:
    config = f_llama().config
    config.num_labels = 1
    torch.manual_seed(0)
    return save(path, LlamaForSequenceClassification(config), f_bpe())


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == stored.__name__]


def without_mlp(weights: dict[str, torch.Tensor]) -> None:
    for name in [name for name in weights if "layers.1.mlp" in name]:
        del weights[name]


@pytest.mark.parametrize("how", [*LANGUAGE, scorer, headless], ids=lambda how: how.__name__)
def test_files_without_some_weights(how: LoadModel, tmp_path: Path) -> None:
    name = folder(tmp_path, without_mlp)
    with pytest.raises(RequestError, match="holds no weights for 3 of the 21 parameters of Llama") as error:
        how(name)
    assert str(error.value).startswith(name) and "save_pretrained" in str(error.value)
    assert f"(model.layers.1.mlp.gate_proj.weight, {UP}, model.layers.1.mlp.down_proj.weight)" in str(error.value)


def test_the_command_says_it_and_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = folder(tmp_path / "model", without_mlp)
    keys = {
        "actor_model_config": {"model_name_or_path": name}, "algorithm": {"name": "grpo"}, "total_steps": 1,
        "reward_fn": "tests.trainer.reward:low_ids", "dataset": str(tmp_path / "rows.jsonl"), "max_prompt_length": 16,
        "max_response_length": 8, "run_dir": str(tmp_path / "run"),
    }  # fmt: skip
    (tmp_path / "rows.jsonl").write_text('{"prompt": "xa"}\n')
    (tmp_path / "train.yaml").write_text(json.dumps(keys))
    monkeypatch.setattr("sys.argv", ["verl", "train", str(tmp_path / "train.yaml")])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main()
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.startswith(f"verl: {name} holds no weights for 3 of") and err.count("\n") == 1


@pytest.mark.parametrize("how", LANGUAGE, ids=lambda how: how.__name__)
def test_a_language_model_needs_its_head(how: LoadModel, tmp_path: Path) -> None:
    bare = save(tmp_path / "bare", LlamaModel(f_llama().config), f_bpe())
    with pytest.raises(RequestError, match=r"1 of the 21 parameters of LlamaForCausalLM \(lm_head.weight\): name"):
        how(bare)
    with pytest.raises(RequestError, match=r"\(lm_head.weight\); score.weight is there, which LlamaForCausalLM has no"):
        how(rewarding(tmp_path / "rewarding"))


def test_who_makes_a_head_needs_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = rewarding(tmp_path / "rewarding")
    expected = load_file(tmp_path / "rewarding" / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        for in_parts in (False, True):
            value = Value(load(name, in_parts=in_parts, headless=True))
            assert {n for n, _ in value.weights()} | {"score.weight"} == expected.keys()
            assert all(torch.equal(p, expected[n]) for n, p in value.weights())
    assert not told(caplog)
    assert torch.equal(scorer(name).head.weight, expected["score.weight"])
    bare = save(tmp_path / "bare", LlamaModel(f_llama().config), f_bpe())
    assert not any(p.isnan().any() for _, p in headless(bare).weights())
    scorer(bare)


def test_an_adapter_s_base_is_whole(tmp_path: Path) -> None:
    base = folder(tmp_path / "base")
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    get_peft_model(LlamaForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "adapter")
    load(str(tmp_path / "adapter"))
    altered(base, without_mlp)
    with pytest.raises(RequestError, match="base holds no weights for 3 of"):
        load(str(tmp_path / "adapter"))


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("how", [load, sharded])
def test_tied_weights_are_in_a_file_once(how: LoadModel, kept: str, tmp_path: Path) -> None:
    def rename(weights: dict[str, torch.Tensor]) -> None:
        weights[kept] = weights.pop("model.embed_tokens.weight")

    model = f_llama(tied=True)
    name = altered(save(tmp_path, model, f_bpe()), rename)
    parameters = dict(how(name).named_parameters())
    assert parameters.keys() == dict(model.named_parameters()).keys()
    if how is load:
        assert torch.equal(parameters["model.embed_tokens.weight"], model.model.embed_tokens.weight)
    del_all = altered(name, lambda weights: weights.pop(kept))
    with pytest.raises(RequestError, match=r"\(model.embed_tokens.weight\)"):
        how(del_all)
    with pytest.raises(RequestError, match=r"\(model.embed_tokens.weight\)"):
        headless(del_all)


@pytest.mark.parametrize("how", [*LANGUAGE, scorer], ids=lambda how: how.__name__)
def test_a_config_of_another_width(how: LoadModel, tmp_path: Path) -> None:
    name = folder(tmp_path, hidden_size=64)
    with pytest.raises(
        RequestError, match=r"model.embed_tokens.weight has shape \(32, 32\) in its files and \(32, 64\)"
    ):
        how(name)


def test_a_reward_model_s_config_of_another_width(tmp_path: Path) -> None:
    name = altered(rewarding(tmp_path), intermediate_size=48)
    with pytest.raises(RequestError, match=r"gate_proj.weight has shape \(64, 32\) .* and \(48, 32\) .* 5 more differ"):
        reward_model(name)


def test_experts_that_don_t_fit_each_other(tmp_path: Path) -> None:
    name = altered(save(tmp_path, mixtral(), f_bpe()), num_local_experts=4)
    with pytest.raises(RequestError, match=r"mlp.gate.weight has shape \(2, 16\) in its files and \(4, 16\) .* 2 more"):
        load(name)
    name = altered(save(tmp_path, mixtral(), f_bpe()), lambda weights: weights.pop(EXPERT))
    with pytest.raises(RequestError, match="weights in its files are missing, or fit neither") as error:
        load(name)
    assert str(error.value).startswith(name)


@pytest.mark.parametrize("how", [load, sharded])
def test_what_is_left_out_of_the_files_is_told_once(
    how: LoadModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = folder(tmp_path, num_hidden_layers=1)
    with caplog.at_level(logging.WARNING, stored.__name__):
        for _ in range(2):
            assert how(name).config.num_hidden_layers == 1
    assert told(caplog) == [
        f"{name}: 9 tensors in its files have no place in LlamaForCausalLM by its config.json and are left out "
        "(model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight, ...)"
    ]


@pytest.mark.parametrize("how", [load, sharded])
def test_old_files_with_rotary_frequencies_are_nothing_to_tell(
    how: LoadModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    with caplog.at_level(logging.WARNING, stored.__name__):
        how(folder(tmp_path, lambda weights: weights.update(old)))
    assert not told(caplog)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("how", [load, scorer, by_lora], ids=lambda how: how.__name__)
def test_weights_that_are_not_finite_are_named(how: LoadModel, number: float, tmp_path: Path) -> None:
    name = folder(tmp_path, lambda weights: weights[UP][0].fill_(number))
    with pytest.raises(RequestError, match=f"not finite: 32 of 2048 numbers in {UP} are NaN or infinite"):
        how(name)


def refused_by_rank(name: str) -> str:
    with pytest.raises(RequestError) as error:
        engine(Case(), name, True)
    return str(error.value)


def test_of_a_sharded_model_a_rank_names_what_is_not_finite_in_its_part(tmp_path: Path) -> None:
    name = folder(tmp_path, lambda weights: weights[UP][0].fill_(float("nan")))
    said = run(2, refused_by_rank, name)
    assert all(message.startswith("LlamaForCausalLM computes logits that are not finite: ") for message in said)
    assert f"32 of 1024 numbers in {UP} are NaN" in said[0] and "a weight is, or they grow beyond" in said[1]


def test_a_loaded_module_is_not_asked_for_files() -> None:
    model: PreTrainedModel = LlamaForCausalLM(f_llama().config)
    assert Policy(load(model)).lm is model
