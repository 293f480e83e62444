"""Whose a run folder is, and what an overwrite takes away."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from verl.config.errors import RequestError
from verl.trainer.folder import LOCK, WRITTEN, Claim, clear, holds_run, write_whole

HOLDS = """
import sys
from pathlib import Path
from verl.trainer.folder import Claim
claim = Claim(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """Until it ends, be it by SIGKILL."""
    folder = tmp_path / "a" / "run"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(RequestError, match=rf"run is in use by process {other.pid} on .*: stop that one first"):
            Claim(folder)
    finally:
        other.kill()
        other.wait()
    claim = Claim(folder)
    with pytest.raises(RequestError, match="in use by an earlier trainer of this process"):
        Claim(folder)  # nor two in one process
    claim.drop()
    again = Claim(folder)
    again.drop()
    again.drop()


def test_a_claim_on_nothing_leaves_nothing(tmp_path: Path) -> None:
    Claim(tmp_path / "a" / "b").drop()
    assert list(tmp_path.iterdir()) == []
    claim = Claim(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    claim.drop()
    assert {p.name for p in (tmp_path / "run").iterdir()} == {LOCK, "metrics.jsonl"}


def test_a_file_is_the_old_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_whole(path, "a: 1\n")
    before = path.stat().st_ino
    write_whole(path, "a: 1\n")
    assert path.stat().st_ino == before
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(path, "b: " + "x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    assert path.read_text() == "a: 1\n"
    write_whole(path, "b: 2\n")
    assert path.read_text() == "b: 2\n" and [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_only_what_a_run_wrote_goes(tmp_path: Path) -> None:
    """A folder is a run's where more than a configuration lies there, which may be its user's."""
    (tmp_path / "config.yaml").write_text("mine")
    assert not holds_run(tmp_path)
    kept = tmp_path / "kept"
    for folder in (tmp_path, kept):
        folder.mkdir(exist_ok=True)
        for name in ("rewards.py", ".git/HEAD", "model/config.json", "logs/controller.log"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("x")
    for name in ("metrics.jsonl", "checkpoints/latest", "tensorboard/events", "eval.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "samples.jsonl").symlink_to(kept / "rewards.py")
    assert holds_run(tmp_path)
    clear(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"rewards.py", ".git", "model", "logs", "kept"}
    assert (kept / "rewards.py").exists() and "logs" in WRITTEN
