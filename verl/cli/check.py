"""``verl check``: a line for each thing that must hold, and the exit status."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

from verl.cli.train import hush
from verl.config.run import RunConfig
from verl.trainer.check import check as look

MARKS = {"ok": "[green]ok   [/]", "look": "[yellow]look [/]", "wrong": "[red]WRONG[/]", "unknown": "[dim]?    [/]"}


def check(load: Callable[..., RunConfig], rows: int) -> int:
    hush()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # its folder goes, too
    console = Console(highlight=False, soft_wrap=True)
    what, findings = look(load, rows)
    console.print(what)
    for finding in findings:
        console.print(f"{MARKS[finding.verdict]} {finding.what}: {escape(finding.text)}")
    wrong = sum(finding.verdict == "wrong" for finding in findings)
    console.print(f"{wrong} of {len(findings)} are wrong" if wrong else "nothing is wrong")
    return int(wrong > 0)
