from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.rewards.rows import make_rows
from tests.rewards.test_pool import children
from verl.config.errors import RequestError, RewardError
from verl.rewards import code as rule
from verl.rewards.base import Rewards
from verl.rewards.functions import resolve

DOUBLE = "def f(x):\n    return 2 * x\n"
ASSERTS = ["assert f(1) == 2", "assert f(4) == 8"]


def judge(program: str, tests: Any = ASSERTS, column: str = "answer", **options: Any) -> float:
    fields = {name: [options.pop(name)] for name in list(options) if name in ("entry_point", "test_setup_code")}
    options |= {} if column in rule.COLUMNS else {"column": column}
    (row,) = make_rows([program], **{column: [tests]}, **fields)
    return rule.code(row, **options)["score"]


def prints(program: str, given: str = "", **options: Any) -> str:
    """What a program that ends well prints, read back by trying it against what it should be."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rule, "same_output", lambda ours, theirs: seen.append(ours) or True)
        judge(program, {"inputs": [given], "outputs": [""]}, **options)
    return seen[0].strip() if seen else "(died)"


CHECK = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(4) == 8\n"
CALLS = {"fn_name": "f", "inputs": [[1], [4]], "outputs": [2, [8]]}
LINES = {"inputs": ["1\n", "4"], "outputs": ["2\n", "8"]}
READS = "print(2 * int(input()))"


@pytest.mark.parametrize(
    ("column", "tests", "right", "more"),
    [
        ("answer", "assert f(1) == 2\nassert f(4) == 8", DOUBLE, {}),
        ("test_list", ASSERTS, DOUBLE, {}),
        ("test_list", ["assert g(4) == 8"], DOUBLE, {"test_setup_code": "g = f"}),
        ("tests", json.dumps(ASSERTS), DOUBLE, {}),
        ("test", CHECK, DOUBLE, {"entry_point": "f"}),
        ("tests", f"{CHECK}\ncheck(f)", DOUBLE, {}),
        ("answer", CALLS, DOUBLE, {}),
        ("answer", CALLS, "class Solution:\n  def f(self, x):\n    return (8,) if x == 4 else 2 * x", {}),
        ("answer", LINES, READS, {}),
        ("answer", json.dumps(LINES), READS, {}),
        ("tests", [{"input": "1", "output": "2"}, {"input": "4", "output": "8", "type": "stdin_stdout"}], READS, {}),
        ("mine", {"inputs": [["1", "4"]], "outputs": [["2", "8"]]}, f"{READS};{READS}", {}),
    ],
)
def test_the_usual_forms_of_tests(column: str, tests: Any, right: str, more: dict[str, Any]) -> None:
    assert judge(right, tests, column, **more) == 1.0
    assert judge(right.replace("2 * ", "3 * ").replace("(8,)", "8.5"), tests, column, **more) == 0.0


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, "the row has no tests: looked for tests, test, test_list, answer"),
        ([], "holds no tests that rule 'code' knows"),
        (42, "it is a int"),
        ("42", "run nothing"),
        (CHECK, "run nothing .HumanEval's form needs an entry_point"),
        ("def check(", "are no Python"),
        (["assert f(1) == 2", "# nothing"], "run nothing"),
        ({"inputs": ["1"], "outputs": []}, "as many outputs as inputs"),
    ],
)
def test_tests_that_cannot_be_read_are_an_error_not_a_zero(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        judge(DOUBLE, tests)
    with Rewards(["code"], processes=1) as rewards, pytest.raises(RewardError, match=r"rule 'code'.*row 0 \(p0/0\)"):
        rewards.score(make_rows([DOUBLE], answer=[tests]))


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("a = 1", "a = 1"),
        ("so\n```python\na = 1\n```\nand\n```python\na = 2\n```\nthat is it", "a = 2"),
        ("```py\na = 1\n```\n```\noutput\n```", "a = 1"),
        ("```\na = 1\n```", "a = 1"),
        ("```bash\nls\n```\n```Python\na = 1\n\n  b\n```", "a = 1\n\n  b"),
        ("```python\na = 1\nb =", "a = 1\nb ="),
    ],
)
def test_the_program_is_the_last_python_block(response: str, program: str) -> None:
    assert rule.program_of(response).strip() == program


def test_partial_credit_and_numbers_beside_the_score() -> None:
    rows = make_rows([DOUBLE, "def f(x): return 2", "def f(x):\n while x > 1: pass\n return 2"], answer=[ASSERTS] * 3)
    functions = [{"name": "code", "timeout": 1.5}, {"name": "code", "partial": True, "timeout": 1.5}]
    with Rewards(functions, processes=1) as rewards:
        scores = rewards.score(rows)
    assert scores.per_reward == {"code": [1.0, 0.0, 0.0], "code_2": [1.0, 0.5, 0.5]}
    assert scores.extra["code/passed_share"] == [1.0, 0.5, 0.5]
    assert scores.extra["code/timed_out"] == [0.0, 0.0, 1.0]
    assert judge("print(2)", {"inputs": ["1", "4", "1"], "outputs": ["2", "8", "2"]}, partial=True) == 2 / 3
    assert judge("def f(x): return 8", "x = f(1)\nassert x == 2\nassert f(4) == 8", partial=True) == 0.5


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ("1 2\n3\n", "1  2 \n3", True),
        ("0.5000001", "0.5", True),
        ("0.51", "0.5", False),
        ("10000000000000001", "10000000000000000", False),
        ("1\n2", "1 2", False),
        ("", "", True),
        ("yes.", "no.", False),
    ],
)
def test_outputs_are_compared_word_by_word(ours: str, theirs: str, same: bool) -> None:
    assert rule.same_output(ours, theirs) == same


CHEATS = {
    "exits": "import sys; sys.exit(0)",
    "exits hard": "import os; os._exit(0)",
    "exits when called": "import sys\ndef f(x): sys.exit(0)",
    "exits hard when called": "import os\ndef f(x): os._exit(0)",
    "raises": "raise ValueError",
    "no Python": "def f(x) return",
    "null byte": "a = '\0'",
    "lone surrogate": "a = '\ud800'",
    "equals everything": "class E:\n  def __eq__(self, other): return True\nf = lambda x: E()",
    "builtins": "import builtins\nbuiltins.all = builtins.bool = lambda *_: True\ndef f(x): return 0",
    "builtins by name": "__builtins__['all'] = lambda *_: True\ndef f(x): return 0",
    "shadow": "def all(_): return True\ndef f(x): return 0",
    "a module": "import math\nmath.isclose = lambda *_: True\ndef f(x): return 0",
    "no assertion": "import builtins\nbuiltins.AssertionError = ZeroDivisionError\ndef f(x): return 0",
    "the compiler": "import builtins\nbuiltins.exec = builtins.compile = lambda *a: None\ndef f(x): return 0",
    "its own check": "def check(f): pass\ndef f(x): return 0",
    "says it passed": (
        "import os\nfor fd in range(64):\n  try: os.write(fd, b'ready\\n0\\n1\\npassed\\n')\n  except OSError: pass"
    ),
    "patched channel": "import os\nw = os.write\nos.write = lambda fd, b: w(fd, b + b'1\\n')\ndef f(x): return 0",
}
TESTS = ["import math\nassert math.isclose(f(1), 2)", "assert all([f(4) == 8])", f"{CHECK}\ncheck(f)"]


@pytest.mark.parametrize("name", CHEATS)
def test_what_does_not_pass(name: str) -> None:
    assert judge(CHEATS[name], TESTS, partial=True) == 0.0
    assert judge(CHEATS[name], CHECK, entry_point="f") == 0.0
    assert judge(DOUBLE, TESTS) == 1.0


def test_a_function_named_like_a_builtin_is_tested_where_entry_point_names_it() -> None:
    program = "def sum(x): return 7"
    assert judge(program, "assert sum([1]) == 7") == 0.0
    assert judge(program, "assert sum([1]) == 7", entry_point="sum") == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import signal, time\nfor s in (1, 2, 3, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(1000)",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()",
    ],
)
@pytest.mark.parametrize("tests", [ASSERTS, LINES], ids=["asserts", "cases"])
def test_what_does_not_end_is_ended_and_leaves_nothing(
    program: str, tests: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before, start = running(), time.perf_counter()
    (row,) = make_rows([f"open('left', 'w').write('x')\n{program}"], answer=[tests])
    result = rule.code(row, timeout=2.0 if "Thread" in program else 0.6)  # one must get to its end first
    assert result["score"] == 0.0 and time.perf_counter() - start < 10
    assert result["timed_out"] == float("Thread" not in program or tests is LINES)
    assert running() <= before and not list(tmp_path.iterdir())


def running() -> set[int]:
    """Sandboxed processes, by id: this process's and orphans, not those of test processes beside this one."""
    parents, sandboxed = {}, set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if "sandbox.py" in (path / "cmdline").read_text():
                sandboxed.add(int(path.name))
        except OSError:
            continue
    found = set()
    for pid in sandboxed:
        line = [pid]
        while line[-1] in parents:
            line.append(parents[line[-1]])
        if os.getpid() in line or os.getppid() not in line:
            found.add(pid)
    return found


