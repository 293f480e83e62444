"""One contract for every sink, then each one's own promises, on the real thing."""

from __future__ import annotations

import io
import json
import logging
import os
import time
import urllib.request

import pytest
from rich.console import Console

from verl.config.errors import RequestError, RunError
from verl.metrics.record import Recorder, Sample
from verl.metrics.sinks import ALWAYS, ConsoleSink, JsonlSink, PrometheusSink, SampleWriter, Screen, TensorBoardSink

LAP = {
    "reward/mean": 0.25,
    "kl/mean": 0.001,
    "policy/entropy": 1.5,
    "response/length_mean": 12.5,
    "throughput/tokens_per_second": 431.7,
    "memory/peak_gib": 6.3,
    "time/step": 4.0,
}


def terminal(width: int = 110) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=30, color_system=None)


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def sample(**changes) -> Sample:
    row = {
        "row_id": "p1/0",
        "prompt": "1+1?",
        "response": "2",
        "response_ids": [7, 2],
        "logprobs": [-0.5, -1.5],
        "finish_reason": "stop",
        "reward": 1.0,
        "rewards": {"right": 1.0, "style": None},
        "version": 3,
    }
    return Sample(**(row | changes))


SINKS = {
    "jsonl": lambda path: JsonlSink(path / "metrics.jsonl"),
    "table": lambda path: ConsoleSink(10, console=terminal()),
    "lines": lambda path: ConsoleSink(console=plain()),
    "tensorboard": lambda path: TensorBoardSink(path / "tensorboard"),
    "prometheus": lambda path: PrometheusSink(0),
}


@pytest.mark.parametrize("kind", SINKS)
def test_contract(kind, tmp_path):
    sink = SINKS[kind](tmp_path)
    sink.write(0, {"eval/reward_mean": 0.2})
    sink.write(1, LAP | {"reward/any name! {}\n": 1.0})
    sink.write(7, {})
    sink.close()
    sink.close()


# -- JSON lines


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_are_flushed_one_by_one(tmp_path):
    sink = JsonlSink(tmp_path / "run" / "metrics.jsonl")
    sink.write(1, {"reward/mean": 0.5})
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert line == {"step": 1, **dict.fromkeys(ALWAYS), "reward/mean": 0.5}  # promised names are null, others absent
    sink.close()


def test_resume_cuts_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "rew')
    sink = JsonlSink(path, resume_step=2)
    assert steps(path) == [0, 1, 2]
    sink.write(3, {"reward/mean": 1.0})
    sink.close()
    assert steps(path) == [0, 1, 2, 3]
    path.write_bytes(path.read_bytes() + b'{"step": 4}')  # whole, but its newline is missing
    JsonlSink(path, resume_step=9).close()
    assert steps(path) == [0, 1, 2, 3]
    JsonlSink(path).close()
    assert path.read_text() == ""


def test_lines_that_cannot_be_read_cost_no_others(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    good = ['{"step": 0}\n', '{"step": 1}\n', '{"step": 2}\n', '{"step": 3}\n']
    path.write_bytes((good[0] + good[1]).encode() + b"\x00\x00\xff, 7}\n[3]\n" + (good[2] + good[3]).encode())
    JsonlSink(path, resume_step=2).close()
    assert path.read_text() == "".join(good[:3]) and list(tmp_path.iterdir()) == [path]
    assert "metrics.jsonl: 2 lines that can't be read are left out (3, 4)" in caplog.text


def test_a_closed_pipe_does_not_end_the_run(caplog):
    """What rich does then, in a process with such a console, is to leave it."""
    read, write = os.pipe()
    sink = ConsoleSink(console=Console(file=os.fdopen(write, "w")))
    os.close(read)
    for step in range(1, 4):
        sink.write(step, {"time/step": 1.0})
    end = time.monotonic() + 10
    while "the console" not in caplog.text and time.monotonic() < end:  # another thread says it
        time.sleep(0.01)
    sink.write(4, {"time/step": 1.0})
    assert caplog.text.count("the console can't be written to") == 1
    sink.close()


def test_a_pipe_that_nobody_reads_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(Screen, "PATIENCE", 0.2)
    read, write = os.pipe()
    sink = ConsoleSink(console=Console(file=os.fdopen(write, "w"), force_terminal=False))
    start = time.monotonic()
    for _ in range(400):
        sink.log("x" * 1000)
    sink.close()
    assert time.monotonic() - start < 5
    got = b""
    while got.count(b"\n") < 100:  # what was kept comes when somebody reads
        got += os.read(read, 1 << 16)
    assert set(got) == set(b"x\n")


@pytest.mark.parametrize(
    "console", [{"width": 60}, {"width": 110, "_environ": {"TERM": "dumb"}}], ids=["narrow", "dumb"]
)
def test_where_a_table_has_no_place_there_are_lines(console):
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, **console)
    sink = ConsoleSink(10, console=console)
    for step in (1, 2):
        sink.write(step, LAP)
        assert f"step {step}/10  reward" in console.file.getvalue()
    sink.close()
    assert console.file.getvalue().count("\n") == 2


