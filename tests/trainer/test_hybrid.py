"""Weights on their way to rollouts in whole runs: how many bytes, how often, how old rows may be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer import cluster_runs as runs
from tests.trainer.cluster_runs import finished, lines, same_lines, same_weights, timeline
from verl.config.errors import ConfigError, RunError
from verl.config.load import load_config
from verl.models.naming import own_tensors
from verl.runtime.controller import Controller
from verl.trainer.base import Run

SHARED = {"device_map": {"actor": "cpu:0-1"}}
APART = {"device_map": {"actor": "cpu:0", "rollout": "cpu:1"}}
GRPO = {
    "critic_model_config": None, "algorithm": {"name": "grpo"}, "group_size": 4, "init_kl_coef": 0.0, "eval": {},
    "mini_batch_size": 16, "log_level": "INFO",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def size(model: str) -> int:
    """Bytes of the model."""
    return sum(t.nbytes for _, t in own_tensors(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)))


def test_sharded_actors_send_each_other_what_they_lack(model: str, size: int, tmp_path: Path):
    """Two ranks, each with half of the weights and a rollout: half of a model to each. The plain way sends no less and
    gives the same run; both sample from the newest weights."""
    keys = GRPO | SHARED | {"total_steps": 3}
    ours = finished(model, tmp_path / "ours", **keys, hybrid_config={"incremental": False})
    plain = finished(model, tmp_path / "plain", **keys, hybrid_engine=False)
    same_lines(lines(ours), lines(plain))
    same_weights(ours, plain)
    for line in lines(ours):
        assert size <= line["publish/bytes"] <= size + 16 * 2 * 40  # each message is padded
        assert line["rollout/logprob_diff_max"] < 1e-5 and line["columns/bytes"] > 0
    assert all(line["publish/bytes"] >= size for line in lines(plain))


def test_a_small_step_is_a_small_publish(model: str, size: int, tmp_path: Path):
    """In bf16 most weights stay as they are at a low learning rate; what changed is sent, to the bit."""
    actor = {"model_name_or_path": model, "dtype": "bf16", "optimizer": {"lr": 1e-6}}
    keys = GRPO | SHARED | {"actor_model_config": actor, "total_steps": 3}
    ours = finished(model, tmp_path / "ours", **keys)
    plain = finished(model, tmp_path / "plain", **keys, hybrid_engine=False)
    same_lines(lines(ours), lines(plain))
    for line in lines(ours):
        assert 0 < line["publish/changed"] < 0.05 and line["publish/bytes"] < size / 2 / 4


def test_the_plain_way_from_sharded_actors_to_a_rollout_apart(model: str, tmp_path: Path):
    """Ranks that read parts of the files have the tensors in another order than one that reads all of them."""
    keys = GRPO | {"device_map": {"actor": "cpu:0-1", "rollout": "cpu:2"}, "total_steps": 2}
    ours = finished(model, tmp_path / "ours", **keys)
    plain = finished(model, tmp_path / "plain", **keys, hybrid_engine=False)
    same_lines(lines(ours), lines(plain))
    same_weights(ours, plain)


def test_adapters_alone_are_sent(model: str, size: int, tmp_path: Path):
    actor = {"model_name_or_path": model, "dtype": "fp32", "optimizer": {"lr": 1e-2}, "use_lora": True, "lora_r": 2}
    folder = finished(model, tmp_path, **GRPO | APART | {"actor_model_config": actor, "total_steps": 3})
    adapter = sum(t.nbytes for t in runs.weights(folder).values())
    for line in lines(folder):
        assert adapter <= line["publish/bytes"] <= 1.3 * adapter < size / 2
        assert line["rollout/logprob_diff_max"] < 1e-5


def test_an_interval_of_laps(model: str, tmp_path: Path):
    """Published after every third lap; rows carry the version that sampled them, and their loss is corrected."""
    keys = GRPO | APART | {"hybrid_config": {"reshard_interval": 3}, "total_steps": 7, "checkpoint": {"every_steps": 4}}
    cfg = load_config(None, **runs.ppo(model, tmp_path, **keys))
    assert cfg.max_staleness == 2 and cfg.algorithm.correction == "tis"
    folder = runs.train(cfg)
    told = lines(folder)
    assert [line["step"] for line in told if line["publish/bytes"]] == [3, 4, 6]  # 4: it is saved
    assert [line["rollout/staleness"] for line in told] == [0, 1, 2, 0, 0, 1, 0]
    versions = {s["step"]: s["version"] for s in lines(folder, "samples.jsonl")}
    assert versions == {1: 0, 2: 0, 3: 0, 4: 3, 5: 4, 6: 4, 7: 6}
    fresh = [line for line in told if not line["rollout/staleness"]]
    stale = [line for line in told if line["rollout/staleness"]]
    assert all(line["rollout/logprob_diff_max"] < 1e-5 for line in fresh)
    assert all(line["rollout/logprob_diff_max"] > 1e-3 for line in stale)
    assert all(abs(line["correction/weight_mean"] - 1) < 1e-5 for line in fresh)
    assert all(abs(line["correction/weight_mean"] - 1) > 1e-4 for line in stale)


def test_one_device_keeps_an_older_copy(model: str, tmp_path: Path):
    """With an interval the trainer's own parameters are too new to sample from."""
    keys = GRPO | {"hybrid_config": {"reshard_interval": 2}, "total_steps": 4}
    folder = finished(model, tmp_path, **keys)
    assert [line["rollout/staleness"] for line in lines(folder)] == [0, 1, 0, 1]
    assert [line["rollout/logprob_diff_max"] > 1e-3 for line in lines(folder)] == [False, True, False, True]


