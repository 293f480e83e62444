"""Where metrics go: JSON lines, the terminal, TensorBoard, Prometheus."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import statistics
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from verl.config.errors import RequestError, RunError
from verl.metrics.names import find
from verl.metrics.record import Sample

log = logging.getLogger(__name__)


class JsonLines:
    """A file of one JSON object per line, each with its ``step``; flushed line by line.

    ``resume_step=k`` keeps what an earlier run wrote up to step ``k`` and cuts the rest off, a torn last line included;
    lines in between that can't be read go, too, with a warning. Without it an old file is replaced. Raises `RunError`,
    naming the file, when it can't be written.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is not None and path.exists():
                _cut(path, resume_step)
            else:
                path.write_bytes(b"")
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise RunError(f"can't open {path}: {error.strerror}") from error

    def append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            data = memoryview(line.encode("utf-8", errors="backslashreplace"))
            while data:  # a disk that fills up takes a part first
                data = data[self._file.write(data) :]
        except OSError as error:
            raise RunError(f"can't write {self._path}: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()


def _cut(path: Path, step: int) -> None:
    """Keep the lines up to ``step``; steps only grow within a file."""
    kept, end, bad = list[tuple[int, int]](), 0, list[int]()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            start, end = end, end + len(line)
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
            except (ValueError, TypeError, KeyError):
                bad.append(number)
                continue
            kept.append((start, end))
    last = kept[-1][1] if kept else 0
    if sum(end - start for start, end in kept) == last:  # what can't be read is behind the last line of use
        os.truncate(path, last)
        return
    whole = path.with_name(f".{path.name}.partial")
    with path.open("rb") as file, whole.open("wb") as out:
        for start, end in kept:
            file.seek(start)
            out.write(file.read(end - start))
    whole.replace(path)
    shown = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
    log.warning("%s: %d lines that can't be read are left out (%s)", path, len(bad), shown)


def last_step(path: Path) -> int:
    """Of a file of JSON lines, the last that can be read; 0 without one."""
    step = 0
    if path.is_file():
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                step = int(json.loads(line)["step"])
    return step


# On every line of metrics.jsonl; null where the step has no such value (kl/mean without a reference, say). The second
# where nothing is sampled.
ALWAYS = (
    *("reward/mean", "kl/mean", "throughput/tokens_per_second", "memory/peak_gib"),
    *(f"policy/{name}" for name in ("loss", "entropy", "clip_fraction", "grad_norm")),
    *(f"time/{name}" for name in ("step", "generate", "reward", "update", "publish")),
)
ALWAYS_OFFLINE = (
    *("throughput/tokens_per_second", "memory/peak_gib", "time/step", "time/update"),
    *(f"policy/{name}" for name in ("loss", "grad_norm")),
)


class JsonlSink:
    """``metrics.jsonl``: one object per step; the names of ``always`` that have no value are null, others absent."""

    def __init__(self, path: Path, resume_step: int | None = None, always: Sequence[str] = ALWAYS) -> None:
        self._lines, self._always = JsonLines(path, resume_step), always

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._lines.append({"step": step, **dict.fromkeys(self._always), **values})

    def close(self) -> None:
        self._lines.close()


class SampleWriter:
    """``samples.jsonl``: the first ``per_step`` samples of each step.

    Log-probabilities as mean, smallest and sum, and one per id in ``token_logprobs``: null where nothing was sampled.
    """

    def __init__(self, path: Path, per_step: int, resume_step: int | None = None) -> None:
        self._lines, self._per_step = JsonLines(path, resume_step), per_step

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for s in samples[: self._per_step]:
            summary = (
                {"mean": statistics.fmean(s.logprobs), "min": min(s.logprobs), "sum": sum(s.logprobs)}
                if s.logprobs
                else {}
            )
            self._lines.append(
                {
                    "step": step,
                    "row_id": s.row_id,
                    "prompt": s.prompt,
                    "response": s.response,
                    "response_ids": list(s.response_ids),
                    **({} if s.chosen is None else {"response_mask": list(map(int, s.chosen))}),
                    "finish_reason": s.finish_reason,
                    "reward": s.reward,
                    "rewards": dict(s.rewards),
                    **({"group_rewards": list(s.group_rewards)} if len(s.group_rewards) > 1 else {}),
                    "logprobs": summary,
                    **({"token_logprobs": _per_token(s)} if s.logprobs else {}),
                    "version": s.version,
                }
            )

    def close(self) -> None:
        self._lines.close()


def _per_token(sample: Sample) -> list[float | None]:
    logprobs = iter(sample.logprobs)
    chosen = [True] * len(sample.response_ids) if sample.chosen is None else sample.chosen
    return [round(next(logprobs), 4) + 0.0 if here else None for here in chosen]  # + 0.0: -0.0 is 0


# heading, metric, format
_SAMPLED = (("reward", "reward/mean", "{:.3f}"), ("KL", "kl/mean", "{:.4f}"), ("entropy", "policy/entropy", "{:.3f}"))
_OFFLINE = (
    ("loss", "policy/loss", "{:.4f}"),
    ("accuracy", "preference/accuracy", "{:.3f}"),
    ("margin", "preference/margin", "{:.3f}"),
)
_COMMON = (
    ("length", "response/length_mean", "{:.1f}"),
    ("tokens/s", "throughput/tokens_per_second", "{:.0f}"),
    ("GiB", "memory/peak_gib", "{:.1f}"),
    ("s/step", "time/step", "{:.2f}"),
)


class Screen:
    """Who writes to the terminal, or to what stands for it: a thread, so that a pipe that nobody reads holds up nobody.

    One piece of work after the other, and each is waited for unless one takes longer than ``PATIENCE`` seconds. What
    comes while one is stuck waits for it, ``MOST`` pieces at most; later ones are lost. Where writing fails, there is
    no screen any more; that is logged once.
    """

    PATIENCE, MOST = 2.0, 200

    def __init__(self) -> None:
        self._work: queue.Queue[tuple[Callable[[], Any], threading.Event] | None] = queue.Queue(self.MOST)
        self._stuck: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self.gone = False

    def do(self, work: Callable[[], Any]) -> None:
        if self.gone:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="verl-screen", daemon=True)
            self._thread.start()
        done = threading.Event()
        try:
            self._work.put_nowait((work, done))
        except queue.Full:
            return
        if (self._stuck is None or self._stuck.is_set()) and not done.wait(self.PATIENCE):
            self._stuck = done

    def close(self) -> None:
        """Its thread ends after what is under way; a later ``do`` starts another."""
        if self._thread is not None:
            self._thread = None
            with contextlib.suppress(queue.Full):
                self._work.put_nowait(None)

    def _serve(self) -> None:
        while (given := self._work.get()) is not None:
            work, done = given
            failed = None
            try:
                if not self.gone:
                    work()
            except (OSError, ValueError, SystemExit) as error:  # rich ends a process whose pipe is closed
                self.gone, failed = True, "nobody reads it" if isinstance(error, SystemExit) else str(error)
            finally:
                done.set()
            if failed is not None:
                log.warning("the console can't be written to (%s): the run goes on without", failed)


