"""What a plan says before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import f_bpe, f_llama, save
from verl.cli.main import main
from verl.config.devices import Device
from verl.config.errors import RequestError
from verl.config.load import load_config
from verl.dataflow.placement import place
from verl.planner.publish import estimate
from verl.planner.weights import weights_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("model"), f_llama(kv_heads=2), f_bpe(template="bos"))


def config(model: str, **keys):
    base = {
        "actor_model_config": {"model_name_or_path": model, "dtype": "bf16"}, "dataset": "d.jsonl",
        "algorithm": {"name": "grpo"}, "reward_fn": "a:b", "max_prompt_length": 64, "max_response_length": 64,
    }  # fmt: skip
    return load_config(None, **base | keys)


def estimated(cfg, weights, in_place=False):
    return estimate(cfg, place(cfg, Device("cuda", 0), {"actor", "rollout"}), weights, in_place)


def test_weights_are_those_of_the_files(model: str):
    loaded = AutoModelForCausalLM.from_pretrained(model)
    found = {w.name: w for w in weights_of(Path(model))}
    assert {name: w.shape for name, w in found.items()} == {n: tuple(p.shape) for n, p in loaded.named_parameters()}
    assert {w.itemsize for w in found.values()} == {4} and {w.itemsize for w in weights_of(Path(model), 2)} == {2}
    cuts = {name.split(".")[-2]: w.cut for name, w in found.items()}
    assert (cuts["q_proj"], cuts["down_proj"], cuts["norm"], cuts["embed_tokens"]) == (0, 1, None, None)
    assert found["model.layers.1.self_attn.q_proj.weight"].layer == 0.5


def test_a_publish_costs_what_a_rank_lacks(model: str):
    weights = weights_of(Path(model), 2)
    size = sum(w.bytes for w in weights)
    apart = estimated(config(model, device_map={"actor": [0], "rollout": [1]}), weights)
    assert apart.ours is not None and (apart.ours.received, apart.ours.redundant) == (size, 0)
    shared = estimated(config(model, device_map={"actor": [0, 1]}), weights)
    assert shared.ours is not None and shared.ours.received == size // 2 and shared.ours.redundant == size // 2
    assert shared.everything.received == size // 2 and shared.groups is None
    assert shared.actor == (size + 16 * shared.values) // 2 and shared.values == size // 2
    one = estimated(config(model), weights, in_place=True)
    assert one.ours is None and one.actor == size + 16 * one.values
    fsdp = {"tensor_parallel_size": 2, "sharding_strategy": "NO_SHARD"}
    actor = {"model_name_or_path": model, "dtype": "bf16", "fsdp_config": fsdp}
    cut = estimated(config(model, actor_model_config=actor, device_map={"actor": [0, 1]}), weights)
    assert cut.groups is not None and cut.groups.received == size // 2
    assert cut.ours is not None and cut.ours.received < size // 2  # norms and embeddings are everywhere


def test_an_engine_over_several_devices_is_counted_by_each_ones_share(model: str):
    weights = weights_of(Path(model), 2)
    size, vectors = (sum(w.bytes for w in weights if len(w.shape) < most) for most in (9, 2))
    apart = {"device_map": {"actor": [0], "rollout": [1, 2, 3, 4]}}
    for width in (1, 2, 4):
        rollout = {"engine": "vllm", "tensor_parallel_size": width}
        ours = estimated(config(model, rollout=rollout, **apart), weights).ours
        assert ours is not None and ours.received == size and ours.redundant == 0
        assert ours.peak == vectors + (size - vectors) // width + 2 * size  # all is less than two buckets
    beside = {"device_map": {"actor": [0, 1]}, "rollout": {"tensor_parallel_size": 2}}
    ours = estimated(config(model, **beside), weights).ours
    assert ours is not None and (ours.received, ours.redundant) == (size // 2, size // 2)
    assert ours.peak == size // 2 + vectors + (size - vectors) // 2 + size


def test_the_command(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "train.yaml"
    file.write_text(
        f"actor_model_config: {{model_name_or_path: {model}, dtype: bf16}}\n"
        "dataset: d.jsonl\nalgorithm: {name: grpo}\nreward_fn: a:b\nmax_prompt_length: 64\nmax_response_length: 64\n"
        "device_map: {actor: [0, 1], rollout: [0, 1, 7]}\n"
    )
    monkeypatch.setattr("sys.argv", ["verl", "plan", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().out
    assert not ended.value.code and "3 workers" in said and "cuda:7" in said and "this run" in said
    total = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).parameters())
    assert f"the policy: {total:,} values" in said


def test_a_folder_without_weights_is_refused(tmp_path: Path):
    with pytest.raises(RequestError, match="holds no safetensors files"):
        weights_of(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(RequestError, match="can't be read"):
        weights_of(tmp_path)
