"""Requests and surroundings that can't work: what is said, the exit status, and that nothing is lost.

``tests/cli/test_main.py`` has those that are about words of the command and keys of the configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.forks import FORKS
from tests.tiny import f_bpe, f_llama, save
from tests.trainer import cluster_runs as runs
from verl.checkpoint.store import CheckpointStore
from verl.cli.main import main
from verl.dataflow.nodes import Op
from verl.runtime.controller import Controller, Walk
from verl.runtime.host import Host

Verl = Callable[..., tuple[int, str, str]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, data and ``train.yaml``; the current one."""
    monkeypatch.chdir(tmp_path)
    save("model", f_llama(), f_bpe(template="bos"))
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in runs.PROMPTS))
    keys = runs.ppo("model", tmp_path) | {
        "dataset": "data.jsonl", "eval": {}, "reward_fn": "tests.trainer.reward:low_ids", "run_dir": "run",
        "total_steps": 1, "log_level": "INFO",
    }  # fmt: skip
    Path("train.yaml").write_text(yaml.safe_dump(keys))
    return tmp_path


@pytest.fixture
def verl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Verl:
    """The command in this process: exit status, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["verl", *args])
        with pytest.raises(SystemExit) as stop:
            main()
        return (stop.value.code, *capsys.readouterr())

    return run


def refused(result: tuple[int, str, str], *words: str, status: int = 2) -> None:
    code, out, err = result
    assert code == status, result
    assert err.startswith("verl: ") and "Traceback" not in out + err
    assert all(word in err for word in words), err


# -- what is asked for -----------------------------------------------------------------------------------------------


def no_config(place: Path) -> None:
    (place / "model" / "config.json").unlink()


def broken_config(place: Path) -> None:
    (place / "model" / "config.json").write_text("{")


def unknown_model_type(place: Path) -> None:
    (place / "model" / "config.json").write_text('{"model_type": "perceptron"}')


def no_weights(place: Path) -> None:
    (place / "model" / "model.safetensors").unlink()


def cut_weights(place: Path) -> None:
    path = place / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def no_tokenizer(place: Path) -> None:
    for path in (place / "model").glob("tokenizer*"):
        path.unlink()


def no_json(place: Path) -> None:
    (place / "data.jsonl").write_text('{"prompt": "xa"}\n{"prompt": \n')


def binary(place: Path) -> None:
    (place / "data.jsonl").write_bytes(bytes(range(256)))


def empty_prompt(place: Path) -> None:
    (place / "data.jsonl").write_text('{"prompt": "xa"}\n{"prompt": ""}\n')


def numbers(place: Path) -> None:
    (place / "data.jsonl").write_text('{"prompt": 7}\n')


INPUTS = {
    no_config: ["model"],
    broken_config: ["model", "config.json"],
    unknown_model_type: ["model", "perceptron"],
    no_weights: ["model"],
    cut_weights: ["model"],
    no_tokenizer: ["model", "tokenizer"],
    no_json: ["data.jsonl", "2"],
    binary: ["data.jsonl"],
    empty_prompt: ["data.jsonl", "row 1"],
    numbers: ["data.jsonl", "row 0", "7"],
}


@pytest.mark.parametrize("damage", INPUTS, ids=lambda damage: damage.__name__)
def test_input_that_can_t_be_read(damage, place, verl):
    damage(place)
    result = verl("train", "train.yaml")
    refused(result, *INPUTS[damage])
    assert len(result[2].splitlines()) <= 6
    assert not Path("run").exists()


def test_a_tokenizer_without_any_end_token(place, verl):
    """Nothing can end a response then but its limit, which is said; such models exist, so it is no error."""
    model, tokenizer = f_llama(), f_bpe(template="bos")
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    save("model", model, tokenizer)
    code, out, _ = verl("train", "train.yaml")
    assert code == 0 and "the tokenizer has no end-of-sequence token" in out
    assert runs.lines(Path("run"))[0]["response/truncated"] == 1


# -- what is around --------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is loaded fails the test: what is wrong must be noticed before."""
    monkeypatch.setattr(Host, "load", lambda self, laps: pytest.fail("a model was loaded"))


def test_a_port_in_use(place, verl, nothing_loads):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        told = verl("train", "train.yaml", f"metrics.prometheus_port={port}")
    refused(told, f"metrics.prometheus_port: 127.0.0.1:{port}: Address already in use")
    assert not Path("run").exists()


@pytest.mark.parametrize("folder", ["/proc/run", "/sys/run", "data.jsonl/run"])
def test_a_run_folder_that_can_t_be_written(folder, place, verl, nothing_loads):
    """Whoever asks: nobody may write there, not even root."""
    refused(verl("train", "train.yaml", f"run_dir={folder}"), f"run_dir: can't write to {folder}")


