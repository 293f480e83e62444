from __future__ import annotations

import errno
import io
import json
import os
import random
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.forks import FORKS
from verl.checkpoint.rng import restore_rng, rng_state
from verl.checkpoint.store import Checkpoint, CheckpointStore
from verl.checkpoint.tensorfile import TensorFile, read_tensors
from verl.config.errors import RequestError, RunError


def parts(value: float = 1.0) -> dict:
    return {"actor": {"w": torch.full((4, 4), value)}, "state": {"position": value, "none": None}}


def names(root) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# -- tensor files


def test_tensors_come_back_bit_for_bit(tmp_path):
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    tensors = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "fp32": torch.tensor([float("nan"), -0.0, 1e-45]),
        "int": torch.tensor([-1, 2**62]),
        "bool": torch.tensor([True, False]),
        "byte": torch.tensor([255], dtype=torch.uint8),
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 7),
        "transposed": base.t(),
        "slice": base[1:3, ::2],
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    path = tmp_path / "t.safetensors"
    file = TensorFile(tensors)
    path.write_bytes(b"".join(file.chunks()))
    assert path.stat().st_size == file.size
    loaded = read_tensors(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape, name
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (loaded[name], tensor)]
        assert torch.equal(*raw), name


def test_one_memory_is_written_once_and_shared_again(tmp_path):
    embedding = torch.randn(100, 8)
    head = torch.nn.Parameter(embedding)  # same memory, other object
    path = tmp_path / "t.safetensors"
    path.write_bytes(b"".join(TensorFile({"lm_head": head, "embed": embedding, "view": embedding[:50]}).chunks()))
    assert path.stat().st_size < 1.6 * embedding.nbytes
    loaded = read_tensors(path)
    assert loaded["lm_head"] is loaded["embed"] and torch.equal(loaded["embed"], embedding)
    assert torch.equal(loaded["view"], embedding[:50])
    again = TensorFile(loaded)  # loaded tensors share one mapped file, and are still different tensors
    assert again.size == path.stat().st_size


def test_safetensors_itself_reads_the_file(tmp_path):
    from safetensors.torch import load_file

    path = tmp_path / "t.safetensors"
    path.write_bytes(b"".join(TensorFile({"b": torch.ones(3), "a": torch.zeros(2, 2)}).chunks()))
    assert torch.equal(load_file(path)["b"], torch.ones(3))


@pytest.mark.parametrize(
    "bad", [torch.empty(2, device="meta"), torch.eye(2).to_sparse(), torch.zeros(1, dtype=torch.cfloat)]
)
def test_tensors_without_plain_values_are_refused(bad):
    with pytest.raises(TypeError, match="'w' can't be saved"):
        TensorFile({"w": bad})


def test_saving_holds_one_tensors_copy_at_a_time(tmp_path):
    tensors = {f"w{i}": torch.randn(1024, 1024).t() for i in range(32)}  # 4 MiB each; transposed: writing needs a copy
    before, peak = resident(), 0

    def watch(path):
        nonlocal peak
        file = path.open("wb")
        write = file.write

        class Watched:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                file.close()

            def write(self, data):
                nonlocal peak
                peak = max(peak, resident())
                return write(data)

            flush, fileno = file.flush, file.fileno

        return Watched()

    CheckpointStore(tmp_path, open_file=watch).save(1, {"actor": tensors})
    assert peak - before < 48 * 2**20  # 128 MiB in all; the allocator keeps a few freed copies


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# -- save and load


