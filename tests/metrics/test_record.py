from __future__ import annotations

import json
import logging
import math

import pytest

from verl.config.errors import RequestError
from verl.metrics.names import UndocumentedMetric
from verl.metrics.record import Recorder, mean_present, with_count
from verl.metrics.sinks import JsonlSink


class Kept:
    """A sink that remembers."""

    def __init__(self, fails: bool = False) -> None:
        self.lines: list[tuple[int, dict]] = []
        self.closed, self._fails = 0, fails

    def write(self, step, values):
        self.lines.append((step, dict(values)))

    def write_samples(self, step, samples):
        self.lines.append((step, {"samples": len(samples)}))

    def close(self):
        self.closed += 1
        if self._fails:
            raise OSError("broken")


def test_g17_mean_of_logged_values_skips_nan():
    nan = math.nan
    mean, count = mean_present([0.5, nan, nan, 0.8, 0.6, 0.7])
    assert mean == pytest.approx(0.65, abs=1e-12) and count == 4


@pytest.mark.parametrize("rows", [[0.5, None, 1.0], [None, 0.5, 1.0]])
def test_g17_sparse_key_has_a_mean_and_a_count_in_either_order(rows):
    assert with_count("extra/fmt", rows) == {"extra/fmt": 0.75, "extra/fmt/count": 2.0}


def test_nobody_judged():
    assert with_count("reward/f", [None, math.nan]) == {"reward/f": None, "reward/f/count": 0.0}
    assert mean_present([]) == (None, 0)
    assert mean_present([1.0, math.inf]) == (math.inf, 2)


def test_not_finite_values_are_absent_and_counted(tmp_path, caplog):
    recorder = Recorder([JsonlSink(tmp_path / "metrics.jsonl")])
    for step in (1, 2):
        recorder.step(step, {"reward/mean": math.nan, "policy/grad_norm": math.inf, "kl/mean": 0.5, "kl/coef": None})
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    present = [{name: value for name, value in line.items() if value is not None} for line in lines]
    assert present == [{"step": step, "kl/mean": 0.5, "not_finite": 2.0} for step in (1, 2)]
    assert caplog.text.count("policy/grad_norm is inf") == 1


def test_steps_only_grow():
    recorder = Recorder([])
    recorder.step(0, {})
    recorder.step(3, {})
    with pytest.raises(ValueError, match="step 3 was recorded after step 3"):
        recorder.step(3, {})


def test_undocumented_name_warns_once():
    recorder = Recorder([])
    with pytest.warns(UndocumentedMetric, match="policy/los"):
        recorder.step(1, {"policy/los": 1.0})
    recorder.step(2, {"policy/los": 1.0})


def test_alarm(caplog):
    sink = Kept()
    recorder = Recorder([sink], alarms={"generate/latency_p99": 30})
    with caplog.at_level(logging.WARNING):
        recorder.step(1, {"generate/latency_p99": 30.0})
        assert not caplog.records
        recorder.step(2, {"generate/latency_p99": 31.5})
    assert "generate/latency_p99 is 31.5, above its limit 30" in caplog.text
    assert sink.lines[0][1].get("alarms") is None and sink.lines[1][1]["alarms"] == 1.0
    with pytest.raises(RequestError, match="nearest: 'generate/latency_p99'"):
        Recorder([], alarms={"generate/latency_p9": 1})


def test_alarm_below_a_limit(caplog):
    sink = Kept()
    recorder = Recorder([sink], alarms={"kl/mean": 1}, alarms_below={"gpu/utilisation": 0.3, "kl/mean": 0.1})
    with caplog.at_level(logging.WARNING):
        recorder.step(1, {"gpu/utilisation": 0.3, "kl/mean": 0.5})
        recorder.step(2, {"kl/mean": 0.5})
        assert not caplog.records
        recorder.step(3, {"gpu/utilisation": 0.25, "kl/mean": 2.0})
    assert "gpu/utilisation is 0.25, below its limit 0.3" in caplog.text
    assert "kl/mean is 2, above its limit 1" in caplog.text
    assert [line.get("alarms") for _, line in sink.lines] == [None, None, 2.0]
    with pytest.raises(RequestError, match=r"metrics\.alarms_below: .*nearest: 'gpu/utilisation'"):
        Recorder([], alarms_below={"gpu/utilization": 1})


def test_close_reaches_every_sink_once():
    first, both, last = Kept(fails=True), Kept(), Kept()
    with pytest.raises(OSError, match="broken"):
        Recorder([first, both], [both, last]).close()
    assert (first.closed, both.closed, last.closed) == (1, 1, 1)
