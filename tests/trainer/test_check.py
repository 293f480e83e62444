"""``verl check``: nothing is wrong where nothing is, and faults put in on purpose are found."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import verl.workers.actor
from tests.trainer.test_algorithms import PAIRS, write
from verl.algorithms.reduce import Totals, reduce_loss
from verl.cli.main import main
from verl.config.load import load_config
from verl.config.recipes import RECIPES
from verl.engines.optim import Optimizer
from verl.models.policy import Policy
from verl.rollout.native import NativeEngine
from verl.trainer.check import Finding, check

SPLIT, RESUME = "micro-batches of 1 give the gradient of 4", "a resumed run is the run that went on"
SAMPLER, NEW, START = (
    "sampler and trainer agree",
    "new weights reach the sampler",
    "the reference is the starting policy",
)


@pytest.fixture
def file(tiny: str, tmp_path: Path) -> Any:
    """A configuration of an algorithm in a file: for many rows and steps."""

    def configure(name: str = "grpo", **keys: Any) -> Path:
        base = {
            "actor_model_config": {"model_name_or_path": tiny, "dtype": "fp32"},
            "algorithm": {"name": name},
            "micro_batch_size": 4,
            "train_batch_size": 256,
            "max_prompt_length": 16,
            "max_response_length": 6,
            "total_epochs": 50,
            "run_dir": str(tmp_path / "runs" / "one"),
        }
        if RECIPES[name].samples:
            rewarded = {"reward_fn": "tests.trainer.reward:low_ids"}
            base |= rewarded | {"dataset": [{"prompt": p} for p, *_ in PAIRS], "rollout_batch_size": 128}
        else:
            base["dataset"] = write(tmp_path, RECIPES[name].data)
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(base | keys))
        return path

    return configure


def found(path: Path, *overrides: str) -> dict[str, Finding]:
    """What a lap of eight rows tells."""
    return {finding.what: finding for finding in check(partial(load_config, path, list(overrides)), 8)[1]}


def wrong(findings: dict[str, Finding]) -> set[str]:
    return {what for what, finding in findings.items() if finding.verdict == "wrong"}


@pytest.mark.parametrize("name", ["ppo", "dapo", "online_dpo", "dpo", "kto", "reward_model"])
def test_nothing_is_wrong(file: Any, name: str) -> None:
    findings = found(file(name))
    assert not wrong(findings)
    micro = "2 give the gradient of 4" if name in ("online_dpo", "dpo", "reward_model") else "1 give the gradient of 4"
    names = {f"micro-batches of {micro}", RESUME, "rows of the data", "the gradient reaches what is trained"}
    if RECIPES[name].samples:
        names |= {SAMPLER, NEW, START, "rewards differ", "responses end by themselves"}
    assert names <= findings.keys()
    assert all(findings[what].verdict == "ok" for what in names & {RESUME, START})
    if name != "online_dpo":  # samples with top_p
        assert all(findings[what].verdict == "ok" for what in names & {SAMPLER, NEW})
    assert findings[RESUME].text == "the same to the last bit"


def test_the_command(file: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """A line per finding; the folder that it ran in goes."""
    path = file(actor_model_config={"model_name_or_path": load_config(file()).actor_model_config.model_name_or_path,
                                    "use_lora": True})  # fmt: skip
    monkeypatch.setattr("sys.argv", ["verl", "check", str(path), "--rows", "8", "micro_batch_size=2"])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0, out
    assert out[0] == "grpo on cpu:0: 8 rows a lap, 3 laps, learning rate 0.0001" and out[-1] == "nothing is wrong"
    assert "ok    a resumed run is the run that went on: the same to the last bit" in out
    assert sorted(tmp_path.iterdir()) == before


def test_gradients_are_looked_at_on_several_workers(file: Any) -> None:
    """Each worker saves a part of its own."""
    what = "the gradient reaches what is trained"
    one, two = found(file())[what], found(file(), "device_map.actor=cpu:0-1")[what]
    assert one.verdict == two.verdict == "ok"
    assert one.text.rpartition(", ")[2] == two.text.rpartition(", ")[2] != "all 0 tensors change"


# -- faults, put in ------------------------------------------------------------------------------------------------


def test_a_sampler_that_keeps_old_weights(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = NativeEngine.__init__
    monkeypatch.setattr(
        NativeEngine, "__init__", lambda self, policy, *args, **keys: begin(self, copy.deepcopy(policy), *args, **keys)
    )
    assert wrong(found(file())) == {NEW}


def test_a_temperature_that_the_trainer_ignores(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Policy.forward
    monkeypatch.setattr(Policy, "forward", lambda self, *args: forward(self, *args[:-1], 1.0))
    assert SAMPLER in wrong(found(file(), "rollout.temperature=2.0"))


def test_a_loss_that_is_a_mean_over_the_micro_batch(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def mean(losses: Any, mask: Any, row: Any, n: int, mode: Any, totals: Totals, **more: Any) -> torch.Tensor:
        return reduce_loss(losses, mask, row, n, mode, Totals(int(mask.sum()), n), **more)

    monkeypatch.setattr(verl.workers.actor, "reduce_loss", mean)
    assert wrong(found(file())) == {SPLIT}


def test_an_optimizer_that_forgets(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimizer, "restore", lambda *_: None)
    assert wrong(found(file())) == {RESUME}


def test_rewards_that_say_nothing(file: Any) -> None:
    findings = found(file(reward_fn="tests.trainer.reward:flat"))
    assert findings["rewards differ"].verdict == "look" and not wrong(findings)
    assert findings[NEW].verdict == findings["the gradient reaches what is trained"].verdict == "ok"