class ConsoleSink:
    """A live table of the last ``rows`` steps in a terminal (of 79 columns, which can be redrawn), else one plain line
    per step.

    Text goes through `log` (or `handler`, for the ``logging`` module) and appears above the table. Steps without
    ``time/step`` (an evaluation alone) and every ``eval/*`` value are text too. ``samples``: whether the run samples
    answers, and so has rewards to show.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        console: Console | None = None,
        rows: int = 10,
        samples: bool = True,
    ) -> None:
        self._console, self._screen = console or Console(), Screen()
        self._table_fits = console_fits(self._console)
        self._total = total_steps
        self._rows: deque[tuple[int, list[str]]] = deque(maxlen=rows)
        self._seconds: deque[float] = deque(maxlen=20)
        self._live: Live | None = None
        self._columns = (*(_SAMPLED if samples else _OFFLINE), *_COMMON)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        is_lap = "time/step" in values
        texts = [name for name in values if name.startswith("eval/")] if is_lap else list(values)
        if texts:
            self.log(f"step {step}  " + "  ".join(f"{name} {values[name]:.4g}" for name in texts))
        if not is_lap:
            return
        self._seconds.append(values["time/step"])
        cells = [form.format(values[name]) if name in values else "-" for _, name, form in self._columns]
        cells.append(self._eta(step))
        if not self._table_fits:
            headings = [heading for heading, _, _ in self._columns] + ["ETA"]
            pairs = (f"{heading} {cell}" for heading, cell in zip(headings, cells, strict=True) if cell != "-")
            self.log(f"step {self._of_total(step)}  " + "  ".join(pairs))
            return
        self._rows.append((step, cells))
        table = self._table()
        self._screen.do(lambda: self._draw(table))

    def _draw(self, table: Table) -> None:
        if self._live is None:
            # no refresh thread: the table changes only here, and text printed meanwhile redraws it
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(table, refresh=True)

    def log(self, text: str) -> None:
        """Print text above the table, as it is: no markup, no highlighting, no wrapping where there's no terminal."""
        wrap = not self._table_fits
        self._screen.do(lambda: self._console.print(text, markup=False, highlight=False, soft_wrap=wrap))

    def handler(self) -> logging.Handler:
        """A handler of the ``logging`` module that prints through `log`."""
        return _ConsoleHandler(self)

    def close(self) -> None:
        """Leave the table as it stands."""
        self._screen.do(self._end)
        self._screen.close()

    def _end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _of_total(self, step: int) -> str:
        return f"{step}/{self._total}" if self._total else str(step)

    def _eta(self, step: int) -> str:
        if self._total is None:
            return "-"
        seconds = round(max(self._total - step, 0) * statistics.fmean(self._seconds))
        hours, minutes = seconds // 3600, seconds // 60 % 60
        return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds % 60:02}s"

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for heading in ("step", *(heading for heading, _, _ in self._columns), "ETA"):
            table.add_column(heading, justify="right", no_wrap=True)
        for step, cells in self._rows:
            table.add_row(self._of_total(step), *cells)
        return table


