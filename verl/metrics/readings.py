"""What the machine says: memory, GPU utilisation, latencies. Torch is imported only for a CUDA device."""

from __future__ import annotations

import importlib.util
import resource
import statistics
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 2**30


def latency_percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """``generate/latency_p50``, ``_p95`` and ``_p99`` of the rows' seconds, interpolated linearly; no rows: none."""
    if not seconds:
        return {}
    ordered = sorted(seconds)

    def percentile(q: float) -> float:
        place = q * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return {f"generate/latency_p{q}": percentile(q / 100) for q in (50, 95, 99)}


def memory_readings(device: torch.device) -> dict[str, float]:
    """Memory of the process and, for a CUDA device, of the GPU since the last call (the peak starts again).

    ``memory/peak_gib`` on the CPU is the process's peak since it began: the system keeps no other.
    """
    readings = {}
    statm = Path("/proc/self/statm")
    if statm.exists():
        readings["memory/rss_gib"] = int(statm.read_text().split()[1]) * resource.getpagesize() / GIB
    if device.type != "cuda":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
        return readings | {"memory/peak_gib": peak * unit / GIB}
    import torch

    stats = torch.cuda.memory_stats(device)
    reserved = stats.get("reserved_bytes.all.current", 0)
    readings["memory/peak_gib"] = stats.get("allocated_bytes.all.peak", 0) / GIB
    readings["memory/reserved_gib"] = reserved / GIB
    # free pieces of blocks that are partly in use: the allocator can neither return nor always reuse them
    readings["memory/fragmentation"] = stats.get("inactive_split_bytes.all.current", 0) / reserved if reserved else 0.0
    readings["memory/alloc_retries"] = float(stats.get("num_alloc_retries", 0))
    torch.cuda.reset_peak_memory_stats(device)
    return readings


def free_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes of host memory that this process can still have, by the machine and by the limits of its control groups
    (version 2); ``None`` where the system doesn't tell."""
    try:
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
        own = (proc / "self" / "cgroup").read_text().splitlines()[-1].rpartition(":")[2].lstrip("/")
        for group in (groups / own, *(groups / own).parents):
            if group.is_relative_to(groups) and (group / "memory.max").exists():
                limit = (group / "memory.max").read_text().strip()
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])  # a cache can go
                free = free if limit == "max" else min(free, max(int(limit) - used, 0))
    except (OSError, KeyError, ValueError, IndexError):
        return None
    return free


class UtilisationMeter:
    """Samples a GPU's utilisation in a thread; a single reading between two stages would say nothing.

    Gives no metric on a CPU, and none where NVML's Python binding (``nvidia-ml-py``) isn't installed.
    """

    def __init__(self, device: torch.device, interval: float = 0.5) -> None:
        self._device, self._interval = device, interval
        self._seen: list[int] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if device.type == "cuda" and importlib.util.find_spec("pynvml") is not None:
            self._thread = threading.Thread(target=self._watch, name="gpu-utilisation", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        import torch

        while not self._stop.wait(self._interval):
            self._seen.append(torch.cuda.utilization(self._device))

    def read(self) -> dict[str, float]:
        """``gpu/utilisation``, the mean share since the last call."""
        seen, self._seen = self._seen, []
        return {"gpu/utilisation": statistics.fmean(seen) / 100} if seen else {}

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
