"""The list of measurements names what there is; a job that lasts too long ends with all it started."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


def listed(name: str) -> list[str]:
    told = subprocess.run(
        [sys.executable, "benchmarks/series.py", name, "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return told.stdout.splitlines()


@pytest.mark.parametrize("name", ["one", "two"])
def test_what_is_run_exists(name: str) -> None:
    files = [file for line in listed(name) for file in re.findall(r"(?:benchmarks|tests)/[\w./]+", line)]
    assert files and all((ROOT / file).exists() for file in files)


def test_a_job_ends_in_time_with_its_processes(tmp_path: Path) -> None:
    script = """
import sys
sys.path.insert(0, "benchmarks")
import series
series.SETS["one"] = [
    series.Job("long", 2, "echo begun; sleep 3217 & sleep 3217", toy=""),
    series.Job("short", 2, "echo {tmp}; exit 3", toy=""),
    series.Job("late", 500, "echo never", toy=""),
]
sys.argv = ["series.py", "one", "--toy", "--seconds", "60", "--out", sys.argv[1]]
sys.exit(series.main())
"""
    told = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert told.returncode == 1, told.stderr
    assert "== long: stopped after 2 s" in told.stdout and "begun" in told.stdout
    assert "== short: failed, status 3" in told.stdout and "late             not begun" in told.stdout
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "3217"]]
    assert not Path((tmp_path / "short.log").read_text().strip()).exists()