def test_the_next_lap_is_sampled_while_this_one_trains(model: str, tmp_path: Path):
    """``max_staleness: 1``; a run that is stopped and resumed has the numbers of one that goes through."""
    keys = GRPO | APART | {"max_staleness": 1, "total_steps": 4, "checkpoint": {"every_steps": 2}, "log_level": "DEBUG"}
    keys["actor_model_config"] = {"model_name_or_path": runs.deep(tmp_path / "deep"), "dtype": "fp32"}
    through = finished(model, tmp_path / "through", **keys)
    assert [line["rollout/staleness"] for line in lines(through)] == [0, 1, 0, 1]  # 3: after a save
    done = {(ran.name, ran.step): ran for ran in timeline(through)}
    beside = [done["rollout.generate", step + 1].beside(done["actor.update", step]) for step in (1, 3)]
    assert any(beside), done
    cfg = load_config(None, **runs.ppo(model, tmp_path / "again", **keys))
    with Run(cfg, console=False) as run:
        run.prepare()
        run._more = True
        for _ in range(2):
            run.step()
        run._end_save()
    folder = runs.train(cfg, resume=True)
    same_lines(lines(folder), lines(through))
    same_weights(folder, through)


def test_rows_of_other_weights_stop_the_run(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An engine that missed an update."""

    async def forget(self: Controller, step: int) -> dict:
        self.published = step
        return {}

    with Run(load_config(None, **runs.ppo(model, tmp_path, **GRPO | {"total_steps": 3})), console=False) as run:
        run.prepare()
        monkeypatch.setattr(Controller, "_publish", forget)
        run.step()
        with pytest.raises(RunError, match=r"step 2, collecting: worker 0 sampled .* version 0; version 1 was publ"):
            run.step()


def test_a_staleness_below_the_interval_s_is_refused(model: str, tmp_path: Path):
    keys = GRPO | {"hybrid_config": {"reshard_interval": 8}, "max_staleness": 3}
    with pytest.raises(ConfigError, match=r"max_staleness 7 or hybrid_config\.reshard_interval 4 would fit"):
        load_config(None, **runs.ppo(model, tmp_path, **keys))
