"""Whole runs on several workers: the numbers of one process, work side by side, and workers that fail."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cluster.ray_starts import why_not
from tests.trainer import cluster_runs as runs
from tests.trainer.cluster_runs import MARK, Struck, finished, lines, same_numbers, same_weights, timeline
from tests.trainer.test_algorithms import PAIRS, write
from verl.checkpoint.store import CheckpointStore
from verl.cli.main import main
from verl.cluster.group import WorkerLost
from verl.config.errors import RunError
from verl.config.load import load_config
from verl.trainer.base import Run

ROOT = Path(__file__).parents[2]
SHARED = {"device_map": {"actor": "cpu:0-1"}}
APART = {"device_map": {"actor": "cpu:0-1", "critic": "cpu:2-3"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def one(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PPO in one process: the numbers that all others must have."""
    return finished(model, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def shared(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All roles on the same two workers, each with a part of every model."""
    return finished(model, tmp_path_factory.mktemp("shared"), **SHARED)


# -- the numbers of one process --------------------------------------------------------------------------------------


def test_two_workers_give_the_numbers_of_one(one, shared):
    same_numbers(shared, one)
    same_weights(shared, one)
    assert [line["step"] for line in lines(shared)] == [1, 2, 3, 4, 5]
    assert lines(one)[-1]["kl/mean"] > 0.01 and [line["step"] for line in lines(one, "eval.jsonl")] == [0, 5]


def test_actor_and_critic_on_two_workers_each_give_the_numbers_of_one(one, model, tmp_path):
    folder = finished(model, tmp_path, **APART)
    same_numbers(folder, one)
    same_weights(folder, one)


def test_four_workers_on_ray_give_the_numbers_of_one_process(one, model, tmp_path, mark):
    """By the command, in a process of its own, which starts a cluster and leaves none behind."""
    if reason := why_not():
        pytest.skip(reason)
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(runs.ppo(model, tmp_path, **APART, cluster={"backend": "ray"})))
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env |= {"RAY_AUTH_TOKEN": secrets.token_hex(32), "PYTHONPATH": str(ROOT), MARK: mark}  # else a token stays at home
    command = ["timeout", "250", sys.executable, "-m", "verl.cli.main", "train", str(file)]
    folder = tmp_path / "run"
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    logs = [file.read_text()[-5000:] for file in folder.glob("logs/worker_*.log")]
    assert ended.returncode == 0, "\n".join((ended.stdout, ended.stderr, *logs))
    same_numbers(folder, one)
    same_weights(folder, one)
    assert len(list((folder / "logs").glob("worker_*.log"))) == 4
    assert runs.none_left(mark)


# -- logs and the timeline -------------------------------------------------------------------------------------------


def test_each_worker_s_log_begins_with_who_it_is(shared):
    for rank in range(2):
        first = (shared / "logs" / f"worker_{rank}.log").read_text().splitlines()[0]
        assert re.search(rf"worker {rank} \((actor.*rollout.*) on cpu(:{rank})? of \S+, process \d+\) starts$", first)


def test_ops_that_share_a_device_take_turns(one, shared):
    for folder in (one, shared):
        by_worker = defaultdict(list)
        for ran in timeline(folder):
            by_worker[ran.worker].append(ran)
        assert len(by_worker) == (1 if folder is one else 2)
        for done in by_worker.values():
            names = {ran.name for ran in done}
            assert {"rollout.generate", "reference.logprobs", "critic.values", "critic.update", "publish"} <= names
            for a, b in pairwise(sorted(done, key=lambda ran: ran.start)):
                assert a.end <= b.start + 1, (a, b)  # clocks are rounded


def test_devices_of_their_own_work_side_by_side(model, tmp_path):
    """Reference and critic compute at once; a slow critic's update and the next lap's sampling do, with weights that
    are up to date."""
    folder = finished(
        model, tmp_path,
        device_map={"actor": "cpu:0", "reference": "cpu:1", "critic": "cpu:2", "reward_model": "cpu:3"},
        critic_model_config={"model_name_or_path": runs.deep(tmp_path / "deep"), "dtype": "fp32"},
        algorithm={"name": "ppo"}, mini_batch_size=16, micro_batch_size=1, total_steps=4, eval={},
    )  # fmt: skip
    done = {(ran.name, ran.step): ran for ran in timeline(folder)}
    workers = {name: ran.worker for (name, _), ran in done.items() if name != "publish"}
    assert workers["critic.values"] == workers["critic.update"] == 1 and workers["reference.logprobs"] == 2
    assert workers["reward.score"] == 3 and workers["rollout.generate"] == workers["actor.update"] == 0
    together = [done["reference.logprobs", step].beside(done["critic.values", step]) for step in range(1, 5)]
    ahead = [done["critic.update", step].beside(done["rollout.generate", step + 1]) for step in range(1, 4)]
    assert sum(together) >= 3 and sum(ahead) >= 2, (together, ahead, sorted(done.items(), key=lambda x: x[1].start))
    samples = lines(folder, "samples.jsonl")
    assert samples and all(sample["version"] == sample["step"] - 1 for sample in samples)


# -- workers that fail -----------------------------------------------------------------------------------------------

LOST = r"worker 1 \(actor\S*.* on cpu:1 of \S+, process {pid}\) .*SIGKILL"


def test_a_worker_killed_while_it_samples_ends_the_run(model, shared, tmp_path, mark):
    """The others' work ends too, the message says where it was, and one process goes on from the checkpoint."""
    keys = SHARED | {"checkpoint": {"every_steps": 2}}
    with Struck(load_config(None, **runs.ppo(model, tmp_path, **keys)), 4, "sampling") as run:
        run.prepare()
        assert len(runs.marked(mark)) >= 2
        with pytest.raises(WorkerLost, match=r"^step 4, .*rollout\.generate: " + LOST.format(pid=r"\d+")) as caught:
            run.train()
        assert time.monotonic() - run.struck < 30
    assert f"process {run.pid})" in str(caught.value)
    assert runs.none_left(mark)
    assert CheckpointStore(run.folder / "checkpoints", 2).load().step == 2
    assert [line["step"] for line in lines(run.folder)] == [1, 2, 3]
    alone = load_config(None, **runs.ppo(model, tmp_path, checkpoint={"every_steps": 2}))
    folder = runs.train(alone, resume=True)
    same_weights(folder, shared)
    same_numbers(folder, shared)


def test_a_worker_killed_while_it_updates_is_replaced(model, shared, tmp_path, mark):
    """The run goes on from the last checkpoint to the same end, and each step is told once."""
    keys = SHARED | {"checkpoint": {"every_steps": 2}, "cluster": {"max_restarts": 1}}
    with Struck(load_config(None, **runs.ppo(model, tmp_path, **keys)), 4, "updating") as run:
        run.prepare()
        summary = run.train()
        pids = [place.pid for place in run.controller.crew.group.places]
    assert summary.step == 5 and run.struck and run.pid not in pids
    log = (run.folder / "logs" / "controller.log").read_text()
    said = r"restart 1 of at most 1: step 4, ((actor|critic)\.update|release): " + LOST.format(pid=run.pid)
    assert re.search(said, log), log
    assert runs.none_left(mark)
    same_weights(run.folder, shared)
    same_numbers(run.folder, shared)


def test_a_worker_that_raises_and_one_that_stands_still(model, tmp_path, mark):
    gate = tmp_path / "gate"
    keys = {"reward_fn": "tests.trainer.cluster_reward:picky", "eval": {}, "cluster": {"heartbeat_seconds": 5}}
    with Run(load_config(None, **runs.ppo(model, tmp_path, **SHARED, **keys)), console=False) as run:
        run.prepare()
        gate.touch()
        where = r"^step 1, reward\.score on cpu \(worker [01]\): "
        with pytest.raises(RunError, match=where + r".*picky.*row \d+ \(.+\).*no grade for bc") as caught:
            run.step()
        assert not isinstance(caught.value, WorkerLost) and re.search(r"Prompt \S+ ?'<bos>u:bc", str(caught.value))
        gate.unlink()
        place = run.controller.crew.group.places[1]
        os.kill(place.pid, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(WorkerLost, match=rf"^step 1, .*worker 1 .*process {place.pid}\) has not answered for 5 s"):
            run.step()
        assert time.monotonic() - start < 15
    assert runs.none_left(mark)


def test_workers_that_read_other_rows_say_so(model, tmp_path):
    """The file is another by the time that a worker reads it, or on its machine."""
    keys = runs.ppo(model, tmp_path, **SHARED, eval={})
    path, rows = tmp_path / "rows.jsonl", [json.dumps(row) + "\n" for row in keys["dataset"]]
    path.write_text("".join(rows))
    with Run(load_config(None, **keys | {"dataset": str(path)}), console=False) as run:
        run.prepare()
        path.write_text("".join(rows[::-1]))
        with pytest.raises(RunError, match=r"rows \d+, .* of the training data are others here than where the run was"):
            run.step()


# -- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def verl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The command, which must succeed; what it printed."""

    def command(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["verl", *args])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        assert stop.value.code == 0, out + err
        return out

    return command


def test_a_sharded_run_with_adapters_resumes_on_one_worker(model, tmp_path, verl):
    """Adapters on the actor, a full critic, both sharded over the same two workers, packed by a token budget."""
    actor = {
        "model_name_or_path": model, "dtype": "fp32", "use_lora": True, "lora_r": 4, "optimizer": {"lr": 2e-3},
        "fsdp_config": {"sharding_strategy": "FULL_SHARD"},
    }  # fmt: skip
    keys = runs.ppo(model, tmp_path, actor_model_config=actor, max_tokens_per_micro_batch=48, total_steps=4)
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(keys | SHARED))
    out = verl("train", str(file), "total_steps=2")
    assert "2 workers" in out or "2 workers" in (tmp_path / "run" / "logs" / "controller.log").read_text()
    run = str(tmp_path / "run")
    verl("resume", run, "total_steps=4", "device_map.actor=cpu")
    whole = runs.train(load_config(None, **keys | {"run_dir": str(tmp_path / "whole")}))
    assert lines(whole)[-1]["kl/mean"] > 1e-4
    steps = [[line for line in lines(folder) if line["step"]] for folder in (Path(run), whole)]
    assert [[line["step"] for line in part] for part in steps] == [[1, 2, 3, 4]] * 2
    same_weights(Path(run), whole)
    runs.same_lines(lines(Path(run)), lines(whole), but=("eval/",))  # the first part evaluated at its end, too
    runs.same_lines(*([lines(folder, "eval.jsonl")[-1]] for folder in (Path(run), whole)))
    verl("export", run, str(tmp_path / "out"))
    verl("export", str(whole), str(tmp_path / "out_whole"))
    merged, expected = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "out_whole"))
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("xa", return_tensors="pt").input_ids
    start = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(merged(ids).logits, start(ids).logits, atol=1e-2)


