"""G22: the last good checkpoint goes only after the new one is complete."""

from __future__ import annotations

import errno
import os
import shutil
import signal

import pytest
import torch

from tests.forks import FORKS
from verl.checkpoint.parts import write_parts
from verl.checkpoint.store import CheckpointStore
from verl.config.errors import RunError

SIZE = 50_000  # floats per save


def parts(step: int) -> dict:
    return {"actor": {"w": torch.full((SIZE,), float(step))}, "state": {"step": step}}


def assert_only(root, step: int) -> None:
    store = CheckpointStore(root)
    assert store.latest() == step and store.steps() == [step] and (root / "latest").read_text() == f"step_{step}\n"
    loaded = store.load()
    assert loaded.json("state") == {"step": step} and loaded.tensors("actor")["w"].eq(step).all()


class FullDisk:
    """Files that take ``room`` bytes together, then no more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, path):
        file = path.open("wb", buffering=0)
        disk = self

        class File:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                file.close()

            def write(self, data):
                if len(data) > disk.room:
                    file.write(data[: disk.room])
                    disk.room = 0
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                disk.room -= len(data)
                return file.write(data)

            flush, fileno = file.flush, file.fileno

        return File()


@pytest.mark.parametrize("room", [0, SIZE * 2, SIZE * 4 + 200])  # nothing, half of the tensors, all but the manifest
def test_g22_a_disk_full_half_way(room, tmp_path):
    CheckpointStore(tmp_path, keep=1).save(1, parts(1))
    with pytest.raises(RunError) as caught:
        CheckpointStore(tmp_path, keep=1, open_file=FullDisk(room)).save(2, parts(2))
    message = str(caught.value)
    assert f"{tmp_path}/step_2: No space left on device" in message and "bytes are needed" in message
    assert f"The last complete one is {tmp_path}/step_1" in message
    assert_only(tmp_path, 1)
    assert not [path for path in tmp_path.iterdir() if "step_2" in path.name]


def save_and_die(root, place: str) -> None:
    """Save step 2 with keep=1; killed at a place of the save. Runs in a process of its own."""

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def open_file(path):
        file = path.open("wb", buffering=0)
        if place == "tensors" and path.name == "actor.safetensors":
            file.write(b"half")
            die()
        if place == "manifest" and path.name == "manifest.json":
            die()
        if place == "renamed" and path.name == ".latest.partial":
            die()
        return file

    if place == "removal":
        shutil.rmtree = lambda path, **_: die() if path.name == ".step_1.deleted" else None
    CheckpointStore(root, keep=1, open_file=open_file).save(2, parts(2))


@pytest.mark.parametrize(("place", "resumes_from"), [("tensors", 1), ("manifest", 1), ("renamed", 1), ("removal", 2)])
def test_g22_b_killed_half_way(place, resumes_from, tmp_path):
    CheckpointStore(tmp_path, keep=1).save(1, parts(1))
    child = FORKS.Process(target=save_and_die, args=(tmp_path, place))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    restarted = CheckpointStore(tmp_path, keep=1)
    assert restarted.latest() == resumes_from
    assert restarted.load().json("state") == {"step": resumes_from}
    restarted.save(2, parts(2))
    assert_only(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_2"]


def write_half_and_die(folder) -> None:
    """The second of two writers; killed in the middle of its part."""

    def die():
        yield "w", torch.ones(SIZE)
        os.kill(os.getpid(), signal.SIGKILL)

    write_parts(folder, {"critic": die()})


def test_g22_b_one_of_two_writers_killed_half_way(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, parts(1))
    folder = store.begin(2)
    entries = write_parts(folder, parts(2))
    child = FORKS.Process(target=write_half_and_die, args=(folder,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL and (folder / "critic.safetensors").stat().st_size > 0
    assert_only(tmp_path, 1)  # a controller killed now resumes from it
    with pytest.raises(
        RunError, match=rf"critic\.safetensors was written by nobody.* complete one is {tmp_path}/step_1"
    ):
        store.commit(2, entries)
    assert_only(tmp_path, 1)
    store.save(2, parts(2))
    assert_only(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_2"]


def test_g22_normal_restart_leaves_exactly_one(tmp_path):
    CheckpointStore(tmp_path, keep=1).save(1, parts(1))
    seen = []

    def watching(path):
        seen.append(CheckpointStore(tmp_path).latest())
        return path.open("wb")

    CheckpointStore(tmp_path, keep=1, open_file=watching).save(2, parts(2))
    assert set(seen) == {1}  # until the last file, "latest" itself, is written
    assert_only(tmp_path, 2)
