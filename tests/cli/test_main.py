"""The ``verl`` command as its user meets it: exit status, messages, what lies in the run directory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.forks import FORKS, Descriptor
from tests.tiny import f_bpe, f_gpt2, f_llama, save
from verl.checkpoint.tensorfile import read_tensors
from verl.cli.main import main
from verl.config.load import load_config

ROOT = Path(__file__).parents[2]
REWARDS = """
import time
def low(response_ids): return sum(i < 16 for i in response_ids) / len(response_ids)
def slow(response_ids): time.sleep(0.02); return low(response_ids)
def broken(response): raise ValueError("no such thing")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"), f_llama(), f_bpe(template="bos"))


@pytest.fixture
def place(tmp_path, monkeypatch, model):
    """A folder of a user's own: rewards, data, ``train.yaml``; the current one."""
    return _place(tmp_path, model, monkeypatch)


def _place(folder: Path, model: str, monkeypatch: pytest.MonkeyPatch, **keys: object) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("VERL_DEBUG", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    (folder / "my_rewards.py").write_text(REWARDS)
    rows = [{"prompt": p, "answer": p[-1]} for p in ("xa", "xb", "xc", "ab", "ba", "bc", "ca", "us")]
    for name, part in (("train", rows[:6]), ("test", rows[6:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    config = {
        "actor_model_config": {"model_name_or_path": model, "dtype": "fp32", "optimizer": {"lr": 1e-3}},
        "dataset": "train.jsonl",
        "reward_fn": "my_rewards:low",
        "algorithm": {"name": "grpo"},
        "rollout_batch_size": 8,
        "group_size": 4,
        "max_prompt_length": 16,
        "max_response_length": 6,
        "total_steps": 2,
        "run_dir": "run",
        "metrics": {"tensorboard": False},
    }
    (folder / "train.yaml").write_text(yaml.safe_dump(config | keys))
    return folder


def _start(*args: str) -> subprocess.Popen:
    """The real command in a process group of its own, as a shell starts it in the foreground: there SIGINT counts,
    whereas a test run in a shell's background inherits it ignored."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen(
        [sys.executable, "-m", "verl.cli.main", *args],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


class Forked:
    """The command in a process group of its own, forked with all imports done; what a test asks of ``Popen``."""

    def __init__(self, *args: str) -> None:
        self._said = [tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")]  # noqa: SIM115
        outputs = [Descriptor(file.fileno()) for file in self._said]
        self._process = FORKS.Process(target=_command, args=(args, os.getcwd(), outputs))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)

    def communicate(self, timeout: float | None = None) -> list[str]:
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
        for file in self._said:
            file.seek(0)
        return [file.read() for file in self._said]

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _command(args: tuple[str, ...], folder: str, outputs: list[int]) -> None:
    os.setsid()
    os.chdir(folder)
    for number, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["verl", *args]
    main()


def _finish(process: subprocess.Popen | Forked) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def _wait_for(path: Path, process: subprocess.Popen | Forked) -> None:
    deadline = time.monotonic() + 200
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


@pytest.fixture
def verl(capsys, monkeypatch):
    """The command in this process: (exit status, stdout, stderr)."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["verl", *args])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return run


def _refused(result: tuple[int, str, str], *words: str, status: int = 2) -> None:
    code, _, err = result
    assert code == status, result
    assert "Traceback" not in err
    assert all(word in err for word in words), err


def _steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


# -- requests that are refused before anything loads -----------------------------------------------------------------


def test_dry_run_prints_yaml_that_loads_back_and_the_rows_per_step(place, verl):
    code, out, _ = verl("train", "train.yaml", "--dry-run")
    assert code == 0
    (place / "again.yaml").write_text(out)
    assert load_config("again.yaml") == load_config("train.yaml")
    assert "rows" in "".join(line for line in out.splitlines() if line.startswith("#"))
    assert not (place / "run").exists()


def test_wrong_settings_are_named_all_at_once(place, verl):
    _refused(verl("train", "train.yaml", "rolout_batch_size=8"), "rolout_batch_size", "rollout_batch_size?")
    wrong = verl("train", "train.yaml", "group_size=3", "total_steps=0", "algorithm.clip_rato=1")
    _refused(wrong, "3 settings are wrong", "group_size", "total_steps", "algorithm.clip_rato")
    _refused(verl("train", "nowhere.yaml"), "nowhere.yaml", "no such file")
    _refused(verl("train", "train.yaml", "seed"), "key=value")


def test_a_config_error_comes_before_torch_is_imported(place):
    process = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "verl.cli.main", "train", "train.yaml", "seed=-1"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2
    assert "seed" in process.stderr
    assert not any(line.endswith(("| torch", "| transformers")) for line in process.stderr.splitlines())


def test_words_that_are_no_command(place, verl):
    assert verl("trian", "train.yaml")[0] == 2
    assert verl("train")[0] == 2
    code, out, _ = verl("--help")
    assert code == 0 and "resume" in out


@pytest.mark.parametrize("ends", [EOFError("of x"), SystemExit(0), SystemExit(None)])
def test_what_ends_a_command_from_within_is_a_failure(place, verl, monkeypatch, ends):
    def load(*_, **__):
        raise ends

    monkeypatch.setattr("verl.config.load.load_config", load)
    _refused(verl("train", "train.yaml"), type(ends).__name__, status=1)


# -- requests that are refused while loading -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("dataset=nowhere.jsonl", ["nowhere.jsonl"]),
        ("actor_model_config.model_name_or_path=./nowhere", ["nowhere"]),
        ("columns.prompt=question", ["question", "prompt"]),
        ("dataset=empty.jsonl", ["empty.jsonl"]),
        ("reward_fn=my_rewards:nothing", ["my_rewards.py", "nothing"]),
        ("reward_fn=no_module:low", ["no_module"]),
        ("device_map={actor: [99]}", ["device_map.actor", "99"]),
        ("run_dir=train.jsonl/run", ["train.jsonl"]),
        ("dataset_cache_dir=train.jsonl", ["dataset_cache_dir", "can't write to train.jsonl"]),
    ],
)
def test_what_is_missing_is_said_in_one_message(place, verl, override, words):
    (place / "empty.jsonl").write_text("")
    result = verl("train", "train.yaml", override)
    _refused(result, *words)
    assert len(result[2].splitlines()) <= 4
    assert not (place / "run").exists()


def test_a_reward_that_raises_is_located_and_debug_shows_the_traceback(place, verl, monkeypatch):
    failed = verl("train", "train.yaml", "reward_fn=my_rewards:broken")
    _refused(failed, "step 1", "my_rewards:broken", "row ", "Prompt ", "no such thing", status=1)
    assert any(f"u:{p}" in failed[2] for p in ("xa", "xb", "xc", "ab", "ba", "bc"))
    monkeypatch.setenv("VERL_DEBUG", "1")
    code, _, err = verl("train", "train.yaml", "device_map={actor: [99]}", "run_dir=other")
    assert code == 2 and "Traceback" in err


def test_a_full_disk_is_named(place, verl, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=10**9, used=10**9, free=0))
        _refused(verl("train", "train.yaml", "total_steps=1"), "run/checkpoints", "bytes", status=1)
    assert _steps(place / "run") == [1]
    code, out, err = verl("resume", "run")  # there is room again, and nothing to go on from
    assert code == 0 and "run/checkpoints holds no checkpoint yet: from the start" in out, err
    assert _steps(place / "run") == [1] and (place / "run" / "checkpoints" / "step_1").is_dir()


# -- a run, from start to export -------------------------------------------------------------------------------------


def test_train_and_what_can_be_done_with_the_run(place, verl, model):
    keys = ["eval.dataset=test.jsonl", "metrics.tensorboard=true"]
    code, out, err = _finish(_start("train", "train.yaml", *keys))
    assert code == 0, err
    assert "Traceback" not in err
    run = place / "run"
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "tensorboard", "checkpoints", "logs"} <= {
        p.name for p in run.iterdir()
    }
    assert (run / "checkpoints" / "step_2").is_dir() and any((run / "logs").iterdir())
    assert _steps(run) == [1, 2]
    for words in ("before", "after", "accuracy", "answers before and after", "reward"):
        assert words in out
    for where in ("run/metrics.jsonl", "run/samples.jsonl", "run/tensorboard", "run/checkpoints/step_2", "verl export"):
        assert where in out

    _refused(verl("train", "train.yaml"), "verl resume run", "--overwrite")
    _refused(verl("train", "train.yaml", "dataset=nowhere.jsonl", "--overwrite"), "nowhere.jsonl")
    assert _steps(run) == [1, 2], "a request that is wrong must not cost the old run"
    code, out, err = verl("resume", "run")
    assert code == 0 and "verl resume run total_steps=4" in out, err
    _refused(verl("resume", "nowhere"), "nowhere", "no run directory")
    (place / "train.jsonl").write_text(json.dumps({"prompt": "xa", "answer": "a"}) + "\n")
    _refused(verl("resume", "run", "total_steps=3"), "data set")
    assert _steps(run) == [1, 2]

    code, out, err = verl("export", "run", "out")
    assert code == 0 and "wrote out" in out, err
    exported = AutoModelForCausalLM.from_pretrained("out")
    tokenizer = AutoTokenizer.from_pretrained("out")
    trained = f_llama()
    trained.load_state_dict(read_tensors(run / "checkpoints" / "step_2" / "actor.safetensors"))
    asked = tokenizer("xa", return_tensors="pt")
    with torch.no_grad():
        logits = exported(asked.input_ids).logits
        assert torch.equal(logits, trained(asked.input_ids).logits)
        assert not torch.equal(logits, f_llama()(asked.input_ids).logits)
    assert exported.generate(asked.input_ids, max_new_tokens=3, do_sample=False).shape[1] > asked.input_ids.shape[1]
    _refused(verl("export", "run", "out"), "out exists and isn't empty")
    _refused(verl("export", "train.jsonl", "out2"), "train.jsonl")

    code, out, err = verl("eval", "train.yaml", "eval.dataset=test.jsonl", "run_dir=none")
    assert code == 0 and "eval/accuracy" in out, err
    assert not (place / "none").exists()
    _refused(verl("eval", "train.yaml"), "eval.dataset")
    _refused(verl("eval", "run"), "run is a folder", "verl export run OUT, then verl eval run/config.yaml")


