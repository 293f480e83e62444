"""Runs that go wrong: skipped steps end them with the rows in a file, and what metrics show is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from tests.trainer.conftest import PROMPTS
from verl.checkpoint.store import CheckpointStore
from verl.cli.main import main
from verl.config.errors import RunError
from verl.trainer.base import Run
from verl.trainer.health import SkippedSteps

# Laps 1 and 2 have four prompts that are fine, laps 3 and 4 four whose gradient overflows.
OVERFLOWS = {
    "algorithm": {"name": "rloo"}, "reward_fn": "tests.trainer.huge_reward:huge", "rollout_batch_size": 8,
    "shuffle": False, "dataset": sorted(PROMPTS, key=lambda row: row["prompt"] in ("ba", "bc", "ca", "us")),
}  # fmt: skip


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_whose_steps_are_all_skipped_stops_with_status_1(tiny, tmp_path, capsys, monkeypatch):
    folder, file = tmp_path / "run", tmp_path / "train.yaml"
    keys = OVERFLOWS | {
        "actor_model_config": {"model_name_or_path": tiny, "dtype": "fp32", "optimizer": {"lr": 1e-3}},
        "group_size": 4, "max_prompt_length": 16, "max_response_length": 6, "total_steps": 6, "run_dir": str(folder),
        "checkpoint": {"every_steps": 1}, "metrics": {"tensorboard": False, "max_bad_steps": 2},
    }  # fmt: skip
    file.write_text(yaml.safe_dump(keys))
    monkeypatch.setattr(sys, "argv", ["verl", "train", str(file)])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    assert stop.value.code == 1 and "Traceback" not in out + err
    last = CheckpointStore(folder / "checkpoints", 2).load()
    for words in ("step 4: 2 optimizer steps of the actor", str(folder / "bad_rows.jsonl"), str(last.path)):
        assert words in err

    rows = lines(folder / "bad_rows.jsonl")
    assert [row["prompt"] for row in rows] == ["<bos>u:ca\na:"] * 4 + ["<bos>u:us\na:"] * 4
    shown = {row["row_id"]: row for row in lines(folder / "samples.jsonl") if row["step"] == 4}
    for row in rows:
        assert row["step"] == 4 and row["reward"] == row["rewards"]["huge"] and 1 <= row["length"] <= 6
        assert len(row["response_ids"]) == row["length"] and row["reward"] == 1e300 * row["response_ids"][0]
    for row_id, sample in shown.items():
        (row,) = [row for row in rows if row["row_id"] == row_id]
        assert all(row[key] == sample[key] for key in ("prompt", "response", "response_ids", "reward"))
    assert len(shown) == 4

    told = (folder / "logs" / "controller.log").read_text()
    assert told.count("policy/bad_steps, this step: 1 of the actor's optimizer steps") == 1
    assert "WARNING verl.trainer.base: step 3: policy/bad_steps" in told and "step 3: policy/bad_steps" in out
    metrics = lines(folder / "metrics.jsonl")
    assert [line["health/warnings"] for line in metrics] == [0, 0, 1, 1]
    assert [line["policy/bad_steps"] for line in metrics] == [0, 0, 1, 1]
    assert last.step == 2  # nothing was saved since
    assert all(tensor.isfinite().all() for tensor in last.tensors("actor").values())


def test_skipped_steps_count_over_a_resume(config, tiny, caplog):
    """Rows of the data set, and a learning rate that leaves weights with which no logarithm is a number; with an alarm
    that comes while a step lasts."""
    keys = {
        "algorithm": {"name": "dpo"}, "train_batch_size": 4, "shuffle": False,
        "actor_model_config": {"model_name_or_path": tiny, "dtype": "fp32", "optimizer": {"lr": 1e30}},
        "dataset": [{"prompt": p["prompt"], "chosen": "abc", "rejected": "ca"} for p in PROMPTS],
        "metrics": {"tensorboard": False, "max_bad_steps": 4, "alarms": {"time/step": 1e-3}},
        **dict.fromkeys(("reward_fn", "rollout_batch_size", "group_size")),
    }  # fmt: skip
    with Run(config(**keys, total_steps=3), console=False) as run:
        run.prepare()
        run.train()
        assert not (run.folder / "bad_rows.jsonl").exists()
    with Run(config(**keys, total_steps=9), console=False) as run:
        run.prepare(run.store.load(), allow_changes=True)
        with pytest.raises(RunError, match="step 5: 4 optimizer steps of the actor in a row were skipped"):
            run.train()
    assert [(row["row_id"], row["side"], row["response"]) for row in lines(run.folder / "bad_rows.jsonl")] == [
        ("0", "chosen", "abc\n"), ("0", "rejected", "ca\n"), ("1", "chosen", "abc\n"), ("1", "rejected", "ca\n"),
    ]  # fmt: skip
    metrics = lines(run.folder / "metrics.jsonl")
    assert [line["health/warnings"] for line in metrics] == [0, 1, 1, 1, 1]
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text[:30] for text in told if "bad_steps" in text] == ["step 2: policy/bad_steps, this"]
    late = [text for text in told if "time/step" in text]
    assert ["goes on" in text for text in late] == [True, False] * 5 and "above its limit" in late[1]


def lap(family: str, bad: float, grad_norm: float | None) -> dict:
    return {f"{family}/bad_steps": bad, f"{family}/grad_norm": grad_norm}


@pytest.mark.parametrize("family", ["critic", "process_reward"])
def test_skipped_steps_are_counted_until_one_is_made(family: str):
    count = SkippedSteps()
    counts = []
    for told in [(2, 0.0), (0, 0.0), (1, 0.0), (3, 0.5), (0, 0.0), (4, 0.0)]:  # the second lap had nothing to learn
        count.see(lap(family, *told) | lap("policy", 0, 1.0))
        counts.append(count.by_role[family])
    assert counts == [2, 2, 3, 0, 0, 4] and count.by_role["actor"] == 0
