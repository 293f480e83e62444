"""Saving beside training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_store import names
from verl.checkpoint.saver import Saver, snapshot
from verl.checkpoint.store import CheckpointStore
from verl.config.errors import RunError


def test_training_does_not_change_a_snapshot():
    weight = torch.nn.Parameter(torch.ones(4, 3))
    turned = torch.arange(6.0).view(2, 3).t()
    copies = snapshot({"embed": weight, "head": weight.data, "turned": turned, "view": weight[:2], "none": turned[:0]})
    with torch.no_grad():
        weight.fill_(5), turned.fill_(5)
    assert copies["head"] is copies["embed"] and copies["embed"].eq(1).all() and copies["view"].eq(1).all()
    assert copies["turned"].is_contiguous() and copies["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert copies["none"].shape == (0, 2) and not any(c.requires_grad for c in copies.values())
    memory = torch.empty(2)
    assert [t.tolist() for t in snapshot((str(i), memory.fill_(i)) for i in range(2)).values()] == [[0, 0], [1, 1]]
    with pytest.raises(TypeError, match="'w' can't be saved"):
        snapshot({"w": torch.zeros(1, device="meta")})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_snapshot_of_a_gpu():
    weight = torch.arange(2.0**20, device="cuda")
    copies = snapshot({"a": weight, "b": weight, "t": weight.view(2, -1).t()})
    weight.fill_(-1)
    assert copies["a"] is copies["b"] and copies["a"].is_pinned() and copies["a"].device.type == "cpu"
    assert torch.equal(copies["a"], torch.arange(2.0**20)) and torch.equal(copies["t"].t().reshape(-1), copies["a"])


def test_a_save_runs_beside_training(tmp_path):
    store, saver, go = CheckpointStore(tmp_path), Saver(), threading.Event()
    weight = torch.zeros(1000)
    assert saver.wait() is None and not saver.busy

    def save(step):
        tensors = snapshot({"w": weight})
        return lambda: go.wait(60) and store.save(step, {"actor": tensors})

    assert saver.start(save(1)) is None
    weight += 1  # training goes on
    assert saver.busy and store.latest() is None
    threading.Timer(0.2, go.set).start()
    assert saver.start(save(2)) == tmp_path / "step_1"  # it waited for the one before
    assert store.load(1).tensors("actor")["w"].eq(0).all()
    assert saver.wait() == tmp_path / "step_2" and saver.wait() is None and not saver.busy
    assert store.load(2).tensors("actor")["w"].eq(1).all()


@pytest.mark.parametrize("at", ["start", "wait"])
def test_a_failure_is_raised_once_and_logged_at_once(at, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    broken, store, saver = CheckpointStore(tmp_path / "file"), CheckpointStore(tmp_path / "checkpoints"), Saver()
    saver.start(lambda: broken.save(1, {"state": 1}))
    with pytest.raises(RunError, match=r"file/step_1: (Not a directory|File exists)"):
        saver.wait() if at == "wait" else saver.start(lambda: store.save(1, {"state": 1}))
    assert "saving failed: can't write checkpoint" in caplog.text
    assert saver.wait() is None and store.latest() is None  # the next one wasn't started
    saver.start(lambda: store.save(2, {"state": 1}))
    assert saver.wait() == store.folder(2)


SCRIPT = """
import sys, time, torch
from pathlib import Path
from verl.checkpoint.saver import Saver, snapshot
from verl.checkpoint.store import CheckpointStore

root, how = Path(sys.argv[1]), sys.argv[2]

def slow(path):
    file = path.open("xb")
    if path.name == "actor.safetensors":
        file.write(b"half" if how == "kill" else b"")
        file.flush()
        print("writing", flush=True)
        time.sleep(60 if how == "kill" else 0.5)
    return file

tensors = snapshot({"w": torch.full((1000,), 2.0)})
saver = Saver()
saver.start(lambda: CheckpointStore(root, keep=1, open_file=slow).save(2, {"actor": tensors}))
if how == "kill":
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["kill", "end"])
def test_the_process_ends_while_it_saves(how, tmp_path):
    """Killed, it leaves the checkpoint before; a normal end waits for the new one."""
    CheckpointStore(tmp_path, keep=1).save(1, {"actor": {"w": torch.ones(1000)}})
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), how],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None and child.stdout.readline() == "writing\n"
    if how == "kill":
        assert (tmp_path / ".step_2.partial" / "actor.safetensors").read_bytes() == b"half"
        os.kill(child.pid, signal.SIGKILL)
    child.communicate(timeout=60)
    assert child.returncode == (-signal.SIGKILL if how == "kill" else 0)
    store, last = CheckpointStore(tmp_path, keep=1), 1 if how == "kill" else 2
    assert store.latest() == last and store.load().tensors("actor")["w"].eq(last).all()
    store.save(3, {"actor": {"w": torch.ones(1)}})
    assert names(tmp_path) == ["latest", "step_3"]
