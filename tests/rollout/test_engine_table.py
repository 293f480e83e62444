"""The table of engines in docs/rollout.md is made from what tests found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import engine_table as engines


def test_the_page_has_the_table_of_the_record():
    found = engines.read(engines.RECORD)
    assert engines.BEGIN + engines.table(found) + engines.END in engines.PAGE.read_text(), (
        "python -m tests.engine_table"
    )
    assert set(found) >= {"`native`", "`vllm`", "`openai`, stand-in", "`sglang`, stand-in"}
    for engine, results in found.items():  # whole, but for what servers are tried on less
        assert "failed" not in results.values()
        assert engine == "`openai`, vLLM's server" or set(engines.CAPABILITIES.values()) <= results.keys()


def test_later_findings_stand_for_earlier_ones():
    a, b = {"x": {"p": "yes", "q": "no: r"}}, {"x": {"q": "yes"}, "y": {"p": "failed"}}
    assert engines.merged([a, b]) == {"x": {"p": "yes", "q": "yes"}, "y": {"p": "failed"}}
    assert engines.table(engines.merged([a, b])) == (
        "|  | x | y |\n| --- | --- | --- |\n| p | yes | failed |\n| q | yes |  |\n"
    )
    assert engines.differences({"x": {"q": "yes"}}, a) == ["x, q: yes, in the record: no: r"]


def finished(file: str | None, *reports: tuple[str, str, list[tuple[str, object]]]) -> tuple[engines.Found, int]:
    """What a run with these tests found, and its exit status."""
    collector: Any = engines.Collector(file)
    for test, outcome, properties in reports:
        name = f"tests/rollout/test_native.py::TestContract::{test}"
        collector.pytest_runtest_logreport(
            pytest.TestReport(name, ("", 0, ""), {}, outcome, None, "call", user_properties=properties)  # type: ignore
        )
    session = SimpleNamespace(config=SimpleNamespace(), exitstatus=0)
    collector.pytest_sessionfinish(session)
    return collector.found["`native`"], int(session.exitstatus)


def test_a_run_is_compared_with_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An engine that can do less than the record says, or more, ends the run with a failure."""
    monkeypatch.setattr(engines, "RECORD", tmp_path / "engines.json")
    engines.RECORD.write_text('{"`native`": {"stop texts": "yes", "single rows aborted": "no: why"}}')
    refused = [(engines.REFUSED, "why")]
    stop, abort = ("test_stop_texts", "passed", []), ("test_abort", "passed", refused)
    assert finished(None, stop, abort) == ({"stop texts": "yes", "single rows aborted": "no: why"}, 0)
    assert finished(None, stop, ("test_stop_texts", "skipped", [])) == ({"stop texts": "yes"}, 0)
    assert finished(None, ("test_stop_texts", "passed", refused), stop) == ({"stop texts": "no: why"}, 1)
    assert finished(None, stop, ("test_stop_texts", "failed", [])) == ({"stop texts": "failed"}, 1)
    assert finished(None, ("test_abort", "passed", [])) == ({"single rows aborted": "yes"}, 1)
    assert finished(None, ("test_same_call_same_bits", "passed", []))[1] == 1  # the record lacks it
    found, status = finished(str(tmp_path / "found.json"), ("test_abort", "passed", []))
    assert status == 0 and engines.read(tmp_path / "found.json") == {"`native`": found}