def test_round_trip(tmp_path):
    source = tmp_path / "tokenizer.json"
    source.write_text("{}")
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest() is None and store.steps() == []
    files = {"hf": lambda folder: (folder / "config.json").write_text("{1}"), "tok/tokenizer.json": source}
    folder = store.save(3, parts() | {"rng": [1, 2], "empty": {}}, files)
    assert folder == tmp_path / "checkpoints" / "step_3" and names(folder.parent) == ["latest", "step_3"]
    loaded = store.load()
    assert loaded.step == 3 and torch.equal(loaded.tensors("actor")["w"], torch.ones(4, 4))
    assert loaded.json("state") == {"position": 1.0, "none": None} and loaded.json("empty") == {}
    assert (loaded.path / "hf/config.json").read_text() == "{1}" and (loaded.path / "tok/tokenizer.json").exists()
    assert "actor" in loaded and "state" in loaded and "critic" not in loaded
    with pytest.raises(RunError, match=r"holds no critic\.safetensors; it has \['actor\.safetensors'"):
        loaded.tensors("critic")


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ({"a": torch.ones(1), "b": 2}, TypeError),
        ({"a": float("nan")}, TypeError),
        ({"a": object()}, TypeError),
    ],
)
def test_a_part_is_all_tensors_or_plain_json(part, error, tmp_path):
    with pytest.raises(error, match="part 'mixed' is neither all tensors nor plain JSON"):
        CheckpointStore(tmp_path).save(1, {"mixed": part})
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["manifest", "../up", "a/b", ""])
def test_part_names_are_file_names(name, tmp_path):
    with pytest.raises(ValueError, match="can't name a part"):
        CheckpointStore(tmp_path).save(1, {name: 1})


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
@pytest.mark.parametrize("name", ["actor.safetensors", "state.json"])
def test_damage_is_found_and_named(damage, name, tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save(1, parts()) / name
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(data[:-1])
    elif damage == "flip":
        data[-3] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    with pytest.raises(RunError, match=rf"step_1/{name}.*(damaged|missing)"):
        store.load(1)


def test_damaged_manifest_is_named(tmp_path):
    store = CheckpointStore(tmp_path)
    (store.save(1, parts()) / "manifest.json").write_text("[]")
    with pytest.raises(RunError, match=r"manifest\.json is damaged"):
        store.load(1)
    assert store.steps() == [] and store.latest() is None


def test_nothing_there(tmp_path):
    store = CheckpointStore(tmp_path / "none")
    with pytest.raises(RequestError, match="holds no checkpoint; complete steps: none"):
        store.load()
    store.save(2, parts())
    with pytest.raises(RequestError, match=r"holds no step_5; complete steps: \[2\]"):
        store.load(5)
    with pytest.raises(RequestError, match="keep is 0"):
        CheckpointStore(tmp_path, keep=0)


# -- retention


def test_the_newest_stay_also_over_runs(tmp_path):
    for step in (1, 2, 3):
        CheckpointStore(tmp_path, keep=5).save(step, parts(step))
    CheckpointStore(tmp_path, keep=2).save(4, parts(4))
    assert CheckpointStore(tmp_path).steps() == [3, 4]


def test_a_given_up_future_goes_before_the_past(tmp_path):
    for step in (50, 100):
        CheckpointStore(tmp_path, keep=2).save(step, parts())
    store = CheckpointStore(tmp_path, keep=2)  # resumed from 50
    store.save(60, parts(6))
    assert store.steps() == [50, 60] and store.latest() == 60


def test_a_damaged_one_is_never_kept_instead_of_a_good_one(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2):
        store.save(step, parts())
    (tmp_path / "step_2" / "actor.safetensors").write_bytes(b"")
    assert store.steps() == [1] and store.latest() == 1
    CheckpointStore(tmp_path, keep=2).save(3, parts())
    assert names(tmp_path) == ["latest", "step_1", "step_3"]


def test_what_is_passed_over_for_an_older_one_is_told(tmp_path):
    store = CheckpointStore(tmp_path, keep=9)
    for step in (1, 2, 3, 4):
        store.save(step, parts())
    assert store.skipped() == []
    (tmp_path / "step_1" / "actor.safetensors").unlink()  # older than what is used: nobody misses it
    assert store.skipped() == []
    size = (tmp_path / "step_3" / "state.json").stat().st_size
    (tmp_path / "step_3" / "state.json").write_bytes(b"{")
    (tmp_path / "step_4" / "actor.safetensors").unlink()
    missing, damaged = store.skipped()
    assert missing == f"{tmp_path}/step_4/actor.safetensors is missing from the checkpoint"
    assert damaged == f"{tmp_path}/step_3/state.json is damaged: 1 bytes, {size} were written"
    assert store.load().step == 2
    (tmp_path / "step_4" / "manifest.json").unlink()
    assert store.skipped() == [f"{tmp_path}/step_4/manifest.json is missing", damaged]
    shutil.rmtree(tmp_path / "step_4")  # given up by someone
    assert store.skipped() == [damaged]
    (tmp_path / "step_2" / "manifest.json").write_text("[]")
    with pytest.raises(RequestError, match=r"complete steps: none; .*step_3/state\.json is damaged"):
        store.load()
    store.save(2, parts())
    assert store.skipped() == []  # what `latest` names is the one saved last


def test_foreign_folders_are_left_alone(tmp_path):
    (tmp_path / "step_7").mkdir()
    (tmp_path / "step_best").mkdir()
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, parts())
    store.save(2, parts())
    assert names(tmp_path) == ["latest", "step_2", "step_7", "step_best"] and store.steps() == [2]


def test_the_same_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, parts(1))
    store.save(1, parts(2))
    assert store.load().json("state")["position"] == 2 and names(tmp_path) == ["latest", "step_1"]
    (tmp_path / "step_1").rename(tmp_path / ".step_1.replaced")  # killed between the two renames
    assert CheckpointStore(tmp_path).load().json("state")["position"] == 2


