"""Parts that several processes write into one folder, and tensors that come one by one."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import zlib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.test_store import names, resident
from tests.forks import FORKS
from verl.checkpoint import parts as parts_module
from verl.checkpoint import tensorfile
from verl.checkpoint.parts import joined_crc32, write_parts
from verl.checkpoint.store import CheckpointStore
from verl.checkpoint.tensorfile import read_tensors
from verl.config.errors import RunError

SIZE = 10**5  # floats of the second process's tensor


def critic(folder: Path) -> dict[str, dict[str, int]]:
    return write_parts(folder, {"critic": {"v": torch.arange(float(SIZE))}, "critic_state": {"step": 2}})


def critic_on_a_full_disk(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    critic(folder)


def memory_of_a_reader(path: Path) -> tuple[float, int, int]:
    """Sum of a file's tensors, and what reading them added to this process: private and file-backed bytes."""

    def kinds() -> tuple[int, int]:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return tuple(int(lines[kind].split()[0]) * 1024 for kind in ("RssAnon", "RssFile"))

    torch.ones(2**22).sum()
    before = kinds()
    tensors = read_tensors(path)
    total = sum(float(t.sum()) for t in tensors.values())
    after = kinds()
    return total, after[0] - before[0], after[1] - before[1]


@pytest.fixture(scope="module")
def process():
    """Another process that calls functions; the last test that uses it may spoil it."""
    with ProcessPoolExecutor(1, FORKS) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