def test_an_exported_adapter_is_merged(place, verl):
    keys = ["actor_model_config.use_lora=true", "total_steps=null", "total_epochs=0.3"]
    code, _, err = verl("train", "train.yaml", *keys)
    assert code == 0, err
    code, out, _ = verl("resume", "run")  # whoever repeats it until all is done comes to an end
    assert code == 0 and "has done all its 1 steps" in out and "verl resume run total_epochs=0.6" in out
    _refused(verl("resume", "run", "total_epochs=0.2"), "has done all its 1 steps", "total_epochs=0.4")
    assert verl("export", "run", "out")[0] == 0
    assert not (place / "out" / "adapter_config.json").exists()
    merged = AutoModelForCausalLM.from_pretrained("out")
    assert {n for n, _ in merged.named_parameters()} == {n for n, _ in f_llama().named_parameters()}
    changed = [n for n, p in merged.named_parameters() if not torch.equal(p, f_llama().get_parameter(n))]
    assert changed
    assert verl("train", "train.yaml", *keys, "--overwrite")[0] == 0
    assert _steps(place / "run") == [1]


# -- checkpoints -----------------------------------------------------------------------------------------------------


def _other_rows(place: Path) -> None:
    (place / "train.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": "a"}) + "\n" for p in ("xa", "cb")))


