"""``engine: megatron``: what it trains, over which devices, and what is refused."""

from __future__ import annotations

import pytest

from tests.config.samples import load, refusal
from verl.config.model import ModelConfig
from verl.layout import Layout
from verl.runtime.load import layout_of


def keys(devices: list[int] | None = None, *, section: str = "actor", axes: dict | None = None, **more) -> dict:
    model = {"model_name_or_path": "some/policy", "engine": "megatron", "fsdp_config": axes or {}} | more
    values: dict = {f"{section}_model_config": model, "device_map": {"actor": devices or [0, 1]}}
    return values


def test_axes_make_the_layout():
    cfg = load(**keys([0, 1, 2, 3], axes={"tensor_parallel_size": 2, "pipeline_parallel_size": 2}))
    model: ModelConfig = cfg.actor_model_config
    assert layout_of(model.fsdp_config, 4) == Layout(pp=2, tp=2) and layout_of(model.fsdp_config, 8).dp == 2


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (keys([0]), "the actor has 1 device; actor_model_config.engine fsdp or device_map.actor [0, 1] would fit"),
        (keys(use_lora=True), "use_lora isn't for it; actor_model_config.use_lora false or actor_model_config.engine"),
        (keys(optimizer="muon"), "actor_model_config.optimizer adamw or sgd or actor_model_config.engine fsdp"),
        (
            keys(axes={"pipeline_parallel_size": 2}, engine="fsdp"),
            "pipeline_parallel_size is 2, but actor_model_config.engine is fsdp, which has no stages",
        ),
        (
            keys(axes={"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
            "pipeline_parallel_size is 2, but the actor has 2 devices: times tensor_parallel_size 2 it must divide",
        ),
        (
            keys() | {"algorithm": "ppo", "critic_model_config": {"engine": "megatron"}},
            "critic_model_config.engine is megatron, which trains policies, not value models; fsdp would fit",
        ),
        (
            keys() | {"algorithm": "ppo", "critic_model_config": {"shares": "actor"}},
            "Megatron's actor gives a value head no hidden states",
        ),
    ],
)
def test_what_is_refused(values, says):
    assert says in refusal(**values)