# -- every algorithm's columns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dpo", "kto", "sft", "reward_model"])
def test_two_workers_train_on_a_data_set_s_rows_as_one(model, tmp_path, name):
    kind = {"dpo": "pairs", "reward_model": "pairs", "kto": "labelled", "sft": "chats"}[name]
    data = write(tmp_path, kind)
    keys = {
        "actor_model_config": {"model_name_or_path": model, "dtype": "fp32", "optimizer": {"lr": 1e-3}},
        "algorithm": {"name": name}, "dataset": data, "eval": {"dataset": data}, "train_batch_size": 8,
        "micro_batch_size": 2, "max_prompt_length": 16, "max_response_length": 8, "total_steps": 2,
        "metrics": {"tensorboard": False},
    }  # fmt: skip
    alone, both = (
        runs.train(load_config(None, **(keys | more), run_dir=str(tmp_path / folder)))
        for folder, more in (("one", {}), ("two", SHARED))
    )
    same_numbers(both, alone)
    same_weights(both, alone)
    before, after = (line["eval/loss"] for line in lines(both, "eval.jsonl"))
    assert after < before and len(PAIRS) == 6


SAMPLED = {
    "grpo": {
        "algorithm": {"name": "grpo", "dynamic_sampling": True, "max_refills": 50},
        "reward_fn": "tests.trainer.reward:first_low",
    },
    "online_dpo": {},
    "prime": {"rollout_batch_size": 4, "train_batch_size": 8},  # one prompt per rollout: a worker has none to answer
    "remax": {"group_size": 1},
    "ppo": {"group_size": 1, "critic_model_config": {"shares": "actor"}, "rollout_batch_size": 8},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_two_workers_sample_and_train_as_one(model, tmp_path, name):
    """Each holds a whole actor and samples with its parameters. PPO's is cut in two, which its critic's backbone is."""
    actor = {"model_name_or_path": model, "dtype": "fp32", "optimizer": {"lr": 1e-3}}
    spread = {"tensor_parallel_size": 2} if name == "ppo" else {"sharding_strategy": "NO_SHARD"}
    keys = {
        "actor_model_config": actor, "algorithm": {"name": name}, "dataset": runs.PROMPTS, "group_size": 4,
        "reward_fn": "tests.trainer.reward:low_ids", "rollout_batch_size": 16, "micro_batch_size": 2,
        "max_prompt_length": 16, "max_response_length": 6, "total_steps": 2, "metrics": {"tensorboard": False},
        "checkpoint": {"every_steps": 1},
    }  # fmt: skip
    keys |= SAMPLED[name]
    apart = SHARED | {"actor_model_config": actor | {"fsdp_config": spread}}
    alone, both = (
        runs.train(load_config(None, **(keys | more | {"run_dir": str(tmp_path / folder)})))
        for folder, more in (("one", {}), ("two", apart))
    )
    same_numbers(both, alone)
    same_weights(both, alone)
    same_weights(both, alone, step=1)  # written while the second lap changed them
    if name == "grpo":
        assert any(line["rollout/refills"] for line in lines(both))
    if name == "remax":
        assert lines(both)[0]["reward/greedy_mean"] is not None
