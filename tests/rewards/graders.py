"""Reward functions that tests name as ``tests.rewards.graders:<function>``; they run in scoring processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time

FOREVER = 10_000.0


def length(response: str) -> float:
    return float(len(response))


def gold(response: str, answer: str) -> bool:
    return response == answer


def hang(response: str) -> float:
    if response == "hang":
        time.sleep(FOREVER)
    return float(len(response))


def backtrack(response: str) -> float:
    """Holds the interpreter lock for hours on 40 a's and "!"."""
    return float(bool(re.match(r"(a+)+$", response)))


def die(response: str) -> float:
    if response == "die":
        os._exit(7)
    return 1.0


def killed_once(response: str) -> float:
    """Of the file that the response names, the first call is."""
    if not os.path.exists(response):
        open(response, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def raises(response: str) -> float:
    if response == "bad":
        raise ZeroDivisionError("no such thing")
    return 1.0


async def judge(response: str) -> float:
    if response == "block":
        time.sleep(FOREVER)  # blocks the event loop
    await asyncio.sleep(FOREVER if response == "hang" else 0.3)
    return float(len(response))


def batch(responses: list[str], answers: list[str]) -> list[bool]:
    return [r == a for r, a in zip(responses, answers, strict=True)]


def child(response: str) -> float:
    """Starts a process that would outlive this one, tells its id, and hangs."""
    process = subprocess.Popen(["sleep", "1000"])
    with open(response, "w") as file:
        file.write(str(process.pid))
    time.sleep(FOREVER)
    return 0.0


def heavy_modules(response: str) -> float:
    """How many heavy packages this process imported."""
    return float(sum(name in sys.modules for name in ("torch", "transformers", "pydantic", "numpy")))


def opaque(response: str) -> object:
    return lambda: response


def one_for_all(completions: list[str]) -> list[float]:
    return [1.0]


def slow(response: str) -> float:
    time.sleep(0.3)
    return float(len(response))
