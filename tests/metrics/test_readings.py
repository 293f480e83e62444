from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from verl.metrics.names import find
from verl.metrics.readings import UtilisationMeter, latency_percentiles, memory_readings


def test_latency_percentiles_are_numpys():
    seconds = [random.Random(0).expovariate(1) for _ in range(101)]
    expected = np.percentile(seconds, [50, 95, 99])
    assert list(latency_percentiles(seconds).values()) == pytest.approx(expected.tolist(), rel=1e-12)
    assert latency_percentiles([2.0]) == {f"generate/latency_p{q}": 2.0 for q in (50, 95, 99)}
    assert latency_percentiles([]) == {}


def test_cpu_memory():
    before = memory_readings(torch.device("cpu"))
    held = torch.ones(2**26)  # 256 MiB
    after = memory_readings(torch.device("cpu"))
    assert 0.01 < before["memory/rss_gib"] < before["memory/peak_gib"] * 1.05 < 64
    assert 0.2 < after["memory/rss_gib"] - before["memory/rss_gib"] < 0.35
    assert all(find(name) for name in after)
    del held


def test_cpu_has_no_gpu_utilisation():
    meter = UtilisationMeter(torch.device("cpu"))
    assert meter.read() == {}
    meter.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_memory():
    device = torch.device("cuda")
    memory_readings(device)
    held = torch.ones(2**28, device=device)  # 1 GiB
    del held
    first, second = memory_readings(device), memory_readings(device)
    assert first["memory/peak_gib"] == pytest.approx(1, abs=0.1) and second["memory/peak_gib"] < 0.1
    assert first["memory/reserved_gib"] >= 1 and first["memory/alloc_retries"] == 0
    assert 0 <= first["memory/fragmentation"] <= 1 and all(find(name) for name in first)


def test_metrics_import_no_torch():
    code = "import sys, verl.metrics.sinks, verl.metrics.readings; assert not {'torch', 'tensorboard'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
