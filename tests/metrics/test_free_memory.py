"""Memory that is left: the machine's, or what control groups allow."""

from __future__ import annotations

from pathlib import Path

from verl.metrics.readings import free_memory


def group(folder: Path, limit: int | str, current: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nactive_file 7\n")


def test_the_least_of_all_limits_counts(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       2000 kB\nMemAvailable:   1000 kB\nHugePages_Total:       0\n")
    (proc / "self" / "cgroup").write_text("0::/pod/one\n")
    groups.mkdir()
    assert free_memory(proc, groups) == 1000 * 1024
    group(groups / "pod" / "one", "max", 10, 0)
    assert free_memory(proc, groups) == 1000 * 1024
    group(groups / "pod", 600_000, 200_000, 50_000)
    assert free_memory(proc, groups) == 450_000
    group(groups / "pod" / "one", 500_000, 450_000, 100_000)
    assert free_memory(proc, groups) == 150_000
    group(groups, 100, 900, 100)  # within a container its own group is the root
    assert free_memory(proc, groups) == 0


def test_where_nothing_is_told(tmp_path: Path) -> None:
    assert free_memory(tmp_path, tmp_path) is None
    here = free_memory()
    assert here is None or here > 0