def test_without_a_usable_latest_file(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(step, parts())
    for text in ("step_9", "", "nonsense"):
        (tmp_path / "latest").write_text(text)
        assert store.latest() == 2
    (tmp_path / "latest").write_text("step_1\n")
    assert store.latest() == 1


# -- failures of the disk


def test_too_little_space_is_found_before_writing(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    store.save(1, parts())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, 1))
    opened = []
    store = CheckpointStore(tmp_path, open_file=lambda path: opened.append(path) or path.open("wb"))
    with pytest.raises(RunError, match=r"step_2: No space left on device; \d+ bytes are needed, 1 bytes are free"):
        store.save(2, parts())
    assert not opened and store.steps() == [1] and names(tmp_path) == ["latest", "step_1"]


def test_root_that_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"can't write checkpoint .*file/checkpoints/step_1: Not a directory"):
        CheckpointStore(tmp_path / "file" / "checkpoints").save(1, parts())


@pytest.mark.parametrize("call", range(12))
def test_whichever_system_call_fails_the_old_one_stays(call, tmp_path, monkeypatch):
    """fsync and the renames fail one after the other; a later save always succeeds."""
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, parts(1))
    count = iter(range(1000))

    def failing(function):
        def wrapped(*args, **kwargs):
            if next(count) == call:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return function(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        for name in ("fsync", "rename", "replace"):
            patch.setattr(os, name, failing(getattr(os, name)))
        try:
            store.save(1 if call % 2 else 2, parts(2))
            failed = False
        except RunError:
            failed = True
    assert CheckpointStore(tmp_path).load().json("state")["position"] in ((1, 2) if failed else (2,))
    CheckpointStore(tmp_path, keep=1).save(3, parts(3))
    assert names(tmp_path) == ["latest", "step_3"]


def save_and_die_at(root: Path, point: int) -> None:
    """Save step 2, keeping one; SIGKILL before the ``point``-th change of the disk, or half way through a write."""
    left = point

    def count() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    def before(function):
        def wrapped(*args, **kwargs):
            if count():
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapped

    class File(io.FileIO):
        def write(self, data):
            if count():
                super().write(data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return super().write(data)

    for name in ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink"):
        setattr(os, name, before(getattr(os, name)))
    files = {"hf": lambda folder: (folder / "config.json").write_text("{}")}
    CheckpointStore(root, keep=1, open_file=before(lambda path: File(path, "xb"))).save(2, parts(2), files)


def test_killed_at_every_write_point(tmp_path):
    """A complete checkpoint is there whenever the process dies, and the next save clears what was left behind."""
    stood = []
    CheckpointStore(tmp_path / "first", keep=1).save(1, parts(1))
    for point in range(100):
        root = shutil.copytree(tmp_path / "first", tmp_path / str(point))
        pid = os.fork()
        if not pid:
            try:
                save_and_die_at(root, point)
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        store = CheckpointStore(root, keep=1)
        loaded = store.load()
        assert loaded.json("state")["position"] == loaded.step and loaded.tensors("actor")["w"].eq(loaded.step).all()
        stood.append(loaded.step)
        if not os.WIFSIGNALED(status):
            break
        store.save(3, parts(3))
        assert names(root) == ["latest", "step_3"]
    assert stood == sorted(stood) and stood[0] == 1 and stood[-1] == 2 and 20 < len(stood) < 100


def save_under_a_size_limit(root, message) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    with pytest.raises(RunError) as caught:
        CheckpointStore(root).save(2, {"actor": {"w": torch.ones(10**5)}})
    message.put(str(caught.value))


def test_a_real_size_limit(tmp_path):
    """The kernel stops the write half way (RLIMIT_FSIZE): the message names the file, the partial is gone."""
    store = CheckpointStore(tmp_path)
    store.save(1, parts())
    message = FORKS.SimpleQueue()
    child = FORKS.Process(target=save_under_a_size_limit, args=(tmp_path, message))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert f"{tmp_path}/step_2: File too large; 400" in message.get()
    assert names(tmp_path) == ["latest", "step_1"]


# -- random state


def test_rng_continues_exactly(tmp_path):
    random.gauss(0, 1), np.random.standard_normal()  # both leave half a pair behind
    store = CheckpointStore(tmp_path)
    store.save(1, {"rng": rng_state()})

    def draw():
        return [random.gauss(0, 1), random.random(), *np.random.standard_normal(3), *torch.randn(3).tolist()]

    expected = draw()
    draw()
    restore_rng(store.load().tensors("rng"))
    assert draw() == expected


def test_open_any_folder(tmp_path):
    folder = CheckpointStore(tmp_path).save(1, parts())
    moved = folder.rename(tmp_path / "elsewhere")
    assert Checkpoint.open(moved).step == 1
    assert json.loads((moved / "manifest.json").read_text())["format"] == 1
