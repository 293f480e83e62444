"""A live source in whole runs: what arrives between laps is in the next lap."""

from __future__ import annotations

import json
import signal
import threading
import urllib.request

import pytest

from tests import tiny
from tests.trainer.brief import brief_llama
from verl.config.load import load_config
from verl.trainer.base import Run


@pytest.fixture
def keys(tmp_path):
    model = tiny.save(tmp_path / "model", brief_llama(), tiny.f_bpe(template="plain"))
    return {
        "actor_model_config": {"model_name_or_path": model, "dtype": "fp32"},
        "dataset": {"name": "live", "path": str(tmp_path / "events.jsonl"), "port": 0},
        "max_prompt_length": 16, "max_response_length": 4, "micro_batch_size": 4, "total_steps": 3,
        "run_dir": str(tmp_path / "run"), "metrics": {"tensorboard": False},
    }  # fmt: skip


def post(address, rows):
    request = urllib.request.Request(address, json.dumps(rows).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status < 300


def asked(run):
    """The prompts of the next lap."""
    return {row.draw.prompt.fields["prompt"] for row in run.step().collected.rows}


def test_posted_prompts_are_sampled_in_the_next_lap(keys, tmp_path):
    (tmp_path / "events.jsonl").write_text('{"prompt": "xa"}\n{"prompt": "ab"}\n')
    rl = {"reward_fn": "tests.trainer.reward:low_ids", "rollout_batch_size": 8, "group_size": 4}
    with Run(load_config(None, algorithm={"name": "grpo"}, **keys, **rl), console=False) as run:
        run.prepare()
        assert asked(run) == {"xa", "ab"}
        post(run.feed.address, [{"prompt": "bc"}, {"prompt": "cs"}])
        assert asked(run) == {"bc", "cs"}


def test_a_signal_ends_the_wait_for_rows_and_nothing_is_lost(keys, tmp_path):
    """The lap that waits had drawn a prompt; after the resume it is drawn again."""
    (tmp_path / "events.jsonl").write_text('{"prompt": "xa"}\n{"prompt": "ab"}\n{"prompt": "bc"}\n')
    rl = {"reward_fn": "tests.trainer.reward:low_ids", "rollout_batch_size": 4, "train_batch_size": 8, "group_size": 4}
    keys["dataset"] = {"name": "live", "path": str(tmp_path / "events.jsonl"), "when_empty": "wait"}
    cfg = load_config(None, algorithm={"name": "grpo"}, **keys, **rl)
    with Run(cfg, console=False) as run:
        run.prepare()
        take, waits = run.feed.take, []

        def waiting(k):
            if run.controller.step == 1 and len(waits) == 1:
                threading.Timer(0.2, run._on_signal, (signal.SIGTERM,)).start()
            waits.append(k) if run.controller.step == 1 else None
            return take(k)

        run.feed.take = waiting
        summary = run.train()
        assert summary.stopped_by is signal.SIGTERM and summary.step == 1 and len(waits) == 2
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"prompt": "cs"}\n')
    with Run(cfg, console=False) as run:
        run.prepare(run.store.load())
        assert asked(run) == {"bc", "cs"} and run.controller.step == 2


def test_clicks_train_kto_as_they_come(keys, tmp_path):
    clicks = [{"prompt": p, "response": r, "label": i % 2 == 0} for i, (p, r) in enumerate([("xa", "b"), ("ab", "c")])]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(c) + "\n" for c in clicks))
    with Run(
        load_config(None, algorithm={"name": "kto"}, **keys | {"train_batch_size": 2, "micro_batch_size": 2}),
        console=False,
    ) as run:
        run.prepare()
        first = run.step().metrics
        post(
            run.feed.address,
            [{"prompt": "ca", "response": "u", "label": True}, {"prompt": "s", "response": "t", "label": 1}],
        )
        second = run.step().metrics
    assert "preference/undesirable_reward" in first and "preference/undesirable_reward" not in second
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 4