@pytest.fixture
def store(tmp_path):
    """A store that holds step 1."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    store.save(1, {"actor": {"w": torch.ones(3)}})
    return store


def actor(folder: Path) -> dict[str, dict[str, int]]:
    fill = {"hf": lambda hf: (hf / "config.json").write_text("{}")}
    return write_parts(folder, {"actor": {"w": torch.full((3,), 2.0)}}, fill)


# -- several writers


def test_two_processes_write_one_checkpoint(store, process):
    folder = store.begin(2)
    entries = actor(folder) | process(critic, folder)
    assert store.latest() == 1  # nothing is published before the commit
    assert store.commit(2, entries) == store.root / "step_2"
    assert names(store.root) == ["latest", "step_2"]
    loaded = store.load()
    assert loaded.step == 2 and sorted(loaded.files) == [
        "actor.safetensors",
        "critic.safetensors",
        "critic_state.json",
        "hf/config.json",
    ]
    assert torch.equal(loaded.tensors("critic")["v"], torch.arange(float(SIZE)))
    assert loaded.tensors("actor")["w"].eq(2).all() and loaded.json("critic_state") == {"step": 2}


def still_step_1(store) -> None:
    assert names(store.root) == ["latest", "step_1"]
    assert store.load().step == 1 and store.load().tensors("actor")["w"].eq(1).all()


def test_what_the_entries_and_the_folder_must_agree_on(store):
    def lost(folder, entries):
        (folder / "actor.safetensors").unlink()

    def cut(folder, entries):
        (folder / "hf" / "config.json").write_text("{")

    def forgotten(folder, entries):
        del entries["hf/config.json"]

    for damage, message in [
        (lost, r"actor\.safetensors isn't there \(do all workers share this file system\?\)"),
        (cut, r"hf/config\.json has 1 bytes, 2 were written"),
        (forgotten, r"hf/config\.json was written by nobody who said so"),
    ]:
        folder = store.begin(2)
        entries = actor(folder)
        damage(folder, entries)
        with pytest.raises(RunError, match=rf"step_2: {message}\. The last complete one is .*step_1"):
            store.commit(2, entries)
        still_step_1(store)


def test_an_abandoned_step_leaves_nothing(store):
    actor(store.begin(2))
    store.abandon(2)
    still_step_1(store)
    actor(store.begin(1))  # the same step again, given up
    store.abandon(1)
    still_step_1(store)
    folder = store.begin(3)
    store.commit(3, actor(folder))
    assert names(store.root) == ["latest", "step_3"]


@pytest.mark.parametrize("second", [{"actor": {"w": torch.zeros(9)}}, {"actor": iter([("w", torch.zeros(9))])}, {}])
def test_two_writers_of_one_name(second, store):
    folder = store.begin(2)
    entries = actor(folder)
    fill = {} if second else {"hf": lambda hf: None}
    with pytest.raises(RunError, match=r"step_2: File exists, .*\.step_2\.partial/(actor\.safetensors|hf)"):
        write_parts(folder, second | {"more": 1}, fill)
    store.commit(2, entries)  # the first one's files are whole, the second one's are gone
    assert store.load().tensors("actor")["w"].eq(2).all()


def test_a_failed_writer_removes_its_own_files(store):
    folder = store.begin(2)
    entries = actor(folder)

    def full(path):
        if path.name == "b.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return path.open("xb")

    with pytest.raises(RunError, match=r"step_2: No space left on device; \d+ bytes are needed, \d+ bytes are free"):
        write_parts(folder, {"a": {"t": torch.ones(2)}, "b": 1}, {"c": lambda c: None}, open_file=full)
    assert names(folder) == ["actor.safetensors", "hf"]
    store.commit(2, entries)


# -- tensors one by one


def test_an_iterators_tensors_come_back(store):
    tensors = {"b": torch.randn(3, 5).bfloat16(), "a": torch.randn(4, 2).t(), "none": torch.empty(0, 2)}
    folder = store.save(2, {"actor": iter(tensors.items()), "empty": iter([]), "rng": [1]})
    loaded = store.load()  # with the checksum that was made of two pieces
    assert loaded.tensors("empty") == {} and loaded.json("rng") == [1]
    for got in (loaded.tensors("actor"), load_file(folder / "actor.safetensors")):
        assert got.keys() == tensors.keys() and all(torch.equal(got[name], tensors[name]) for name in tensors)


def test_memory_used_again_is_not_taken_for_the_same_tensor(store):
    memory = torch.empty(8)
    store.save(2, {"actor": ((str(i), memory.fill_(i)) for i in range(4))})
    assert [t.unique().tolist() for _, t in sorted(store.load().tensors("actor").items())] == [[0], [1], [2], [3]]


def test_a_header_longer_than_the_room_for_it(store, monkeypatch):
    for module in (tensorfile, parts_module):
        monkeypatch.setattr(module, "RESERVED", 256)
    folder = store.save(2, {"actor": ((f"w{i}", torch.full((5,), float(i))) for i in range(99))})
    loaded = store.load().tensors("actor")
    assert all(loaded[f"w{i}"].eq(i).all() for i in range(99)) and len(loaded) == 99
    assert load_file(folder / "actor.safetensors").keys() == loaded.keys() and len(names(folder)) == 2


def test_no_two_of_an_iterators_tensors_exist_at_once(store):
    before, peak = resident(), 0

    def made():
        nonlocal peak
        for i in range(32):
            peak = max(peak, resident())
            yield f"w{i}", torch.randn(1024, 1024).t()

    store.save(2, {"actor": made()})
    assert peak - before < 48 * 2**20  # 128 MiB in all; the allocator keeps a few freed copies


@pytest.mark.parametrize("fault", ["disk", "space", "dtype", "twice", "source"])
def test_iterators_are_run_to_their_ends_whatever_fails(fault, store, monkeypatch):
    seen = []

    def made(part):
        for i in range(3):
            if fault == "source" and part == "a" and i == 1:
                raise ValueError("there are two tensors too many")
            dtype = torch.cfloat if fault == "dtype" and i == 1 else torch.float32
            name = "w" if fault == "twice" else f"w{i}"
            seen.append((part, i))
            yield name, torch.zeros(2, dtype=dtype)

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if fault == "space":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, 1))
    expected = {"dtype": TypeError, "twice": ValueError, "source": ValueError}.get(fault, RunError)
    with pytest.raises(expected, match=r"No space left|'w1' can't be saved|there are two tensors"):
        folder = store.begin(2)
        parts = {"a": made("a"), "state": {"position": 1}, "b": made("b")}
        write_parts(folder, parts, open_file=full if fault == "disk" else None)
    whole = [("a", 0), *([("a", 1), ("a", 2)] if fault != "source" else []), ("b", 0), ("b", 1), ("b", 2)]
    assert seen == whole and names(folder) == []
    store.abandon(2)
    still_step_1(store)


@pytest.mark.parametrize("sizes", [(0, 0), (5, 0), (0, 5), (1, 1), (4096, 123_457)])
def test_checksum_of_two_pieces(sizes):
    first, second = (os.urandom(size) for size in sizes)
    assert joined_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


# -- reading


def test_a_reader_takes_no_memory_of_its_own(store, process):
    tensors = {"byte": torch.ones(3, dtype=torch.uint8), **{f"w{i}": torch.ones(2**22) for i in range(8)}}
    path = store.save(2, {"actor": tensors}) / "actor.safetensors"
    size = 8 * 4 * 2**22  # 128 MiB
    total, private, mapped = process(memory_of_a_reader, path)
    assert total == 3 + 8 * 2**22
    assert private < size / 8 and mapped > size * 0.9  # pages of the file, which every reader of it shares


def test_one_of_two_writers_fails(store, process):
    """The kernel stops the second process's write (RLIMIT_FSIZE). Last: its process keeps the limit."""
    folder = store.begin(2)
    actor(folder)
    with pytest.raises(RunError) as caught:
        process(critic_on_a_full_disk, folder)
    assert f"{store.root}/step_2: File too large; 400" in str(caught.value) and "bytes are free" in str(caught.value)
    assert names(folder) == ["actor.safetensors", "hf"]
    store.abandon(2)
    still_step_1(store)
    assert json.loads((store.root / "step_1" / "manifest.json").read_text())["step"] == 1
    assert store.standing() == f"The last complete one is {store.root}/step_1"
