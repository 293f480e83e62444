"""G21: a run resumed at any step, epoch ends included, equals the run that was never stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer.conftest import config, tiny, warm  # noqa: F401  (fixtures)
from tests.trainer.test_run import PPO, same
from verl.trainer.base import Run


def lap_rows(folder: Path) -> dict[int, list[str]]:
    rows: dict[int, list[str]] = {}
    for line in (folder / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        rows.setdefault(sample["step"], []).append(sample["row_id"] + sample["prompt"] + str(sample["response_ids"]))
    return rows


def go(cfg, until=None):
    """Train; ``until`` stops after that many steps without a word, as a killed process would."""
    with Run(cfg, console=False) as r:
        r.prepare(r.store.load() if r.store.latest() is not None else None)
        while r.controller.step < (until or r.total_steps):
            r.step()
        if until is None:
            r.save()
        return r.controller.step, {n: t.detach().clone() for n, t in r.controller.workers.actor.engine.shards()}


SGD = {"optimizer": {"name": "sgd", "lr": 0.1}}  # an optimizer without state


@pytest.mark.parametrize(
    "keys",
    [{}, {"actor_model_config": SGD}, PPO | {"kl_target": 0.1, "init_kl_coef": 0.1}],
    ids=["grpo", "sgd", "ppo"],
)
def test_resume_from_every_step(config, tiny, tmp_path, keys):  # noqa: F811
    """8 prompts, 4 per lap, 2 epochs: 4 steps; the epoch ends after step 2."""
    if "actor_model_config" in keys:
        keys = {"actor_model_config": SGD | {"model_name_or_path": tiny, "dtype": "fp32"}}
    every = {"checkpoint": {"every_steps": 1, "keep": 9}, "total_steps": None, "total_epochs": 2.0}
    sizes = {"rollout_batch_size": 4 * keys.get("group_size", 4), "micro_batch_size": 4}
    whole_cfg = config(**keys, **every, **sizes, run_dir=str(tmp_path / "whole"))
    steps, whole = go(whole_cfg)
    assert steps == 4
    rows = lap_rows(tmp_path / "whole")
    assert len({r.split("@")[0] for s in (1, 2) for r in rows[s]}) == 8  # every prompt once per epoch
    for stop in (1, 2, 3):
        folder = tmp_path / str(stop)
        cfg = config(**keys, **every, **sizes, run_dir=str(folder))
        go(cfg, until=stop)
        steps, resumed = go(cfg)
        assert steps == 4
        same(whole, resumed)  # bit for bit
        assert lap_rows(folder) == rows
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3, 4]