def _other_template(place: Path) -> None:
    f_bpe(template="plain").save_pretrained(place / "model")


def _other_tokenizer(place: Path) -> None:
    tokenizer = f_bpe(template="bos")
    tokenizer.add_tokens("xa")
    tokenizer.save_pretrained(place / "model")


def _other_model(place: Path) -> None:
    f_llama(seed=1).save_pretrained(place / "model")


def _other_reward(place: Path) -> None:
    (place / "my_rewards.py").write_text(REWARDS + "\n\nCHANGED = True\n")


CHANGES = {
    "reward": (_other_reward, [], ["the file of reward_fn my_rewards:low"]),
    "model": (_other_model, [], ["the files of actor_model_config.model_name_or_path"]),
    "rows": (_other_rows, [], ["the data set"]),
    "template": (_other_template, [], ["the chat template"]),
    "tokenizer": (_other_tokenizer, [], ["the tokenizer"]),
    "settings": (
        lambda place: None,
        ["actor_model_config.optimizer.lr=0.002", "seed=3", "micro_batch_size=2"],
        ["actor_model_config.optimizer.lr (0.001 then, 0.002 now); seed (0 then, 3 now). Put back"],
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_since_the_checkpoint_is_said_and_can_be_allowed(change, place, verl, model):
    shutil.copytree(model, place / "model")
    keys = ["actor_model_config.model_name_or_path=model", "total_steps=1"]
    assert verl("train", "train.yaml", *keys)[0] == 0
    alter, overrides, words = CHANGES[change]
    alter(place)
    before = (place / "run" / "config.yaml").read_text()
    again = ["resume", "run", "total_steps=2", *overrides]
    _refused(verl(*again), "changed since run/checkpoints/step_1", *words, "repeat the command with --allow-changes")
    assert (place / "run" / "config.yaml").read_text() == before and _steps(place / "run") == [1]
    code, _, err = verl(*again, "--allow-changes")
    assert code == 0, err
    assert _steps(place / "run") == [1, 2]
    log = (place / "run" / "logs" / "controller.log").read_text()
    assert "going on with changes: " + words[0].partition(" (")[0] in log
    restarted = change in ("rows", "settings")  # another order, too
    assert ("rows are drawn from the data's start" in log) == restarted
    assert verl("resume", "run", "total_steps=3")[0] == 0  # it is what the latest checkpoint was saved with


MISFITS = {
    "shapes": (lambda: _llama(hidden_size=48), [], "lm_head.weight has shape (32, 32), not (32, 48)"),
    "layers": (lambda: _llama(num_hidden_layers=3), [], "model.layers.2.input_layernorm.weight is missing"),
    "architecture": (f_gpt2, [], "lm_head.weight is unknown"),
    "dtype": (f_llama, ["actor_model_config.dtype=bf16"], "the optimizer's state lacks 21 tensors"),
    "workers": (lambda: _llama(hidden_size=48), ["device_map={actor: [cpu:0, cpu:1]}"], "21 tensors don't fit"),
}


def _llama(**keys: int) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**f_llama().config.to_dict() | {"head_dim": None} | keys))


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_checkpoint_of_a_model_of_other_shapes_is_refused(misfit, place, verl, model):
    """Whatever changes are allowed; the run stays as it was and goes on with its own."""
    assert verl("train", "train.yaml", "total_steps=1")[0] == 0
    build, overrides, words = MISFITS[misfit]
    save(place / "other", build(), f_bpe(template="bos"))
    kept = {p: p.read_bytes() for p in (place / "run").rglob("*") if p.is_file() and p.name != ".lock"}
    again = ["total_steps=2", "actor_model_config.model_name_or_path=other", *overrides, "--allow-changes"]
    told = ("run/checkpoints/step_1 can't go on", f"model_name_or_path ({model} then, other now)", words, "Put back")
    _refused(verl("resume", "run", *again), *told)
    assert {p: p.read_bytes() for p in kept} == kept
    assert verl("resume", "run", "total_steps=2")[0] == 0 and _steps(place / "run") == [1, 2]