def test_a_sandbox_that_does_not_start_is_an_error_not_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "_SCRIPT", "/no/such/script.py")
    with pytest.raises(RuntimeError, match="the sandbox did not start"):
        judge(DOUBLE)


def test_a_folder_that_a_program_closed_is_removed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = "import os\nos.makedirs('a/b/c'); os.chmod('a/b', 0); os.chmod('a', 0); os.symlink('/', 'root'); print(1)"
    assert prints(program) == "1" and not list(tmp_path.iterdir())


def test_it_runs_in_the_scoring_processes_and_dies_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a killed scoring process can't clear up
    before = children()
    rows = make_rows([f"```python\n{DOUBLE}```", "import time; time.sleep(1000)"], answer=[ASSERTS] * 2)
    rewards = Rewards([{"name": "code", "timeout": 50}], processes=1)
    assert rewards.score(rows[:1]).totals == [1.0]
    known = running()
    with pytest.raises(RewardError, match="closed"):
        threading.Timer(0.5, rewards.close).start()
        rewards.score(rows)
    deadline = time.monotonic() + 3
    while running() - known and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not running() - known and children() <= before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 60}, "timeout 60 must be under reward_timeout 60"),
        ({"timeout": 0}, "timeout must be above 0"),
        ({"memory_mb": 1}, "memory_mb at least 64"),
        ({"network": True}, "has no option 'network'; it has column, partial, timeout, memory_mb"),
    ],
)
def test_wrong_options_are_told_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        resolve({"name": "code", **options}, 60.0)
