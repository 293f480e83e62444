"""A whole run in which two workers compute each row together, each a part of its tokens: the numbers of one process."""

from __future__ import annotations

from tests.trainer.cluster_runs import finished, lines, same_numbers, same_weights, small


def test_workers_that_share_their_rows_give_the_numbers_of_one(tmp_path):
    model = small(tmp_path / "small")
    spread = {"fsdp_config": {"context_parallel_size": 2}, "optimizer": {"lr": 1e-3}}
    keys = {
        "device_map": {"actor": "cpu:0-1"},
        "actor_model_config": {"model_name_or_path": model, "dtype": "fp32"} | spread,
        "critic_model_config": spread,
    }
    alone = finished(model, tmp_path / "one", total_steps=2)
    both = finished(model, tmp_path / "two", total_steps=2, **keys)
    same_numbers(both, alone)
    same_weights(both, alone)
    assert lines(both)[-1]["kl/mean"] > 1e-3 and len(list((both / "logs").glob("worker_*.log"))) == 2
