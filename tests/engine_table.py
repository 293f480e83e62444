"""What each rollout engine can do, as the tests found it: the table of docs/rollout.md.

    pytest --engines found.json tests/rollout tests/trainer/test_environment.py    # here, with vLLM, or on a GPU
    python -m tests.engine_table found.json ...                                    # into the record and the table

The record is ``tests/rollout/engines.json``: engine, capability, ``yes`` or ``no: why``. Every run of these tests is
compared with it, for the engines and capabilities that it tried.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "rollout" / "engines.json"
PAGE = ROOT / "docs" / "rollout.md"
BEGIN, END = "<!-- made by tests/engine_table.py -->\n", "<!-- end -->\n"
REFUSED = "refused"  # property of a test that passes because the engine says what it can't do

Found = dict[str, dict[str, str]]
"""By engine and capability: ``yes``, ``no: why``, or ``failed``."""

# the engines, by where their tests are
ENGINES = {
    r"tests/rollout/test_native\.py::TestContract::": "`native`",
    r"tests/rollout/test_vllm\.py::TestContract::": "`vllm`",
    r"tests/rollout/test_http\.py::TestVllm::": "`openai`, stand-in",
    r"tests/rollout/test_http\.py::TestSglang::": "`sglang`, stand-in",
    r"tests/rollout/test_vllm_serve\.py::": "`openai`, vLLM's server",
}
# the capabilities, by the tests that show them
CAPABILITIES = {
    r"test_logprobs_are_those_of_a_plain_forward|test_rows_are_the_models": "log-probabilities of a plain forward",
    r"test_greedy_equals_generate": "greedy tokens of `generate`",
    r"test_the_first_token_is_drawn_from_the_distribution\[all\]": "drawn from the distribution at a temperature",
    r"test_the_first_token_is_drawn_from_the_distribution": "`top_k` and `top_p`, told in the log-probability",
    r"test_noise_differs": "noise of its own for sample, prompt, seed",
    r"test_batching_changes_no_token": "batching and order change no token",
    r"test_same_call_same_bits": "the same call, the same bits",
    r"test_the_end_of_a_row": "any ids end a row",
    r"test_stop_texts": "stop texts",
    r"test_new_weights_change_the_next_token": "new weights from the next token on",
    r"test_weights_that_do_not_fit": "weights that don't fit refused by name",
    r"test_refused_requests|test_abort_and_refusals": "requests that don't fit refused by name",
    r"test_abort": "single rows aborted",
    r"test_a_caller_may_stop_early": "a caller may leave",
}
# what other tests show: test, engine, capability
ELSEWHERE = (
    (r"test_g20_\w+\.py::test_the_engine_samples_from_the_new_policy\[(lora|head)\]", "`native`", "adapters (LoRA)"),
    (r"tests/rollout/test_vllm\.py::test_adapters", "`vllm`", "adapters (LoRA)"),
    (r"tests/rollout/test_http\.py::test_adapters", "`openai`, stand-in", "adapters (LoRA)"),
    (r"test_vllm_serve\.py::test_weights_and_adapters_lost", "`openai`, vLLM's server", "adapters (LoRA)"),
    (r"test_sglang_takes_no_adapters", "`sglang`, stand-in", "adapters (LoRA)"),
    (r"test_environment\.py::test_resumed_from_every_step", "`native`", "episodes"),
    (r"test_environment\.py::test_vllm_samples_the_episodes", "`vllm`", "episodes"),
    (r"test_environment\.py::test_servers_sample_episodes\[openai\]", "`openai`, stand-in", "episodes"),
    (r"test_environment\.py::test_servers_sample_episodes\[sglang\]", "`sglang`, stand-in", "episodes"),
)
ORDER = [*dict.fromkeys([*CAPABILITIES.values(), *(capability for *_, capability in ELSEWHERE)])]
COLUMNS = ["`native`", "`vllm`", "`openai`, vLLM's server", "`openai`, stand-in", "`sglang`, stand-in"]


def shown_by(test: str) -> tuple[str, str] | None:
    """Engine and capability that a test (its id) is about."""
    for pattern, engine, capability in ELSEWHERE:
        if re.search(pattern, test):
            return engine, capability
    engine = next((name for pattern, name in ENGINES.items() if re.search(pattern, test)), None)
    capability = next((what for pattern, what in CAPABILITIES.items() if re.search(f"::({pattern})", test)), None)
    return (engine, capability) if engine is not None and capability is not None else None


class Collector:
    """A plugin of pytest: notes what the tests show of engines, and compares it with the record."""

    def __init__(self, file: str | None) -> None:
        self.file, self.found = file, Found()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        shown = shown_by(report.nodeid)
        if shown is None or report.skipped or (report.when != "call" and report.passed):
            return
        engine, capability = shown
        why = next((str(value) for name, value in report.user_properties if name == REFUSED), None)
        result = "failed" if report.failed else "yes" if why is None else f"no: {why}"
        before = self.found.setdefault(engine, {}).get(capability, "yes")
        self.found[engine][capability] = result if before == "yes" or result == "failed" else before

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):  # of several processes the first one sees all reports
            return
        if self.file is not None:
            Path(self.file).write_text(json.dumps(self.found, indent=1, sort_keys=True) + "\n")
        elif other := differences(self.found, read(RECORD) if RECORD.exists() else {}):
            print("\ntests/rollout/engines.json says otherwise (python -m tests.engine_table):", *other, sep="\n  ")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def differences(found: Found, record: Found) -> list[str]:
    """Where tests that ran found something else than the record has."""
    return [
        f"{engine}, {capability}: {result}, in the record: {record.get(engine, {}).get(capability, 'nothing')}"
        for engine, results in found.items()
        for capability, result in results.items()
        if record.get(engine, {}).get(capability) != result
    ]


def read(file: Path) -> Found:
    found: Found = json.loads(file.read_text())
    return found


def merged(parts: Iterable[Found]) -> Found:
    """Later findings stand for earlier ones."""
    whole: Found = {}
    for part in parts:
        for engine, results in part.items():
            whole.setdefault(engine, {}).update(results)
    return whole


def table(found: Mapping[str, Mapping[str, str]]) -> str:
    """A line for each capability, a column for each engine; empty where no test has tried."""
    engines = [*(name for name in COLUMNS if name in found), *sorted(set(found) - set(COLUMNS))]
    there = {capability for results in found.values() for capability in results}
    rows = [name for name in ORDER if name in there] + sorted(there - set(ORDER))
    lines = [["", *engines], ["---"] * (len(engines) + 1)]
    lines += [[name, *(found[engine].get(name, "") for engine in engines)] for name in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(files: list[str]) -> None:
    found = merged([read(RECORD) if RECORD.exists() else {}, *(read(Path(file)) for file in files)])
    RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    PAGE.write_text(before + begin + table(found) + end + after)


if __name__ == "__main__":
    main(sys.argv[1:])
