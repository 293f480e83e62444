"""G25: nothing from outside is ever unpickled, and the open port listens on this machine only."""

from __future__ import annotations

import json
import pickle
import socket
import urllib.error
import urllib.request
import zlib
from pathlib import Path

import pytest
import torch

from verl.checkpoint.export import export
from verl.checkpoint.store import Checkpoint, CheckpointStore
from verl.config.errors import RequestError, RunError
from verl.metrics.sinks import PrometheusSink


class Bomb:
    """Creates ``marker`` when unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self):
        return Path.touch, (self._marker,)


@pytest.fixture
def marker(tmp_path):
    path = tmp_path / "marker"
    pickle.loads(pickle.dumps(Bomb(path)))
    assert path.exists(), "the bomb must work"
    path.unlink()
    yield path
    assert not path.exists(), "something was unpickled"


def describe(folder: Path) -> None:
    """Write a manifest that makes a forged folder look complete."""
    files = {p.name: {"bytes": p.stat().st_size, "crc32": zlib.crc32(p.read_bytes())} for p in folder.glob("*.*")}
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "step": 1, "files": files}))


@pytest.mark.parametrize("name", ["actor", "actor_optimizer", "loader", "rng"])
@pytest.mark.parametrize("suffix", [".pt", ".bin", ".pkl"])
def test_g25_b_pickled_parts_are_refused_by_name(name, suffix, marker, tmp_path):
    folder = tmp_path / "checkpoints" / "step_1"
    folder.mkdir(parents=True)
    torch.save({"w": Bomb(marker)}, folder / f"{name}{suffix}")
    store = CheckpointStore(folder.parent)
    with pytest.raises(RequestError, match=rf"{name}{suffix}: pickled files can run code"):
        store.load(1)
    assert store.latest() is None
    describe(folder)
    with pytest.raises(RunError, match=rf"step_1/{name}{suffix}: pickled files can run code"):
        store.load(1)
    with pytest.raises(RunError, match=rf"step_1/{name}{suffix}: pickled files can run code"):
        export(folder, tmp_path / "out")


def test_g25_b_a_pickle_under_another_name_is_not_read_as_one(marker, tmp_path):
    torch.save({"w": Bomb(marker)}, tmp_path / "actor.safetensors")
    (tmp_path / "rng.json").write_bytes(pickle.dumps(Bomb(marker)))
    describe(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(RunError, match=r"actor\.safetensors is damaged or no safetensors file"):
        checkpoint.tensors("actor")
    with pytest.raises(RunError, match=r"rng\.json is damaged"):
        checkpoint.json("rng")


def test_g25_b_pickles_are_not_written_either(tmp_path):
    with pytest.raises(RunError, match=r"hf/training_args\.bin: pickled files"):
        CheckpointStore(tmp_path).save(1, {}, {"hf": lambda folder: (folder / "training_args.bin").touch()})
    assert list(tmp_path.iterdir()) == []


def test_g25_a_and_c_metrics_port(marker):
    sink = PrometheusSink(0)
    request = urllib.request.Request(f"http://127.0.0.1:{sink.port}/metrics", data=pickle.dumps(Bomb(marker)))
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=5)
    assert 400 <= refused.value.code < 500
    assert sink._server.socket.getsockname()[0] == "127.0.0.1"
    own = socket.gethostbyname(socket.gethostname())
    if not own.startswith("127."):
        with pytest.raises(OSError):
            socket.create_connection((own, sink.port), timeout=2)
    sink.close()
