"""Whole runs in which Megatron trains the actor over two workers: the numbers of one process."""

from __future__ import annotations

import pytest

from tests.trainer.cluster_runs import finished, lines, ppo, same_lines, same_numbers, same_weights, small, train
from verl.config.load import load_config


def spread(model, **axes):
    section = {"model_name_or_path": model, "dtype": "fp32", "optimizer": {"lr": 1e-3}, "engine": "megatron"}
    return {"device_map": {"actor": "cpu:0-1"}, "actor_model_config": section | {"fsdp_config": axes}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    model = small(folder / "small")
    return model, finished(model, folder / "one", total_steps=2)


def quiet(folder):
    """Megatron tells the workers' logs of nothing, and there is one of each."""
    logs = [log.read_text() for log in (folder / "logs").glob("worker_*.log")]
    return len(logs) == 2 and all("starts" in log and "WARNING" not in log for log in logs)


@pytest.mark.parametrize("axes", [{"pipeline_parallel_size": 2}, {}], ids=["stages", "data"])
def test_two_workers_give_the_numbers_of_one_process(alone, tmp_path, capfd, axes):
    model, one = alone
    both = finished(model, tmp_path / "two", total_steps=2, **spread(model, **axes))
    same_numbers(both, one)
    same_weights(both, one)
    assert lines(both)[-1]["kl/mean"] > 1e-3
    assert quiet(both) and capfd.readouterr() == ("", "")


def test_what_the_optimizers_parts_saved_goes_on_in_one_process(alone, tmp_path):
    model, one = alone
    first = ppo(model, tmp_path, total_steps=1)
    train(load_config(None, **first | spread(model)))
    both = train(load_config(None, **first | {"total_steps": 2}), resume=True)
    same_lines(lines(both)[1:], lines(one)[1:])
    same_weights(both, one)


def test_a_run_goes_on_with_the_other_engine(alone, tmp_path):
    """A lap by FSDP in one process, one by Megatron on two workers, each with a half of every layer: as two laps."""
    model, one = alone
    first = ppo(model, tmp_path, total_steps=1)
    train(load_config(None, **first))
    half = spread(model, tensor_parallel_size=2) | {"hybrid_engine": False, "total_steps": 2}
    both = train(load_config(None, **first | half), resume=True)
    same_lines(lines(both)[1:], lines(one)[1:])
    same_weights(both, one)
    assert quiet(both)
