"""The table is complete, unambiguous and printed in docs/metrics.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.metrics.names import METRICS, document, find, member, nearest
from verl.metrics.sinks import prometheus_name

PROMISED = [
    "reward/mean",
    "kl/mean",
    "policy/loss",
    "policy/entropy",
    "policy/clip_fraction",
    "policy/grad_norm",
    "time/step",
    "time/generate",
    "time/reward",
    "time/update",
    "time/publish",
    "throughput/tokens_per_second",
    "memory/peak_gib",
    "critic/loss",
    "generate/latency_p50",
    "generate/latency_p95",
    "generate/latency_p99",
]


def test_docs_are_up_to_date():
    docs = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert docs.read_text() == document(), "run: python -m verl.metrics.names > docs/metrics.md"


@pytest.mark.parametrize("name", PROMISED)
def test_promised_names_are_documented(name):
    assert find(name) == (METRICS[name], None)


def test_every_entry_says_everything():
    for m in METRICS.values():
        assert m.unit and m.meaning and m.reading, m.name


def test_families():
    assert find("reward/brevity") == (METRICS["reward/<name>"], "brevity")
    assert find("reward/brevity/count") == (METRICS["reward/<name>/count"], "brevity")
    assert find("reward/mean") == (METRICS["reward/mean"], None)
    assert find("policy/los") is None and nearest("policy/los") == "policy/loss"


@pytest.mark.parametrize("name", ["brevity", "mean", "abstained", "f/count", "", "two\nlines", "mean_", "ünï/cödé"])
def test_a_reward_may_have_any_name(name):
    full = member("reward/<name>", name)
    found = find(full)
    assert found is not None and found[0].name == "reward/<name>" and found[1].rstrip("_") == name.rstrip("_")


def test_prometheus_names_are_legal_and_distinct():
    names = [prometheus_name(name) for name in METRICS]
    assert len(set(names)) == len(names)
    assert prometheus_name("reward/mean") == "verl_reward_mean" and prometheus_name("reward/<name>") == "verl_reward"
