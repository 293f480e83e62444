from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.rewards.rows import make_rows
from verl.config.errors import RewardError
from verl.rewards.base import Rewards

GRADERS = "tests.rewards.graders:"


def children() -> set[int]:
    """Process ids of this process's scoring processes, zombies included."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = status.read_text().rsplit(")", 1)[1]
            command = (status.parent / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(rest.split()[1]) == os.getpid() and (not command or "verl.rewards.pool" in command):
            found.add(int(status.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_dead(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


def test_importing_the_worker_is_light() -> None:
    code = "import sys, verl.rewards.pool, verl.rewards.base, verl.rewards.rules; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("torch", "numpy", "transformers", "pydantic", "sympy"):
        assert f"'{heavy}'" not in loaded
    with Rewards([GRADERS + "heavy_modules"], processes=1) as rewards:
        assert rewards.score(make_rows(["a"])).totals == [0.0]


def test_close_ends_every_process_and_dropping_does_too() -> None:
    before = children()
    rewards = Rewards([GRADERS + "length"], processes=2)
    rewards.score(make_rows(["a"]))
    assert len(children() - before) == 2
    rewards.close()
    rewards.close()
    assert children() - before == set()
    dropped = Rewards([GRADERS + "length"], processes=1)
    dropped.score(make_rows(["a"]))
    del dropped
    assert children() - before == set()


def test_close_while_scoring_raises_there() -> None:
    rewards = Rewards([GRADERS + "hang"], processes=1)
    rewards.score(make_rows(["a"]))
    threading.Timer(0.3, rewards.close).start()
    with pytest.raises(RewardError, match="closed"):
        rewards.score(make_rows(["hang"]))


def test_a_dying_process_is_a_failure_of_its_row_only() -> None:
    with Rewards([GRADERS + "die"], processes=1, failure="drop") as rewards:
        scores = rewards.score(make_rows(["a", "die", "b"]))
        assert scores.totals == [1.0, None, 1.0] and scores.counts["failed"] == 1
    with Rewards([GRADERS + "die"], processes=1) as rewards, pytest.raises(RewardError, match="exit status 7"):
        rewards.score(make_rows(["die"]))


def test_what_a_hung_reward_started_dies_with_it(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    with Rewards([GRADERS + "child"], processes=1, timeout=1.0, failure="drop") as rewards:
        assert rewards.score(make_rows([str(told)])).totals == [None]
        assert wait_until_dead(int(told.read_text()), 5)


def test_async_functions_are_awaited_side_by_side_and_only_the_hung_row_fails() -> None:
    rows = make_rows(["x" * n for n in range(1, 17)])
    with Rewards([GRADERS + "judge"], processes=1, timeout=1.5, failure="drop") as rewards:
        rewards.score(rows[:1])
        start = time.perf_counter()
        assert rewards.score(rows).totals == [float(n) for n in range(1, 17)]
        assert time.perf_counter() - start < 4  # 16 x 0.3 s one after the other
        scores = rewards.score(make_rows(["a", "hang", "abc"]))
        assert scores.totals == [1.0, None, 3.0] and scores.counts["timed_out"] == 1
        scores = rewards.score(make_rows(["a", "block", "abc"]))  # not even cancelling works: each row goes alone
        assert scores.totals == [1.0, None, 3.0] and scores.counts["timed_out"] == 1


def test_what_cannot_be_a_score_is_told_not_pickled() -> None:
    with Rewards([GRADERS + "opaque"], processes=1) as rewards, pytest.raises(RewardError, match="received a function"):
        rewards.score(make_rows(["a"]))


def test_a_field_that_cannot_be_sent_is_told() -> None:
    rows = make_rows(["a"], answer=[threading.Lock()])
    with Rewards([GRADERS + "gold"], processes=1) as rewards, pytest.raises(RewardError, match="cannot pickle"):
        rewards.score(rows)


def test_a_script_without_main_guard_works_and_leaves_nothing(tmp_path: Path) -> None:
    """A worker doesn't run the caller's script again, and an exit without close() ends a hung one."""
    (tmp_path / "grade.py").write_text(
        "import os, time\ndef score(response):\n    open('pid', 'w').write(str(os.getpid()))\n"
        "    time.sleep(1000 if response == 'hang' else 0)\n    return 1.0\n"
    )
    (tmp_path / "script.py").write_text(
        "import sys, threading\nfrom tests.rewards.rows import make_rows\nfrom verl.rewards.base import Rewards\n"
        "print('begin')\nrewards = Rewards(['grade:score'], processes=1)\n"
        "print(rewards.score(make_rows(['a'])).totals)\n"
        "threading.Thread(target=rewards.score, args=(make_rows(['hang']),), daemon=True).start()\n"
        "import time; time.sleep(0.5)\n"
    )
    root = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "begin\n[1.0]\n"
    assert wait_until_dead(int((tmp_path / "pid").read_text()), 2)


def test_a_killed_run_leaves_no_hung_process(tmp_path: Path) -> None:
    """kill -9 of the run: nobody is left to kill a process that holds its own interpreter lock; the system does, and
    elsewhere than on Linux it ends itself."""
    (tmp_path / "grade.py").write_text(
        "import os, re\ndef score(response):\n    open('pid', 'w').write(str(os.getpid()))\n"
        "    return float(bool(re.match('(a+)+$', response)))\n"
    )
    (tmp_path / "script.py").write_text(
        "from tests.rewards.rows import make_rows\nfrom verl.rewards.base import Rewards\n"
        "Rewards(['grade:score'], timeout=1.0, processes=1).score(make_rows(['a' * 40 + '!']))\n"
    )
    environment: dict[str, Any] = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, env=environment)
    told = tmp_path / "pid"
    while not (told.exists() and told.read_text()):
        time.sleep(0.02)
    run.kill()
    run.wait()
    assert wait_until_dead(int(told.read_text()), 2 if sys.platform == "linux" else 1 + 5 + 3)


def test_a_call_whose_process_was_killed_is_made_once_more(tmp_path: Path) -> None:
    """As the system kills where memory runs out; who ends its process each time is told."""
    marks = [str(tmp_path / name) for name in "ab"]
    rewards = Rewards(["tests.rewards.graders:killed_once"], processes=1)
    assert rewards.score(make_rows(marks)).totals == [1.0, 1.0]
    rewards.close()