def test_a_local_device_that_does_not_exist(place, verl, nothing_loads):
    refused(verl("train", "train.yaml", "device_map.actor=[7]"), "device_map.actor", "7")
    refused(verl("train", "train.yaml", "device_map.actor=node7:0"), "device_map.actor", "node7")
    assert not Path("run").exists()


def test_a_damaged_checkpoint_is_named_and_an_older_one_is_left(place, verl):
    assert verl("train", "train.yaml", "total_steps=2", "checkpoint.every_steps=1")[0] == 0
    damaged = Path("run/checkpoints/step_2/critic.safetensors")
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    refused(verl("resume", "run", "total_steps=3"), f"{damaged} is damaged", status=1)
    assert CheckpointStore(Path("run/checkpoints")).load(1).step == 1
    damaged.write_bytes(content[:-1])  # of another size it is no candidate at all
    assert verl("resume", "run", "total_steps=3")[0] == 0
    assert [line["step"] for line in runs.lines(Path("run"))] == [1, 2, 3]


# -- a run that is hindered, in a process of its own -----------------------------------------------------------------


def hindered(how: str, keys: dict[str, Any], told: Any) -> None:
    """Train; once the first checkpoint is there, the disk is full or the folder belongs to others."""
    root = Path(keys["run_dir"]) / "checkpoints"
    commit = CheckpointStore.commit

    def hinder(self: CheckpointStore, step: int, entries: Any) -> Path:
        made = commit(self, step, entries)
        if step == 1 and how == "full disk":  # the kernel refuses to write more into one file
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        elif step == 1:
            root.chmod(0o555)
            os.setegid(65534)
            os.seteuid(65534)  # root may write anywhere
        return made

    CheckpointStore.commit = hinder  # type: ignore[method-assign]
    sys.argv = ["verl", "train", "train.yaml"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            main()
    except SystemExit as stop:
        told.put((stop.code, said.getvalue()))


@pytest.mark.parametrize(("how", "beside"), [("full disk", True), ("read-only folder", False)])
def test_the_last_checkpoint_stays(how, beside, place, verl):
    keys = yaml.safe_load(Path("train.yaml").read_text())
    keys |= {"total_steps": 3, "checkpoint": {"every_steps": 1, "keep": 1, "beside_training": beside}}
    Path("train.yaml").write_text(yaml.safe_dump(keys))
    if how == "read-only folder":
        place.chmod(0o755)
    told = FORKS.Queue()
    process = FORKS.Process(target=hindered, args=(how, keys, told))
    process.start()
    code, said = told.get(timeout=120)
    process.join()
    assert code == 1 and "run/checkpoints/step_2: " in said and "Traceback" not in said
    assert {"full disk": "File too large; ", "read-only folder": "Permission denied"}[how] in said, said
    assert how != "full disk" or re.search(r"\d+ bytes are needed, \d+ bytes are free", said)
    assert "The last complete one is run/checkpoints/step_1" in said
    Path("run/checkpoints").chmod(0o755)
    assert CheckpointStore(Path("run/checkpoints")).load().step == 1
    resumed = verl("resume", "run")
    assert resumed[0] == 0, resumed
    assert [line["step"] for line in runs.lines(Path("run"))] == [1, 2, 3]
    assert sorted(p.name for p in Path("run/checkpoints").iterdir()) == ["latest", "step_3"]


def interrupted(numbers: list[int]) -> None:
    """Train, with an update that never comes back; signals as soon as it has begun, one by one."""
    began = threading.Event()

    async def hangs(self: Controller, op: Op, walk: Walk, **how: bool) -> None:
        if op.node.kind == "actor" and op.name == "update":
            began.set()
            await asyncio.sleep(1000)
        await run_op(self, op, walk, **how)

    def send() -> None:
        began.wait()
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    run_op, Controller._run = Controller._run, hangs  # type: ignore[method-assign]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=send, daemon=True).start()
    sys.argv = ["verl", "train", "train.yaml"]
    main()


@pytest.mark.parametrize("pair", ["SIGINT SIGINT", "SIGTERM SIGTERM"])
def test_a_second_signal_stops_a_step_that_does_not_end(pair, place):
    process = FORKS.Process(target=interrupted, args=([signal.Signals[name] for name in pair.split()],))
    start = time.monotonic()
    process.start()
    process.join(60)
    status, seconds = process.exitcode, time.monotonic() - start
    if status is None:
        process.kill()
    assert status == (143 if pair.endswith("TERM") else 130), (status, seconds)
    log = (place / "run" / "logs" / "controller.log").read_text()
    assert f"{pair.split()[0]}: a step that trains ends first" in log and "once more stops at once" in log.lower()
