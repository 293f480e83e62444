"""``verl train``, ``resume`` and ``eval``: what happens before, between and after the laps on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import transformers
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl.checkpoint.store import Checkpoint
from verl.config.errors import RequestError
from verl.config.run import RunConfig
from verl.trainer.base import AllDone, Run, Summary
from verl.trainer.evaluation import Answer
from verl.trainer.folder import holds_run, quoted

SHOWN = 3


def train(cfg: RunConfig, config: Path, *, overwrite: bool = False) -> int:
    """A new run of the file ``config``; the exit status."""
    folder = Path(cfg.run_dir)
    if not holds_run(folder) and config.resolve() == (folder / "config.yaml").resolve():
        raise RequestError(
            f"run_dir is {folder}, where a run writes a config.yaml of its own in place of {config}: name another "
            f"folder, such as run_dir={folder / 'run'}"
        )
    if holds_run(folder) and not overwrite:
        raise RequestError(
            f"{folder} already holds a run: continue it with 'verl resume {quoted(folder)}', name another run_dir, "
            "or replace it with --overwrite"
        )
    return _train(Run(cfg), None, overwrite=overwrite)


def resume(cfg: RunConfig, *, allow_changes: bool = False, as_it_was: bool = False) -> int:
    """Continue from the latest checkpoint, or from the start where none was ever saved; the exit status. ``as_it_was``:
    nothing else was asked for, so of a run that is done already that is told, and no error."""
    run = Run(cfg)
    if (last := run.last()) is not None:
        try:
            return _train(run, last, allow_changes=allow_changes)
        except AllDone as told:
            if not as_it_was:
                raise
            Console().print(str(told), highlight=False, soft_wrap=True)
            return 0
    Console().print(f"{run.store.root} holds no checkpoint yet: from the start", highlight=False)
    return _train(run, None)


def _train(run: Run, checkpoint: Checkpoint | None, **how: bool) -> int:
    hush()
    console = Console()
    with run:
        run.prepare(checkpoint, **how)
        summary = run.train()
    if summary.stopped_by is not None:
        if summary.step:
            on = f"go on with: verl resume {quoted(run.folder)}"
            if run.cfg.checkpoint.save == "actor":
                on = f"its weights: verl export {quoted(run.folder)} OUT"
            console.print(f"stopped after step {summary.step}; {on}", highlight=False)
        else:
            console.print("stopped before the first step; nothing was saved", highlight=False)
        return 128 + summary.stopped_by
    _report(console, run, summary)
    return 0


def _report(console: Console, run: Run, summary: Summary) -> None:
    before, after = summary.before, summary.after
    if before and after and [a.prompt for a in before.answers] != [a.prompt for a in after.answers]:
        before = None  # of another held-out set, before a resume changed it
    if after is not None:
        what = "prompts, greedy" if after.answers else "rows"
        table = Table(title=f"held-out {what} ({after.metrics['eval/rows']:.0f})", title_justify="left")
        table.add_column("")
        if before is not None:
            table.add_column("before", justify="right")
        table.add_column("after", justify="right")
        for name, value in after.metrics.items():
            if name not in ("eval/rows", "time/eval"):
                old = [] if before is None else [f"{before.metrics.get(name, float('nan')):.3f}"]
                table.add_row(name.removeprefix("eval/"), *old, f"{value:.3f}")
        console.print(table)
    if after is not None and after.answers:
        console.print("answers before and after" if before else "answers", style="bold")
        _print_answers(console, before.answers if before is not None else None, after.answers)
    folder = run.folder
    places = {
        "metrics": folder / "metrics.jsonl",
        "samples": folder / "samples.jsonl",
        "curves": f"tensorboard --logdir {quoted(folder / 'tensorboard')}",
        "checkpoint": run.store.folder(run.store.latest() or summary.step),
        "use it": f"verl export {quoted(folder)} {quoted(folder / 'model')}",
    }
    absent = {"curves": not run.cfg.metrics.tensorboard, "samples": not run.cfg.algorithm.recipe.samples}
    for what, where in places.items():
        if not absent.get(what):
            console.print(f"{what:<11}{where}", highlight=False, soft_wrap=True)


def _print_answers(console: Console, before: Sequence[Answer] | None, after: Sequence[Answer]) -> None:
    """The first answers whose reward changed, else the first answers."""
    changed = [i for i, a in enumerate(after) if before is not None and before[i].reward != a.reward]
    for i in (changed or list(range(len(after))))[:SHOWN]:
        console.print(f"  {escape(after[i].prompt[-200:])}", style="dim", soft_wrap=True, highlight=False)
        for label, answers in (("before", before), ("after", after)):
            if answers is not None:
                reward = "-" if answers[i].reward is None else f"{answers[i].reward:g}"
                text = escape(repr(answers[i].response))
                console.print(f"    {label:<7}reward {reward:<4} {text}", soft_wrap=True, highlight=False)


def evaluate(cfg: RunConfig) -> None:
    """Held-out accuracy of the configured model, without training; nothing is written but a table."""
    if cfg.eval.dataset is None:
        raise RequestError("eval.dataset is not set: name the held-out prompts, e.g. eval.dataset=data/test.jsonl")
    hush()
    console = Console()
    with Run(cfg, console=False) as run:
        run.prepare(write=False)
        result = run.evaluate()
    for name, value in result.metrics.items():
        console.print(f"{name:<24}{value:.4g}", highlight=False)
    _print_answers(console, None, result.answers)


def hush() -> None:
    """What transformers tells of each loading isn't what the user of a command asked."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