def test_a_longer_run_says_that_its_schedule_is_another(place, verl):
    keys = ["actor_model_config.optimizer.schedule=linear", "total_steps=1"]
    assert verl("train", "train.yaml", *keys)[0] == 0
    assert verl("resume", "run", "total_steps=2")[0] == 0
    log = (place / "run" / "logs" / "controller.log").read_text()
    assert "going on with changes: actor_model_config.optimizer.schedule linear ends at step 2 (1 then)" in log


def test_a_wrong_request_costs_nothing(place, verl):
    """Neither the run that it would replace nor a configuration that the run's own would replace."""
    assert verl("train", "train.yaml", "total_steps=1")[0] == 0
    kept = {p: p.read_bytes() for p in (place / "run").rglob("*") if p.is_file() and p.parent.name != "logs"}
    _refused(verl("train", "train.yaml", "metrics.alarms={kl/meen: 1}", "--overwrite"), "'kl/meen'", "'kl/mean'")
    _refused(verl("resume", "run", "total_steps=2", "metrics.alarms_below={kl/meen: 1}"), "metrics.alarms_below")
    assert {p: p.read_bytes() for p in kept if p.name != ".lock"} == {
        p: t for p, t in kept.items() if p.name != ".lock"
    }
    mine = place / "exp" / "config.yaml"
    mine.parent.mkdir()
    mine.write_text((place / "train.yaml").read_text())
    _refused(verl("train", "exp/config.yaml", "run_dir=exp"), "config.yaml of its own in place of exp/config.yaml")
    assert [p.name for p in mine.parent.iterdir()] == ["config.yaml"]


