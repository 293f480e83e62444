"""The ``verl`` command. Exit status: 0 all done, 1 the run failed, 2 the request is wrong, 130/143 a signal came."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from verl.cluster.imports import quick_imports
from verl.config.errors import RequestError, RunError


class _Commands(typer.core.TyperGroup):
    """A command ends by returning; what ends it from within (a module of the user's that exits) is a failure."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except EOFError as error:  # typer takes it for the end of a dialogue, and says nothing but "Aborted!"
            raise RunError(f"what was read ended too early (EOFError: {error})") from error
        except SystemExit as error:
            if error.code:
                raise
            raise RunError("the process was told to exit before the command was done (SystemExit)") from error


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)

Config = Annotated[Path, typer.Argument(help="YAML file", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. algorithm.name=ppo")]


@app.callback()
def _verl() -> None:
    """Reinforcement-learning post-training of language models."""


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what run_dir holds.")] = False,
) -> None:
    """Train as CONFIG says."""
    from verl.config.load import dump, load_config, notes

    cfg = load_config(config, overrides or [])
    if dry_run:
        typer.echo(dump(cfg).rstrip())
        for line in notes(cfg):
            typer.echo(f"# {line}")
        return
    with quick_imports():
        from verl.cli.train import train as run

    raise typer.Exit(run(cfg, config, overwrite=overwrite))


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="run directory", show_default=False)],
    overrides: Overrides = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Go on with other data, template, tokenizer or settings.")
    ] = False,
) -> None:
    """Continue RUN from its latest checkpoint; without one, from the start."""
    from verl.config.load import load_config

    for other in (o.partition("=")[2].strip() for o in overrides or [] if o.partition("=")[0].strip() == "run_dir"):
        if Path(other).expanduser().resolve() != run.resolve():
            raise RequestError(
                f"run_dir={other}: a run goes on in its own folder, {run}; leave run_dir out, or go on in a copy: "
                f"cp -r {run} {other}, then verl resume {other}"
            )
    saved = run / "config.yaml"
    if not saved.is_file():
        raise RequestError(f"{run} is no run directory: it has no config.yaml")
    cfg = load_config(saved, overrides or [], run_dir=str(run))
    with quick_imports():
        from verl.cli.train import resume as go_on

    raise typer.Exit(go_on(cfg, allow_changes=allow_changes, as_it_was=not overrides))


@app.command("eval")
def evaluate(config: Config, overrides: Overrides = None) -> None:
    """Answer eval.dataset greedily with the model of CONFIG, and score the answers."""
    from verl.config.load import load_config

    if config.is_dir():
        raise RequestError(
            f"{config} is a folder, not a configuration. What a run has trained is evaluated after its export: "
            f"verl export {config} OUT, then verl eval {config / 'config.yaml'} "
            "actor_model_config.model_name_or_path=OUT actor_model_config.use_lora=false"
        )
    cfg = load_config(config, overrides or [])
    with quick_imports():
        from verl.cli.train import evaluate as run

    run(cfg)


@app.command()
def plan(config: Config, overrides: Overrides = None) -> None:
    """Who is where, what the policy needs, and what moving its weights costs. Loads nothing."""
    from verl.config.load import load_config

    cfg = load_config(config, overrides or [])
    with quick_imports():
        from verl.cli.plan import plan as run

    run(cfg)


@app.command()
def check(
    config: Config,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=2, help="rows of a lap, at least")] = 32,
) -> None:
    """Whether what must hold in every run holds with the model, data and machine of CONFIG. Three short runs."""
    from functools import partial

    from verl.config.load import load_config

    load = partial(load_config, config, overrides or [])
    load()  # what is wrong with it is told before the imports, which take seconds
    with quick_imports():
        from verl.cli.check import check as run

    raise typer.Exit(run(load, rows))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="checkpoints/step_N, or a run directory for its latest")],
    out: Annotated[Path, typer.Argument(help="folder to write")],
    merge: Annotated[bool, typer.Option(help="Merge LoRA adapters into the base weights.")] = True,
) -> None:
    """Write a Hugging Face folder from a checkpoint. Of a run whose latest one is damaged, none."""
    from verl.checkpoint.export import export as write
    from verl.checkpoint.store import Checkpoint, CheckpointStore

    store = None
    if (checkpoint / "checkpoints").is_dir():
        store = CheckpointStore(checkpoint / "checkpoints")
        last = store.latest()
        if last is not None and (skipped := store.skipped()):
            older = f"for these older weights: verl export {store.folder(last)} {out}"
            raise RunError(f"{'; '.join(skipped)}. {store.standing()}; {older}")
        checkpoint = store.load().path
    for tries in range(3):
        try:
            step = Checkpoint.open(checkpoint, checksums=False).step
            write(checkpoint, out, merge=merge)
            break
        except Exception:  # a run that goes on has removed it meanwhile, after a newer one
            if store is None or tries == 2 or checkpoint.exists():
                raise
            checkpoint = store.load().path
    typer.echo(f"wrote {out} (step {step})")


@app.command()
def stats(
    data: Annotated[str, typer.Argument(help="file, folder or hub name")],
    model: Annotated[str, typer.Option("--model", help="whose tokenizer counts")],
) -> None:
    """Token lengths of DATA, and the limits they suggest."""
    from verl.cli.stats import stats as run

    run(data, model)


@app.command()
def view(
    run: Annotated[Path, typer.Argument(help="run directory", show_default=False)],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")] = 7070,
    host: Annotated[str, typer.Option(help="address to listen on; others than this machine's have no password")] = (
        "127.0.0.1"
    ),
) -> None:
    """A page that shows RUN's samples token by token, beside its curves, while the run goes on."""
    from verl.cli.view import view as serve

    serve(run, host, port)


@app.command()
def doctor() -> None:
    """What this machine has: versions, devices, and what is missing for which feature."""
    from verl.cli.doctor import doctor as run

    run()


def main() -> None:
    """Entry point: one readable message for a failure; the traceback only with VERL_DEBUG=1."""
    sys.path.insert(0, os.getcwd())  # reward functions are named as module:function of the current folder
    logging.captureWarnings(True)
    try:
        app()  # exits by itself: a command's own status, 2 for words that are no command, 130 on Ctrl-C
    except SystemExit as stop:
        if stop.code in (130, 143):  # after a second signal a computation may still run, and would hold a normal exit
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(stop.code)
        raise
    except RequestError as error:
        _fail(2, str(error))
    except Exception as error:
        _fail(1, str(error) or type(error).__name__)


def _fail(status: int, message: str) -> None:
    if os.environ.get("VERL_DEBUG") == "1":
        traceback.print_exc()
    print(f"verl: {message}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