def test_resume_without_a_file_starts_one(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl", resume_step=2)
    sink.write(3, {})
    assert steps(tmp_path / "metrics.jsonl") == [3]
    sink.close()


def test_a_full_disk_names_the_file():
    from pathlib import Path

    sink = JsonlSink(Path("/dev/full"))
    with pytest.raises(RunError, match="/dev/full: No space left"):
        sink.write(1, LAP)


def test_samples(tmp_path):
    path = tmp_path / "samples.jsonl"
    writer = SampleWriter(path, per_step=2)
    writer.write_samples(
        1, [sample(response="lone \ud800"), sample(reward=None, logprobs=[], response_ids=[]), sample()]
    )
    writer.close()
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert first["logprobs"] == {"mean": -1.0, "min": -1.5, "sum": -2.0} and first["rewards"]["style"] is None
    assert (first["step"], first["row_id"], first["version"], first["response_ids"]) == (1, "p1/0", 3, [7, 2])
    assert second["reward"] is None and second["logprobs"] == {}
    assert first["token_logprobs"] == [-0.5, -1.5] and not {"token_logprobs", "group_rewards"} & second.keys()
    writer = SampleWriter(path, 2, resume_step=0)
    assert path.read_text() == ""
    told = {"response_ids": [7, 8, 9, 2], "logprobs": [-0.123456, -1e-9], "chosen": [1, 0, 0, 1]}
    writer.write_samples(1, [sample(**told, group_rewards=[1.0, None])])
    writer.close()
    row = json.loads(path.read_text())
    assert row["token_logprobs"] == [-0.1235, None, None, 0.0] and "-0.0]" not in path.read_text()
    assert row["group_rewards"] == [1.0, None] and row["response_mask"] == [1, 0, 0, 1]


# -- console


def shown(sink_console: Console) -> str:
    return sink_console.file.getvalue()


def test_table_shows_recent_steps_and_text_above():
    console = terminal()
    sink = ConsoleSink(30, console=console, rows=2)
    for step in (1, 2, 3):
        sink.write(step, LAP)
    sink.log("saved [checkpoint] 3")
    handler = sink.handler()
    handler.emit(logging.makeLogRecord({"msg": "a warning", "levelno": logging.WARNING}))
    sink.close()
    last_frame = shown(console).rsplit("a warning", 1)[1]
    for text in (
        "reward",
        "KL",
        "entropy",
        "length",
        "tokens/s",
        "GiB",
        "s/step",
        "ETA",
        "2/30",
        "3/30",
        "432",
        "1m48s",
    ):
        assert text in last_frame, text
    assert "1/30" not in last_frame
    assert "saved [checkpoint] 3" in shown(console)
    assert shown(console).endswith("\x1b[?25h") or "\x1b[?25h" in last_frame  # the cursor is back


def test_runs_that_sample_nothing_show_their_loss():
    console = plain()
    sink = ConsoleSink(4, console=console, samples=False)
    sink.write(1, {"time/step": 1.0, "policy/loss": 0.6931, "preference/accuracy": 0.75, "preference/margin": 0.1})
    sink.close()
    assert shown(console).startswith("step 1/4  loss 0.6931  accuracy 0.750  margin 0.100")


def test_table_fits_eighty_columns():
    console = terminal(80)
    sink = ConsoleSink(10_000, console=console)
    sink.write(9_999, LAP)
    sink.close()
    assert "…" not in shown(console)


def test_plain_lines_are_never_wrapped():
    console = plain()
    sink = ConsoleSink(4, console=console)
    sink.write(1, LAP | {"eval/accuracy": 0.2})
    sink.log("x" * 200)
    sink.close()
    lines = shown(console).splitlines()
    assert lines[0] == "step 1  eval/accuracy 0.2"
    assert lines[1].startswith("step 1/4  reward 0.250  KL 0.0010") and lines[1].endswith("ETA 0m12s")
    assert lines[2] == "x" * 200 and len(lines) == 3


def test_absent_values_are_dashes():
    console = terminal()
    sink = ConsoleSink(console=console)
    sink.write(1, {"time/step": 2.0})
    sink.close()
    assert shown(console).count(" - ") >= 3


# -- TensorBoard


def test_tensorboard_resume_hides_later_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        first.write(step, {"reward/mean": step / 10})
    first.close()
    second = TensorBoardSink(tmp_path, resume_step=2)
    second.write(3, {"reward/mean": 9.0})
    second.write_samples(3, [sample(response="line\n<b>two</b>")])
    second.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, round(e.value, 3)) for e in events.Scalars("reward/mean")] == [(1, 0.1), (2, 0.2), (3, 9.0)]
    text = events.Tensors("samples/0/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    <b>two</b>" in text and "reward 1.0, stop" in text


# -- Prometheus


def scrape(sink: PrometheusSink) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=5) as reply:
        return reply.read().decode()


def test_prometheus_serves_any_reward_name():
    from prometheus_client.parser import text_string_to_metric_families

    names = ["brevity", "my reward!", "my-reward_", 'quo"te\\', "two\nlines", "0", "ünï"]
    sink = PrometheusSink(0)
    recorder = Recorder([sink])
    recorder.step(4, LAP | {f"reward/{n}": float(i) for i, n in enumerate(names)} | {"reward/brevity/count": 8.0})
    families = {f.name: f for f in text_string_to_metric_families(scrape(sink))}
    assert {s.labels["name"]: s.value for s in families["verl_reward"].samples} == {
        n: float(i) for i, n in enumerate(names)
    }
    assert families["verl_reward_count"].samples[0].value == 8.0
    assert families["verl_reward_mean"].samples[0].value == 0.25 and families["verl_step"].samples[0].value == 4
    assert "KL" in families["verl_kl_mean"].documentation
    recorder.close()
    with pytest.raises(OSError):
        scrape(sink)


def test_prometheus_port_taken():
    sink = PrometheusSink(0)
    with pytest.raises(RequestError, match=f"prometheus_port: 127.0.0.1:{sink.port}: Address already in use"):
        PrometheusSink(sink.port)
    sink.close()
