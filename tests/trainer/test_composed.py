"""All of it in one run: shards, adapters, a critic apart, a reward model as a service, a kill, and a resume."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.rewards.test_model import deberta, word_tokenizer
from tests.tiny import save
from tests.trainer import cluster_runs as runs
from tests.trainer.cluster_runs import Struck, finished, lines, same_numbers, same_weights
from verl.cluster.group import WorkerLost
from verl.config.load import load_config

ROOT = Path(__file__).parents[2]
APART = {"device_map": {"actor": "cpu:0-1", "critic": "cpu:2-3"}}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[str]:
    """The address of a process that scores with a reward model of its own."""
    judge = save(tmp_path / "judge", deberta(), word_tokenizer())
    (tmp_path / "rewards.yaml").write_text(yaml.safe_dump({"reward_model_config": {"model_name_or_path": judge}}))
    command = [sys.executable, str(ROOT / "examples" / "reward_server.py"), str(tmp_path / "rewards.yaml")]
    server = subprocess.Popen([*command, "--port", "0", "--device", "cpu"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None
    yield server.stdout.readline().split()[-1]
    server.kill()
    server.wait()


def test_a_run_of_everything_that_is_killed_goes_on(tmp_path: Path, service: str):
    model = runs.small(tmp_path / "small")
    actor = {"model_name_or_path": model, "dtype": "fp32", "use_lora": True, "lora_r": 4, "optimizer": {"lr": 2e-3}}
    keys = {
        "actor_model_config": actor, "reward_fn": [{"name": "http", "url": service}], "micro_batch_size": 4,
        "max_tokens_per_micro_batch": 40, "checkpoint": {"every_steps": 2}, "eval": {}, "log_level": "DEBUG",
    }  # fmt: skip
    whole = finished(model, tmp_path / "whole", **keys)
    told = lines(whole)
    assert len({line["reward/mean"] for line in told}) > 3 and told[-1]["kl/mean"] > 0
    cfg = load_config(None, **runs.ppo(model, tmp_path / "struck", **keys | APART))
    with Struck(cfg, 4, "updating") as run:
        run.prepare()
        with pytest.raises(WorkerLost, match=r"^step 4, .*SIGKILL"):
            run.train()
    assert [line["step"] for line in lines(run.folder)] == [1, 2, 3]
    folder = runs.train(cfg, resume=True)
    same_numbers(folder, whole)
    same_weights(folder, whole)
