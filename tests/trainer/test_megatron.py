"""Whole runs in which Megatron trains the actor over two workers: the numbers of one process."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'verl[megatron]'")

from tests.trainer.cluster_runs import finished, lines, ppo, same_numbers, same_weights, small, train
from verl.config.load import load_config


def spread(model, **axes):
    section = {"model_name_or_path": model, "dtype": "fp32", "optimizer": {"lr": 1e-3}, "engine": "megatron"}
    return {"device_map": {"actor": "cpu:0-1"}, "actor_model_config": section | {"fsdp_config": axes}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    model = small(folder / "small")
    return model, finished(model, folder / "one", total_steps=2)


@pytest.mark.parametrize(
    "keys",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "hybrid_engine": False},
    ],
    ids=str,
)
def test_two_workers_give_the_numbers_of_one(keys, alone, tmp_path):
    model, one = alone
    axes = {name: size for name, size in keys.items() if name != "hybrid_engine"}
    rest = {name: value for name, value in keys.items() if name == "hybrid_engine"}
    both = finished(model, tmp_path / "two", total_steps=2, **spread(model, **axes), **rest)
    same_numbers(both, one)
    same_weights(both, one)
    assert lines(both)[-1]["kl/mean"] > 1e-3 and len(list((both / "logs").glob("worker_*.log"))) == 2


def test_a_run_goes_on_with_the_other_engine(alone, tmp_path):
    """A lap by FSDP in one process, one by Megatron on two workers: the weights of two laps."""
    model, one = alone
    first = ppo(model, tmp_path, total_steps=1)
    train(load_config(None, **first))
    both = train(load_config(None, **first | {"total_steps": 2} | spread(model, tensor_parallel_size=2)), resume=True)
    same_weights(both, one)