def test_checkpoints_that_are_gone_are_missed(place, verl):
    """Where some must be there, a resume doesn't begin anew."""
    assert verl("train", "train.yaml", "total_steps=3", "checkpoint.every_steps=1")[0] == 0
    (place / "run" / "checkpoints").rename(place / "elsewhere")
    _refused(
        verl("resume", "run", "total_steps=4"), "metrics of 3 steps, and one was due every 1: is a disk not mounted"
    )
    assert _steps(place / "run") == [1, 2, 3]
    (place / "elsewhere").rename(place / "run" / "checkpoints")
    assert verl("resume", "run", "total_steps=4")[0] == 0
    assert _steps(place / "run") == [1, 2, 3, 4]


def test_a_checkpoint_of_the_policy_alone_starts_another_run(place, verl):
    keys = ["checkpoint={save: actor, every_steps: 1}", "algorithm.name=ppo", "group_size=1"]
    assert verl("train", "train.yaml", *keys)[0] == 0
    step = place / "run" / "checkpoints" / "step_2"
    assert {p.name for p in step.iterdir()} == {"actor.safetensors", "hf", "manifest.json", "state.json"}
    _refused(
        verl("resume", "run", "total_steps=3"),
        "step_2 holds the policy alone (checkpoint.save: actor)", "verl export run/checkpoints/step_2 OUT",
        "actor_model_config.model_name_or_path=OUT",
    )  # fmt: skip
    assert verl("export", "run/checkpoints/step_2", "out")[0] == 0
    code, _, err = verl("train", "train.yaml", "actor_model_config.model_name_or_path=out", "run_dir=more")
    assert code == 0, err
    _refused(verl("train", "train.yaml", "checkpoint.save=actor", "cluster.max_restarts=1"), "checkpoint.save global")


