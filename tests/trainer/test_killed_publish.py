"""A worker that is killed while weights are on their way: the run ends located, or goes on from its checkpoint."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.trainer import cluster_runs as runs
from tests.trainer import killed_publish
from tests.trainer.cluster_runs import finished, lines, same_numbers, same_weights
from tests.trainer.test_hybrid import GRPO, SHARED
from verl.checkpoint.store import CheckpointStore
from verl.cluster.group import WorkerLost
from verl.config.errors import RunError
from verl.config.load import load_config
from verl.trainer.base import Run

KEYS = GRPO | SHARED | {"total_steps": 5, "checkpoint": {"every_steps": 2}}
LOST = r"worker 1 \(actor\S*.* on cpu:1 of \S+, process {pid}\) .*SIGKILL"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.small(tmp_path_factory.mktemp("small"))


@pytest.fixture(autouse=True)
def _dying_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.runtime.launch.make_host", killed_publish.make_host)


def test_a_worker_killed_between_buckets_ends_the_run(model: str, tmp_path: Path, mark: str):
    """Nothing that has half of the new weights is left to sample, and none of its rows is told."""
    with Run(load_config(None, **runs.ppo(model, tmp_path, **KEYS)), console=False) as run:
        run.prepare()
        with pytest.raises(WorkerLost) as caught:
            run.train()
        pid, when, written, buckets = killed_publish.struck(run.folder).read_text().split()
        assert time.time() - float(when) < 30
        assert 0 < int(written) < int(buckets) - 1
        said = str(caught.value)
        assert re.search(r"^step 4, (actor\.update: )?publish: " + LOST.format(pid=pid), said), said
        with pytest.raises(RunError, match=r"publish 4 failed.*: resume the run|SIGKILL"):
            run.step()
    assert runs.none_left(mark)
    assert [line["step"] for line in lines(run.folder)] == [1, 2, 3]
    assert {sample["version"] for sample in lines(run.folder, "samples.jsonl")} == {0, 1, 2}
    assert CheckpointStore(run.folder / "checkpoints", 2).load().step == 2


def test_it_is_replaced_and_the_run_has_the_same_end(model: str, tmp_path: Path, mark: str):
    whole = tmp_path / "whole"
    whole.mkdir()
    killed_publish.struck(whole / "run").write_text("spared")
    undisturbed = finished(model, whole, **KEYS)
    keys = KEYS | {"cluster": {"max_restarts": 1}}
    with Run(load_config(None, **runs.ppo(model, tmp_path, **keys)), console=False) as run:
        run.prepare()
        assert run.train().step == 5
    pid = killed_publish.struck(run.folder).read_text().split()[0]
    log = (run.folder / "logs" / "controller.log").read_text()
    assert re.search(r"restart 1 of at most 1: step 4, (actor\.update: )?publish: " + LOST.format(pid=pid), log), log
    assert runs.none_left(mark)
    same_weights(run.folder, undisturbed)
    same_numbers(run.folder, undisturbed)
