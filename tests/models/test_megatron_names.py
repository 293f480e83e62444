"""Hugging Face weights into Megatron's shards and back: every bit, whatever the shape and the cut."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers as hf

from verl.config.errors import RequestError
from verl.models.megatron_names import EMBEDDING, HEAD, Shape, fill, join
from verl.models.naming import own_tensors

SHAPES = {
    "llama": Shape(layers=4, hidden=8, heads=8, groups=4, head_dim=2, inner=12, vocabulary=32),
    "each head its own key": Shape(layers=4, hidden=16, heads=4, groups=4, head_dim=4, inner=8, vocabulary=7),
    "wide heads, tied": Shape(layers=4, hidden=6, heads=4, groups=4, head_dim=5, inner=20, vocabulary=5, tied=True),
    "qwen2": Shape(layers=4, hidden=8, heads=12, groups=4, head_dim=2, inner=4, vocabulary=33, qkv_bias=True),
    "qwen3": Shape(layers=4, hidden=8, heads=8, groups=4, head_dim=4, inner=16, vocabulary=41, tied=True, qk_norm=True),
}
ONE_GROUP = Shape(layers=2, hidden=8, heads=4, groups=1, head_dim=2, inner=6, vocabulary=9)
CUTS = list(itertools.product((1, 2, 4), (1, 2, 4)))


def drawn(shape: Shape, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Bits at random, so that signs of zeros and numbers that are none count."""
    size = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[dtype]
    g = torch.Generator().manual_seed(0)
    limits = torch.iinfo(size)
    return {
        name: torch.randint(limits.min, limits.max, dims, generator=g, dtype=size).view(dtype)
        for name, dims in shape.weights.items()
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def shards(shape: Shape, tp: int, pp: int, weights: dict[str, torch.Tensor]) -> dict[tuple[int, int], dict]:
    """By stage and tensor-parallel rank."""
    dtype, found = next(iter(weights.values())).dtype, {}
    for stage, rank in itertools.product(range(pp), range(tp)):
        found[stage, rank] = {}
        for name, local in shape.held(tp, pp, rank, stage).items():
            found[stage, rank][name] = tensor = torch.zeros(local.shape, dtype=dtype)
            fill(tensor, local, weights)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tp", "pp"), CUTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_there_and_back(shape, tp, pp, dtype):
    weights = drawn(shape, dtype)
    held = shards(shape, tp, pp, weights)
    back = {}
    for unit in shape.units(tp, pp):
        back |= join(unit, [held[unit.stage, rank] for rank in range(tp)], shape.weights)
    assert list(back) == list(weights), "in the order of the state dict, for who sends them one by one"
    assert all(torch.equal(bits(back[name]), bits(tensor)) for name, tensor in weights.items())


@pytest.mark.parametrize(("tp", "pp"), CUTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_runs_cover_each_weight_and_each_tensor_once(shape, tp, pp):
    seen = {name: torch.zeros(dims, dtype=torch.int64) for name, dims in shape.weights.items()}
    for stage, rank in itertools.product(range(pp), range(tp)):
        for name, local in shape.held(tp, pp, rank, stage).items():
            inside = torch.zeros(local.shape, dtype=torch.int64)
            for run in local.runs:
                inside.narrow(local.dim, run.at, run.stop - run.start).add_(1)
                if not local.copy and (local.cut or rank == 0):
                    seen[run.weight].narrow(local.dim, run.start, run.stop - run.start).add_(1)
            filled = "word_embeddings" in name or "output_layer" in name
            assert bool((inside == 1).all()) or (filled and int(inside.max()) <= 1)
    assert all(bool((count == 1).all()) for count in seen.values())


def test_queries_keys_and_values_lie_group_by_group():
    shape = Shape(layers=1, hidden=1, heads=4, groups=2, head_dim=1, inner=4, vocabulary=5)
    numbers = {name: torch.zeros(dims) for name, dims in shape.weights.items()}
    at = "model.layers.0"
    for name, values in (("q", [1, 2, 3, 4]), ("k", [10, 20]), ("v", [100, 200])):
        numbers[f"{at}.self_attn.{name}_proj.weight"] = torch.tensor(values, dtype=torch.float32)[:, None]
    numbers[f"{at}.mlp.gate_proj.weight"] = torch.tensor([[1.0], [2], [3], [4]])
    numbers[f"{at}.mlp.up_proj.weight"] = torch.tensor([[10.0], [20], [30], [40]])
    numbers[f"{at}.mlp.down_proj.weight"] = torch.tensor([[1.0, 2, 3, 4]])
    numbers[HEAD] = torch.tensor([[1.0], [2], [3], [4], [5]])
    held = shards(shape, 2, 1, numbers)
    named = {
        "decoder.layers.0.self_attention.linear_qkv.weight": ([1, 2, 10, 100], [3, 4, 20, 200]),
        "decoder.layers.0.mlp.linear_fc1.weight": ([1, 2, 10, 20], [3, 4, 30, 40]),
        "decoder.layers.0.mlp.linear_fc2.weight": ([1, 2], [3, 4]),
        "output_layer.weight": ([1, 2, 3], [4, 5, 0]),
    }
    for name, expected in named.items():
        assert tuple(held[0, rank][name].flatten().tolist() for rank in (0, 1)) == expected


def test_a_tied_head_of_the_last_stage_is_the_first_stages_embedding():
    shape = SHAPES["qwen3"]
    held = shards(shape, 2, 2, drawn(shape, torch.float32))
    assert HEAD not in shape.weights and "output_layer.weight" not in held[0, 0]
    for rank in (0, 1):
        ends = held[0, rank]["embedding.word_embeddings.weight"], held[1, rank]["output_layer.weight"]
        assert torch.equal(*map(bits, ends))
    assert "output_layer.weight" not in shape.held(2, 1, 0, 0), "on one stage the embedding itself is the head"
    assert [unit.weights for unit in shape.units(2, 2)].count((EMBEDDING,)) == 1


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_names_and_shapes_are_those_of_the_model(kind, tied):
    config = getattr(hf, f"{kind}Config")(
        vocab_size=35, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        model = getattr(hf, f"{kind}ForCausalLM")(config)
    own = {name: tuple(tensor.shape) for name, tensor in own_tensors(model)}
    found = Shape.of(config).weights
    assert found == own and list(found) == list(own)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (hf.GPT2Config(), "not gpt2"),
        (hf.LlamaConfig(attention_bias=True), "attention_bias"),
        (hf.LlamaConfig(mlp_bias=True), "mlp_bias"),
        (hf.LlamaConfig(hidden_act="gelu"), "activation is gelu"),
        (
            hf.LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "dynamic positions",
        ),
    ],
)
def test_what_isnt_built_like_llama_is_refused(config, says):
    with pytest.raises(RequestError, match=says):
        Shape.of(config)


@pytest.mark.parametrize(
    ("shape", "tp", "pp", "says"),
    [
        (ONE_GROUP, 2, 1, "tensor_parallel_size 2 does not divide the model's num_key_value_heads 1"),
        (ONE_GROUP, 4, 1, "num_key_value_heads 1"),
        (SHAPES["llama"], 1, 3, "pipeline_parallel_size 3 does not divide the model's num_hidden_layers 4"),
    ],
)
def test_what_cant_be_cut_is_refused(shape, tp, pp, says):
    with pytest.raises(RequestError, match=says):
        shape.check(tp, pp)