def test_a_damaged_checkpoint_is_never_passed_over_in_silence(place, verl):
    assert verl("train", "train.yaml", "checkpoint.every_steps=1")[0] == 0
    folders = [place / "run" / "checkpoints" / f"step_{step}" for step in (1, 2)]
    os.truncate(folders[1] / "actor.safetensors", 100)
    damaged = "run/checkpoints/step_2/actor.safetensors is damaged: 100 bytes, "
    _refused(verl("export", "run", "out"), damaged, "verl export run/checkpoints/step_1 out", status=1)
    assert not (place / "out").exists()
    code, out, err = verl("export", "run/checkpoints/step_1", "out")
    assert code == 0 and "wrote out (step 1)" in out, err
    code, out, err = verl("resume", "run", "total_steps=3")
    assert code == 0 and "checkpoint skipped" in out, err
    log = (place / "run" / "logs" / "controller.log").read_text()
    assert f"checkpoint skipped: {damaged}" in log and "; going on after step 1\n" in log
    assert _steps(place / "run") == [1, 2, 3] and "fewer than" not in log
    assert "wrote out3 (step 3)" in verl("export", "run", "out3")[1]
    for folder in (place / "run" / "checkpoints").glob("step_*"):
        os.truncate(folder / "state.json", 1)
    _refused(verl("resume", "run", "total_steps=4"), "holds no checkpoint", "step_3/state.json is damaged: 1 bytes")


def test_a_run_goes_on_in_its_own_folder(place, verl):
    (place / "run").mkdir()
    (place / "run" / "config.yaml").write_text((place / "train.yaml").read_text())
    _refused(verl("resume", "run", "run_dir=other"), "run_dir=other", "cp -r run other, then verl resume other")
    assert not (place / "other").exists()
    code, _, err = verl("resume", "run", f"run_dir={place}/run", "rollout_batch_size=32", "total_steps=1")
    assert code == 0, err
    told = "warning: the data's 6 prompts are fewer than the 8 of a lap: each is drawn 1 or 2 times in it"
    assert told in (place / "run" / "logs" / "controller.log").read_text()


# -- signals ---------------------------------------------------------------------------------------------------------


def test_signals_save_and_resume_finishes(place, verl):
    run = place / "run"
    process = _start("train", "train.yaml", "reward_fn=my_rewards:slow", "total_steps=200")
    _wait_for(run / "metrics.jsonl", process)
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches the reward's processes too
    code, out, err = _finish(process)
    assert code == 130, (code, out, err)
    assert "verl resume run" in out and "Traceback" not in err
    done = _steps(run)
    assert done == list(range(1, len(done) + 1)) and (run / "checkpoints" / f"step_{done[-1]}").is_dir()

    process = Forked("resume", "run")
    before = (run / "metrics.jsonl").stat().st_size
    while (run / "metrics.jsonl").stat().st_size == before:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code, out, err = _finish(process)
    assert code == 143, (code, out, err)
    assert "verl resume run" in out and "Traceback" not in err
    more = _steps(run)
    assert len(done) < len(more) < 200

    total = len(more) + 2
    code, _, err = verl("resume", "run", f"total_steps={total}")
    assert code == 0, err
    assert _steps(run) == list(range(1, total + 1))


def test_sigint_while_loading(place):
    (place / "sleepy.py").write_text("import time\nwith open('loading', 'w') as f:\n    f.write('x')\ntime.sleep(60)\n")
    process = Forked("train", "train.yaml", "reward_fn=sleepy:score")
    _wait_for(place / "loading", process)
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = _finish(process)
    assert code == 130, err
    assert "Traceback" not in err


# -- around runs -----------------------------------------------------------------------------------------------------


def test_stats_and_doctor(place, verl, model):
    code, out, err = verl("stats", "train.jsonl", "--model", model)
    assert code == 0, err
    assert all(word in out for word in ("p50", "p90", "p95", "max", "max_prompt_length:"))
    assert "max_response_length" not in out  # no responses in the data
    (place / "full.jsonl").write_text(json.dumps({"prompt": "xa", "response": "ab"}) + "\n")
    assert "max_response_length:" in verl("stats", "full.jsonl", "--model", model)[1]
    _refused(verl("stats", "nowhere.jsonl", "--model", model), "nowhere.jsonl")
    _refused(verl("stats", "train.jsonl", "--model", "./nowhere"), "nowhere")
    code, out, err = verl("doctor")
    assert code == 0 and "torch" in out and "default device" in out, err