def console_fits(console: Console) -> bool:
    """Whether a table that changes in place can be shown."""
    return console.is_terminal and not console.is_dumb_terminal and console.width >= 79


class _ConsoleHandler(logging.Handler):
    def __init__(self, sink: ConsoleSink) -> None:
        super().__init__()
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        self._sink.log(self.format(record))


class TensorBoardSink:
    """Event files with every metric as a scalar and samples as text.

    ``resume_step=k`` hides what an earlier run wrote after step ``k``.
    """

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second to import

        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for i, s in enumerate(samples):
            # indented by four: Markdown shows it as it is
            text = f"reward {s.reward}, {s.finish_reason}\n\n{s.prompt}\n\n{s.response}"
            self._writer.add_text(f"samples/{i}", "\n".join("    " + line for line in text.splitlines()), step)

    def close(self) -> None:
        self._writer.close()


class PrometheusSink:
    """Gauges at ``http://127.0.0.1:<port>/metrics``, for this machine only. ``port`` 0 takes a free one; see ``.port``.

    Members of a family are one gauge with a label, so a user's reward may have any name. A gauge keeps its last value.
    Raises `RequestError` when the port is taken.
    """

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._gauge, self._registry = Gauge, CollectorRegistry()
        self._step = Gauge("verl_step", "steps done", registry=self._registry)
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=self._registry)
        except OSError as error:
            raise RequestError(f"metrics.prometheus_port: 127.0.0.1:{port}: {error.strerror}") from error
        self.port: int = self._server.server_port

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._step.set(step)
        for name, value in values.items():
            entry, label = find(name) or (None, name)
            key = entry.name if entry else "undocumented/<name>"
            if key not in self._gauges:
                help_text = f"{entry.meaning} ({entry.unit})" if entry else "metrics that the table lacks"
                labels = [] if label is None else [re.findall(r"<(\w+)>", key)[0]]
                self._gauges[key] = self._gauge(prometheus_name(key), help_text, labels, registry=self._registry)
            gauge = self._gauges[key]
            (gauge if label is None else gauge.labels(label)).set(value)

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def prometheus_name(name: str) -> str:
    """``reward/mean`` is exposed as ``verl_reward_mean``, the family ``reward/<name>`` as ``verl_reward``."""
    return "verl_" + "_".join(re.findall(r"[a-zA-Z0-9]+", re.sub(r"<\w+>", "", name)))
