"""The life of a run: prepare, laps, evaluations, checkpoints, a clean end. Command line and trainers share it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from transformers import PreTrainedTokenizerBase

from verl.checkpoint.fingerprint import MODELS, changes, fingerprint
from verl.checkpoint.parts import write_parts
from verl.checkpoint.rng import restore_rng, rng_state
from verl.checkpoint.store import Checkpoint, CheckpointStore
from verl.cluster.group import WorkerLost
from verl.config.errors import DataError, MisfitError, RequestError, RunError
from verl.config.load import dump, notes
from verl.config.run import RunConfig
from verl.data import chat
from verl.data.examples import ExampleFeed, Examples
from verl.data.feeds import Stopped
from verl.data.live import is_live
from verl.data.loader import DATASETS, PromptDataset, PromptFeed, Prompts, open_example_set, open_prompts
from verl.dataflow.graph import DataFlow
from verl.metrics.health import GAP_BF16, GAP_FP32, Health
from verl.metrics.record import Recorder, Sample, Sink, check_alarms
from verl.metrics.sinks import (
    ALWAYS,
    ALWAYS_OFFLINE,
    ConsoleSink,
    JsonLines,
    JsonlSink,
    PrometheusSink,
    SampleWriter,
    TensorBoardSink,
    last_step,
)
from verl.models.factory import load_tokenizer, resolve_dtype
from verl.runtime.collect import SHOWN, Collected, Sampler
from verl.runtime.controller import Controller, LapResult
from verl.runtime.crew import retrieved
from verl.runtime.data import source_options, training_prompts
from verl.runtime.launch import launch, placement_of
from verl.trainer.evaluation import Answer, Evaluation, evaluate
from verl.trainer.flows import flow_of, needs
from verl.trainer.folder import Claim, clear, holds_run, quoted, writable, write_whole
from verl.trainer.health import SkippedSteps, example_rows, sampled_rows, write_rows
from verl.trainer.logs import RUN, logged
from verl.trainer.loop import Loop

log = logging.getLogger(__name__)


@dataclass
class Summary:
    """How a run ended. ``stopped_by`` is the signal that ended it early, if one did."""

    run_dir: Path
    step: int
    first: dict[str, float | None] = field(default_factory=dict)  # metrics of this process's first lap
    last: dict[str, float | None] = field(default_factory=dict)
    before: Evaluation | None = None
    after: Evaluation | None = None
    stopped_by: signal.Signals | None = None


class AllDone(RequestError):
    """There is nothing left to resume."""


class Run:
    """One run in one run directory. Building it loads nothing; ``prepare`` does, and says what is missing."""

    def __init__(self, cfg: RunConfig, flow: DataFlow | None = None, *, console: bool = True) -> None:
        self.cfg = cfg
        self.folder = Path(cfg.run_dir)
        self.store = CheckpointStore(self.folder / "checkpoints", cfg.checkpoint.keep)
        self._flow, self._show = flow, console
        self.stop: signal.Signals | None = None  # which came
        self._loop: Loop | None = None
        self._closing: list[Callable[[], Any]] = []
        self._first: dict[str, float | None] = {}
        self._saving: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._saved_at = time.monotonic()
        self._more = False  # whether a step is followed by another without a word from outside
        self._beside = cfg.checkpoint.beside_training
        self._roomy = False  # whether the hosts have memory for copies to save
        self._allow_changes = False
        self._bad = ""  # why the last lap's weights aren't trusted
        self._owed = False  # whether a save was left out for that
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None  # the latest one
        self.recorder: Recorder | None = None
        self._evaluations: JsonLines | None = None

    # -- set up ----------------------------------------------------------------------------------------------------

    @logged
    def prepare(
        self,
        resume: Checkpoint | None = None,
        *,
        write: bool = True,
        overwrite: bool = False,
        allow_changes: bool = False,
    ) -> None:
        """Load data and models, build the workers, continue from ``resume``. ``write``: fill the run folder.

        ``overwrite``: the run that lies there goes, once everything is loaded: a wrong request costs nothing.
        ``allow_changes``: continue although data, template, tokenizer or settings changed since ``resume``.
        """
        cfg, self._allow_changes = self.cfg, allow_changes
        check_alarms(cfg.metrics.alarms, cfg.metrics.alarms_below)
        if write:
            writable(self.folder)
            self._closing.append(Claim(self.folder).drop)
        flow = self._flow if self._flow is not None else flow_of(cfg)
        self.plan = flow.compile(needs(cfg))
        placement = placement_of(cfg, self.plan)
        actor = cfg.actor_model_config
        self.tokenizer = load_tokenizer(actor.model_name_or_path, actor.trust_remote_code)
        fields = self._open_data()
        self.total_steps = self._total_steps() if write else 0
        if resume is not None and resume.step >= self.total_steps:
            key = "total_epochs" if cfg.total_steps is None else "total_steps"
            raise AllDone(
                f"{self.folder} has done all its {self.total_steps} steps; to go further: "
                f"verl resume {quoted(self.folder)} {key}={2 * (getattr(cfg, key) or 1)}"
            )
        changed = self._changes(resume) if resume is not None else []
        board: PrometheusSink | None = None
        if write and cfg.metrics.prometheus_port is not None:
            board = PrometheusSink(cfg.metrics.prometheus_port)
            self._closing.append(board.close)
        crew = launch(cfg, placement, self.tokenizer, self.folder if write else None)
        self._closing.append(crew.close)
        self._await(crew.everywhere("load", self.total_steps))
        if "reward_model" in placement.roles:
            scorer = placement.ranks("reward_model")[0]
            self._await(crew.each("check_rewards", {scorer: (fields,)}))
            if isinstance(self.held_out, Prompts):
                try:
                    there = set().union(*(row.fields for row in self.held_out))
                    self._await(crew.each("check_rewards", {scorer: (there,)}))
                except RequestError as error:
                    raise RequestError(f"eval.dataset: {error}") from error
        self.controller = Controller(cfg, self.plan, crew, self.feed)
        if resume is not None:
            self._restore(resume, changed)
        else:
            self._await(self.controller.begin())
        if write:
            if overwrite and cfg.streaming and holds_run(self.folder):  # bad rows are met as they are drawn
                position = self.feed.state()
                self.feed.take(self._per_lap)
                self.feed.restore(position)
            again = -1 if holds_run(self.folder) and not overwrite else None  # from the start: no line of it stays
            self._open_sinks(resume.step if resume is not None else again, overwrite, board)
            if changed:
                log.warning("going on with changes: %s", "; ".join(changed))
            where = f"on after step {resume.step}" if resume is not None else "from the start"
            for damaged in self.store.skipped():
                log.warning("checkpoint skipped: %s; going %s", damaged, where)
        counts = ", ".join(f"{n} {what}" for what, n in self.feed.counts.items() if n or what == "kept")
        if self.feed.size is None:
            counts = "read as they are needed"
        for line in [
            *notes(cfg),
            *(self._repeats() if write else ()),
            *chat.notes(self.tokenizer),
            f"{cfg.algorithm.recipe.data}: {counts}; "
            + (f"device: {crew.device}" if crew.alone else f"{len(crew.ranks)} workers"),
        ]:
            self.say(line)

    def _open_data(self) -> set[str]:
        """The feed and the held-out set; the names of the data's columns."""
        cfg, kind = self.cfg, self.cfg.algorithm.recipe.data
        limits: Any = {"max_prompt_length": cfg.max_prompt_length, "overlong": cfg.overlong}
        order: Any = {"seed": cfg.seed, "shuffle": cfg.shuffle, "streaming": cfg.streaming}
        place = source_options(cfg)
        held_out: Any = place | limits
        if cfg.eval.columns is not None:
            held_out["columns"] = cfg.eval.columns
        self.held_out: Prompts | Examples | None = None
        if kind == "prompts":
            data = training_prompts(cfg)
            self.feed: PromptFeed | ExampleFeed = data.feed(self.tokenizer, **order, **limits)
            self._note_request(data)
            if cfg.eval.dataset is not None:
                self.held_out = open_prompts(cfg.eval.dataset, self.tokenizer, **held_out)
            self._closing.append(self.feed.close)
            return data.field_names
        limits["max_response_length"] = held_out["max_response_length"] = cfg.max_response_length
        examples = DATASETS[kind].of(cfg.dataset, **place)
        self.feed = examples.example_feed(self.tokenizer, **order, **limits)
        self._note_request(examples)
        if cfg.eval.dataset is not None:
            self.held_out = open_example_set(cfg.eval.dataset, self.tokenizer, kind, **held_out)
        self._closing.append(self.feed.close)
        return set()

    def _note_request(self, data: PromptDataset) -> None:
        """What a later resume is compared with."""
        unread = self.cfg.streaming or is_live(data.source)
        mark = f"{data.name} {sorted(data.columns.items())}" if unread else data.content
        self._request = fingerprint(self.cfg, self.tokenizer, mark, self.feed.fingerprint)

    def _total_steps(self) -> int:
        """Laps of the whole run; an epoch ends with the lap that draws its last prompt."""
        cfg = self.cfg
        if cfg.total_steps is not None:
            return cfg.total_steps
        if self.feed.size is None:
            raise RequestError("a stream's length is not known: set total_steps instead of total_epochs")
        return max(1, -(-int((cfg.total_epochs or 1) * self.feed.size) // self._per_lap))

    @property
    def _per_lap(self) -> int:
        """Prompts, pairs or rows that a lap draws."""
        return self.cfg.train_batch_size // self.cfg.group_size

    def _repeats(self) -> list[str]:
        """A warning where one lap goes through the data more than once."""
        size, drawn = self.feed.size, self._per_lap
        if size is None or size >= drawn:
            return []
        kind, fewest, most = self.cfg.algorithm.recipe.data, drawn // size, -(-drawn // size)
        what = kind if kind in ("prompts", "pairs") else "rows"
        times = f"{most}" if fewest == most else f"{fewest} or {most}"
        return [
            f"warning: the data's {size} {what} are fewer than the {drawn} of a lap: each is drawn {times} times in it"
        ]

    def _open_sinks(self, resume_step: int | None, overwrite: bool, prometheus: PrometheusSink | None) -> None:
        cfg, folder = self.cfg, self.folder
        try:
            if overwrite and holds_run(folder):
                clear(folder)
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            write_whole(folder / "config.yaml", dump(cfg))
        except OSError as error:
            raise RequestError(f"run_dir: can't write to {folder}: {error}") from error
        self.console = ConsoleSink(self.total_steps, samples=cfg.algorithm.recipe.samples) if self._show else None
        handlers: list[logging.Handler] = [
            logging.FileHandler(folder / "logs" / "controller.log", "a" if resume_step is not None else "w")
        ]
        handlers[0].addFilter(lambda _: RUN.get() in (None, self))
        handlers[0].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        if self.console is not None:
            self._closing.append(self.console.close)
            handlers.append(self.console.handler())
            handlers[1].addFilter(lambda _: (run := RUN.get()) in (None, self) or run.recorder is None)  # it loads
        root = logging.getLogger("verl")
        for handler in handlers:
            handler.setLevel(cfg.log_level)
        root.setLevel(min(h.level for h in (*handlers, *root.handlers) if h.level))  # others are of runs beside this
        for handler in handlers:
            self._closing.append(handler.close)
            for logger in (root, logging.getLogger("py.warnings")):  # Python's warnings, where they are captured
                logger.addHandler(handler)
                self._closing.append(functools.partial(logger.removeHandler, handler))
        always = ALWAYS if cfg.algorithm.recipe.samples else ALWAYS_OFFLINE
        sinks: list[Sink] = [JsonlSink(folder / "metrics.jsonl", resume_step, always)]
        samples: list[Any] = [SampleWriter(folder / "samples.jsonl", SHOWN, resume_step)]
        if cfg.metrics.tensorboard:
            board = TensorBoardSink(folder / "tensorboard", resume_step)
            sinks.append(board)
            samples.append(board)
        if prometheus is not None:
            sinks.append(prometheus)
        if self.console is not None:
            sinks.append(self.console)
        self._watch(folder / "metrics.jsonl")
        self._evaluations = JsonLines(folder / "eval.jsonl", resume_step)
        self._closing.append(self._evaluations.close)
        self.recorder = Recorder(sinks, samples, alarms=cfg.metrics.alarms, alarms_below=cfg.metrics.alarms_below)
        self._closing.append(self.recorder.close)

    def _watch(self, recorded: Path) -> None:
        """Judge the steps to come, going on from those that were recorded."""
        cfg, crew = self.cfg, self.controller.crew
        single = resolve_dtype(cfg.actor_model_config.dtype, crew.group.places[crew.of("actor")[0]].device).itemsize > 2
        comparable = cfg.rollout.top_p == 1 and not cfg.rollout.top_k and cfg.algorithm.old_logprobs == "trainer"
        self._health = Health((GAP_FP32 if single else GAP_BF16) if comparable else None)
        self._skipped = SkippedSteps()
        with recorded.open() as lines:
            for line in map(json.loads, lines):
                self._health.see(line)
                self._skipped.see(line)

    @logged
    def say(self, text: str) -> None:
        """A line for the person who watches."""
        log.info(text)

    # -- laps ------------------------------------------------------------------------------------------------------

    def _await(self, work: Any) -> Any:
        if self._loop is None:
            self._loop = Loop()
            self._closing.append(self._loop.close)
        return self._loop.wait(work)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """``work`` beside the laps; it goes on while one of them is waited for."""

        async def start() -> asyncio.Task[None]:
            task = asyncio.ensure_future(work)
            task.add_done_callback(retrieved)
            return task

        return self._await(start())

    @logged
    def step(self) -> LapResult:
        """One lap: rollout, reward, update; recorded, and saved when due."""
        assert self.recorder is not None
        if self._saving is not None and self._saving.done():
            self._end_save()
        step = self.controller.step + 1
        every = self.cfg.eval.every_steps
        evaluates = self.held_out is not None and (step == self.total_steps or bool(every and step % every == 0))
        saves = (self._save_due(step) or self._owed) and step < self.total_steps
        more = self._more and step < self.total_steps and self.stop is None and not (evaluates or saves)
        drawn = None if isinstance(self.controller.source, Sampler) else self.feed.state()
        result = self._lap(step, more=more, fresh=saves)
        result.metrics |= self._await(self.controller.readings())
        self._explain(step, result.metrics)
        if result.metrics.get("policy/rows_trained") != 0:  # so that the optimizer has a state
            self._make_room(step)
        self._first = self._first or result.metrics
        if evaluates:
            result.metrics |= self.evaluate().metrics
        for warning in self._health.see(result.metrics):
            log.warning("step %d: %s", step, warning)
        result.metrics["health/warnings"] = float(self._health.conditions)
        self.recorder.step(step, result.metrics)
        if result.collected is not None:
            self.recorder.samples(step, _samples(result.collected, self.tokenizer)[:SHOWN])
        self._skipped.see(result.metrics)
        for role, skipped in self._skipped.by_role.items():
            if skipped >= self.cfg.metrics.max_bad_steps:
                self._give_up(step, role, skipped, result.collected, drawn)
        bad = [n for n, value in result.metrics.items() if n.endswith("/bad_steps") and value]
        self._bad = f"{', '.join(bad)} in step {step}: the weights may be lost" if bad else ""
        self._owed = saves and bool(bad)
        if self._owed:
            log.warning("not saved: %s; the next step without is", self._bad)
        elif saves:
            self._save(beside=self._beside and self._more)
        return result

    def _lap(self, step: int, *, more: bool, fresh: bool) -> LapResult:
        """One lap; with an alarm on ``time/step``, a warning when it lasts longer, even if it never ends."""
        limit = self.cfg.metrics.alarms.get("time/step")

        async def watched() -> LapResult:
            late = "step %d has lasted longer than the limit of time/step, %g s, and goes on"
            timer = limit and asyncio.get_running_loop().call_later(limit, log.warning, late, step, limit)
            try:
                return await self.controller.lap(more=more, fresh=fresh)
            finally:
                if timer:
                    timer.cancel()

        result: LapResult = self._await(watched())
        return result

    def _give_up(
        self, step: int, role: str, skipped: int, collected: Collected | None, drawn: dict[str, Any] | None
    ) -> NoReturn:
        """``RunError``, with the step's rows in a file; ``drawn``: where in the data they begin, if none is sampled."""
        path = self.folder / "bad_rows.jsonl"
        try:
            if collected is not None:
                write_rows(path, step, sampled_rows(collected, self.tokenizer))
            elif drawn is not None:
                self.feed.restore(drawn)
                count = self.cfg.train_batch_size // self.cfg.group_size
                write_rows(path, step, example_rows(self.feed.take(count)))  # type: ignore[arg-type]
            rows = f"The step's rows are in {path}: look for numbers out of all proportion"
        except (RunError, RequestError) as error:
            rows = f"Its rows could not be written down: {error}"
        with contextlib.suppress(Exception):
            self._end_save()
        raise RunError(
            f"step {step}: {skipped} optimizer steps of the {role} in a row were skipped, the gradient was NaN or "
            f"infinite (metrics.max_bad_steps {self.cfg.metrics.max_bad_steps}). {rows}, or resume with a lower "
            f"{role}_model_config.optimizer.lr. Checkpoints are as they were. {self.store.standing()}"
        )

    def _save_due(self, step: int) -> bool:
        every, minutes = self.cfg.checkpoint.every_steps, self.cfg.checkpoint.every_minutes
        late = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        return late or bool(every and step % every == 0)

    def _make_room(self, step: int) -> None:
        """For copies, if one of the saves from ``step`` on will be beside training, and it isn't made yet."""
        cfg = self.cfg.checkpoint
        every = cfg.every_steps or self.total_steps
        due = cfg.every_minutes is not None or -(-step // every) * every < self.total_steps
        if self._roomy or not (due and self._beside and self._more):
            return
        self._roomy = True
        if lacks := self._await(self.controller.make_room(cfg.save == "global")):
            self._beside = False
            log.warning("training will wait for its saves (as with checkpoint.beside_training: false): %s", lacks)

    def _explain(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """At DEBUG: whether trainer and sampler agree, and where the step's time went."""
        agree = ("rollout/logprob_diff_max", "policy/ratio_max", "kl/mean")
        log.debug(
            "step %d: %s",
            step,
            ", ".join(f"{name} {metrics[name]:.3g}" for name in agree if metrics.get(name) is not None),
        )
        whole = metrics["time/step"] or 1.0
        shares = {n.removeprefix("time/"): t / whole for n, t in metrics.items() if n.startswith("time/") and t}
        log.debug("step %d: %s", step, ", ".join(f"{n} {s:.0%}" for n, s in shares.items() if n != "step"))

    @logged
    def train(self) -> Summary:
        """Laps until ``total_steps`` or a signal. Evaluates before and after, saves at the end."""
        last: dict[str, float | None] = {}
        restarts = 0
        with self.signals():
            while True:
                try:
                    last = self._train() or last
                    break
                except Exception as error:
                    with contextlib.suppress(Exception):  # a save that was begun is no less good for it
                        self._end_save()
                    restarts += 1
                    lost = isinstance(error, WorkerLost)
                    if not lost or restarts > self.cfg.cluster.max_restarts or self.stop is not None:
                        raise
                    self._restart(f"restart {restarts} of at most {self.cfg.cluster.max_restarts}: {error}")
        stopped = self.stop if self.controller.step < self.total_steps else None
        return Summary(self.folder, self.controller.step, self._first, last, self.before, self.after, stopped)

    def _train(self) -> dict[str, float | None]:
        """Metrics of the last lap; none where all were done."""
        last: dict[str, float | None] = {}
        if self.held_out is not None and self.controller.step == 0:
            self.before = self.evaluate()
        self._more = True
        while self.controller.step < self.total_steps and self.stop is None:
            try:
                last = self.step().metrics
            except Stopped:  # a signal came while it waited for rows or sampled
                break
            except DataError as error:  # of the next lap's rows: what is trained is sound
                if self.controller.failed:
                    raise
                self.save_at_end()
                raise type(error)(f"{error}. {self.store.standing()}") from error
        self.save_at_end()
        return last

    @logged
    def save_at_end(self) -> None:
        """What was trained, unless it is saved already or not to be trusted."""
        self._more = False
        self._end_save()
        if self.controller.step > 0 and self.store.latest() != self.controller.step:
            if self._bad and not self.store.empty:
                log.warning("not saved at the end: %s. %s", self._bad, self.store.standing())
            else:
                self.save()

    def _restart(self, why: str) -> None:
        """New workers, which go on from the last checkpoint, or from the start where there is none."""
        log.warning(why)
        self.close()
        self._roomy = False
        checkpoint = self.store.load() if self.store.latest() is not None else None
        self.prepare(checkpoint, allow_changes=self._allow_changes)
        log.warning("new workers go on after step %d", self.controller.step)

    @logged
    def evaluate(self) -> Evaluation:
        """Greedy answers to the held-out prompts, scored by the run's rewards; of held-out rows the loss's numbers."""
        assert self.held_out is not None
        limit = min(self.cfg.eval.limit or len(self.held_out), len(self.held_out))
        rows = [self.held_out[i] for i in range(limit)]
        self.after = self._await(evaluate(self.controller, rows, self.tokenizer))
        if self.after.step == 0:  # later ones are part of their step's metrics
            told = ", ".join(f"{k} {v:.3g}" for k, v in self.after.metrics.items())
            self.say(f"held-out, before training: {told}")
        if self._evaluations is not None:
            self._evaluations.append({"step": self.after.step, **self.after.metrics})
        return self.after

    # -- stops -----------------------------------------------------------------------------------------------------

    def signals(self) -> contextlib.AbstractContextManager[None]:
        """Meanwhile a signal is noted (``stop``) and ends a lap that samples with ``Stopped``; a second one raises."""
        return _signals(self._on_signal)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.stop is not None:
            raise KeyboardInterrupt if number is signal.SIGINT else SystemExit(128 + number)
        self.stop = number
        self.feed.stop()
        if self._loop is not None:
            self._loop.soon(self._stop_sampling)
        self.say(
            f"{number.name}: a step that trains ends first, one that still samples is dropped; then all is saved. Once "
            "more stops at once and loses the step"
        )

    def _stop_sampling(self) -> None:
        self._stopping = asyncio.ensure_future(self.controller.stop_sampling())

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @logged
    def save(self) -> Path:
        """``checkpoints/step_N``: all models, optimizers, data position, RNG and KL state, or the policy alone
        (``checkpoint.save``)."""
        self._save(beside=False)
        return self.store.folder(self.controller.step)

    def last(self) -> Checkpoint | None:
        """The checkpoint to go on from; None where none was ever saved. ``RequestError`` where metrics say that one
        was."""
        if not self.store.empty:
            return self.store.load()
        done, every = last_step(self.folder / "metrics.jsonl"), self.cfg.checkpoint.every_steps
        if every and done > 2 * every:  # no third save begins before the first has ended
            raise RequestError(
                f"{self.store.root} holds no checkpoint, but {self.folder} has metrics of {done} steps, and one was "
                f"due every {every}: is a disk not mounted? To start anew: verl train {self.folder / 'config.yaml'} "
                "--overwrite"
            )
        return None

    def _save(self, *, beside: bool) -> None:
        """``beside``: it is written while training goes on, from copies."""
        self._end_save()
        start, step = time.perf_counter(), self.controller.step
        folder = self.store.begin(step)
        whole = self.cfg.checkpoint.save == "global"
        optimizers = self._await(self.controller.snapshot(beside, whole))
        parts: dict[str, Any] = {"state": {"save": self.cfg.checkpoint.save, "fingerprint": self._request}}
        if whole:
            parts["rng"] = rng_state()
            parts["state"] |= {
                "controller": self.controller.state(),
                "total_steps": self.total_steps,
                "optimizers": optimizers,
                "before": None if self.before is None else dataclasses.asdict(self.before),
            }
        self._saving = self._spawn(self._write(step, folder, parts, start, time.perf_counter()))
        self._saved_at = time.monotonic()
        if not beside:
            self._end_save()

    async def _write(self, step: int, folder: Path, parts: dict[str, Any], start: float, noted: float) -> None:
        try:
            entries = await self.controller.write(str(folder.absolute()))
            entries |= await asyncio.to_thread(write_parts, folder, parts)
        except RunError as error:
            self.store.abandon(step)
            raise type(error)(f"{error}. {self.store.standing()}") from error
        except Exception:
            self.store.abandon(step)
            raise
        path = await asyncio.to_thread(self.store.commit, step, entries)
        whole, held = time.perf_counter() - start, noted - start
        waited = f", training waited {held:.1f} s of it" if whole > held + 1 else ""
        self.say(f"saved {path} in {whole:.1f} s{waited}")

    def _end_save(self) -> None:
        """Wait for a save that still writes; raises what went wrong with it."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            self._await(saving)

    def _changes(self, checkpoint: Checkpoint) -> list[str]:
        """What is another than when it was saved; ``RequestError`` unless that is allowed."""
        state = checkpoint.json("state")
        if "save" not in state:
            raise RequestError(f"{checkpoint.path} is of an earlier version, which this one can export but not resume")
        if state["save"] == "actor":
            raise RequestError(
                f"{checkpoint.path} holds the policy alone (checkpoint.save: actor): without optimizer and data "
                f"position its run can't go on. To start another run from its weights: verl export {checkpoint.path} "
                "OUT, then verl train with actor_model_config.model_name_or_path=OUT and another run_dir"
            )
        found = changes(state["fingerprint"], self._request)
        if found and not self._allow_changes:
            raise RequestError(
                f"changed since {checkpoint.path} was saved: {'; '.join(found)}. Put back what it was, or repeat the "
                "command with --allow-changes to go on with what it is now"
            )
        return found

    def _restore(self, checkpoint: Checkpoint, changed: list[str]) -> None:
        state, told = checkpoint.json("state"), "; ".join(changed)
        position, start = state["controller"], self.feed.state()
        fixed = ("n", "seed", "shuffle", "buffer")  # what a position in other data or another order is not
        if "the data set" in changed or any(position["data"].get(k) != start.get(k) for k in fixed):
            position |= {"data": start}
            changed.append("rows are drawn from the data's start")
        if (then := state.get("total_steps", self.total_steps)) != self.total_steps:
            changed += [
                f"{key}.optimizer.schedule {section.optimizer.schedule} ends at step {self.total_steps} ({then} then)"
                for key in MODELS
                if (section := getattr(self.cfg, key)) is not None
                and getattr(getattr(section, "optimizer", None), "schedule", "constant") != "constant"
            ]
        restore_rng(checkpoint.tensors("rng"))
        self.controller.restore(position)
        try:
            self._await(self.controller.take_back(str(checkpoint.path.absolute()), state["optimizers"]))
        except MisfitError as error:
            if not told:
                raise
            raise RequestError(
                f"{checkpoint.path} can't go on with what changed since it was saved: {told} ({error}). Put back what "
                "it was, or train anew with another run_dir"
            ) from error
        if state["before"] is not None:
            saved = state["before"]
            self.before = Evaluation(saved["step"], saved["metrics"], [Answer(**a) for a in saved["answers"]])

    @logged
    def close(self) -> None:
        """Let go of threads, processes, files and the screen; a second call does nothing."""
        with contextlib.ExitStack() as stack:  # the last first, and each whatever the others do
            while self._closing:
                stack.callback(self._closing.pop(0))
        self._loop = self._saving = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _samples(collected: Collected, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Rows for ``samples.jsonl``: evenly spaced over the lap."""
    scores = collected.scores
    groups: dict[int, list[float | None]] = {}
    for row, total in zip(collected.rows, scores.totals, strict=True):
        groups.setdefault(row.draw.number, []).append(total)
    return [
        Sample(
            row_id=row.id,
            prompt=row.draw.prompt.text,
            response=told.text(tokenizer),
            response_ids=tuple(told.ids),
            logprobs=tuple(told.logprobs if told.chosen is None else itertools.compress(told.logprobs, told.chosen)),
            chosen=told.chosen,
            finish_reason=row.finish_reason,
            reward=scores.totals[i],
            rewards={name: values[i] for name, values in (scores.per_reward | scores.extra).items()},
            version=row.version,
            group_rewards=groups[row.draw.number],
        )
        for i, told in collected.shown.items()
        for row in [collected.rows[i]]
    ]


@contextlib.contextmanager
def _signals(handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    """SIGINT, SIGTERM and, unless it is ignored, SIGHUP call ``handler`` meanwhile. Elsewhere than in the main thread
    Python allows no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = [signal.signal(n, lambda number, _: handler(signal.Signals(number))) for n in numbers]
    try:
        yield
    finally:
        for n, old in zip(numbers, before, strict=True):
            signal.signal(n, old)
