"""``verl view`` on loopback: what its page is told of a run folder that the product's own writers wrote."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from verl.cli.main import main
from verl.cli.pieces import load_decoder, pieces
from verl.cli.view import Server
from verl.config.errors import RequestError
from verl.config.load import dump, load_config
from verl.metrics.follow import Samples, Steps, thinned
from verl.metrics.record import Sample
from verl.metrics.sinks import ALWAYS_OFFLINE, JsonLines, JsonlSink, SampleWriter

ROOT = Path(__file__).parents[2]
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x00 \ud800 </style>"
BYTES = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]))
BYTES.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES.decoder = decoders.ByteLevel()


def ids(text: str) -> list[int]:
    return BYTES.encode(text).ids


def sample(text: str = "2 €", **changes: Any) -> Sample:
    tokens = ids(text)
    row = {
        "row_id": "7@0/0",
        "prompt": "What is 1 + 1?",
        "response": text,
        "response_ids": tokens,
        "logprobs": [-0.1 * (i + 1) for i in range(len(tokens))],
        "finish_reason": "stop",
        "reward": 1.0,
        "rewards": {"right": 1.0, "style": None},
        "version": 3,
    }
    return Sample(**(row | changes))


class Folder:
    """A run folder and its open files."""

    def __init__(self, path: Path, **keys: Any) -> None:
        self.path = path
        base = path.parent / "model"
        base.mkdir(exist_ok=True)
        BYTES.save(str(base / "tokenizer.json"))
        (path.parent / "data.jsonl").write_text('{"prompt": "q", "answer": "a"}\n')
        named = {
            "actor_model_config": {"model_name_or_path": str(base)},
            "dataset": str(path.parent / "data.jsonl"),
            "reward_fn": "my_rewards:score",
            "algorithm": {"name": "grpo"},
            "total_steps": 100,
            "run_dir": str(path),
        }
        path.mkdir()
        cfg = load_config(None, **(named | keys))
        (path / "config.yaml").write_text(dump(cfg))
        samples = cfg.algorithm.recipe.samples
        self.metrics = JsonlSink(path / "metrics.jsonl", **({} if samples else {"always": ALWAYS_OFFLINE}))
        self.samples = SampleWriter(path / "samples.jsonl", 4)
        self.eval = JsonLines(path / "eval.jsonl")

    def step(self, step: int, *samples: Sample, **metrics: float) -> None:
        told = {name.replace("__", "/"): value for name, value in metrics.items()}
        self.metrics.write(step, {"reward/mean": step / 10, "time/step": 1.0} | told)
        self.samples.write_samples(step, samples)


@pytest.fixture
def run(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run")


class Page:
    """What a browser does."""

    def __init__(self, server: Server) -> None:
        self.server, self.port = server, server.server_address[1]

    def raw(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        link.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            link.putheader(name, value)
        link.endheaders()
        answer = link.getresponse()
        return answer.status, answer.read().decode(), answer.headers

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        status, body, headers = self.raw(f"/{path}?{urlencode(query, errors='surrogatepass')}")
        assert status == 200 and headers["Content-Type"] == "application/json", body
        return json.loads(body, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@contextmanager
def served(path: Path) -> Iterator[Page]:
    with Server(path) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield Page(server)
        finally:
            server.shutdown()
            thread.join()


def listed(page: Page, **query: Any) -> list[int]:
    return [row["n"] for row in page.get("rows", **query)["rows"]]


# -- what is shown ---------------------------------------------------------------------------------------------------


def test_a_row_token_by_token(run: Folder):
    text = "a €\n"
    chosen = [1, 1, 0, 0, 0, 1]
    run.step(1, sample(text, chosen=chosen, logprobs=[-0.25, -3.0, -0.00001], group_rewards=[1.0, 0.0, None, 0.5]))
    run.step(2, sample(reward=None, logprobs=[]), kl__mean=0.25)
    run.eval.append({"step": 0, "eval/reward_mean": 0.125})
    with served(run.path) as page:
        state = page.get("state")
        row, bare = page.get("row", n=0), page.get("row", n=1)
    assert (row["step"], row["version"], row["finish_reason"], row["reward"]) == (1, 3, "stop", 1.0)
    assert row["rewards"] == {"right": 1.0, "style": None} and row["group_rewards"] == [1.0, 0.0, None, 0.5]
    assert row["response_ids"] == ids(text) and row["response_mask"] == chosen and row["prompt"] == "What is 1 + 1?"
    assert row["texts"] == ["a", " ", "", "", "€", "\n"]
    assert row["token_logprobs"] == [-0.25, -3.0, None, None, None, 0.0]
    assert row["logprobs"]["min"] == -3.0
    assert bare["reward"] is None and "token_logprobs" not in bare and "".join(bare["texts"]) == "2 €"
    curves = {curve["name"]: curve for curve in state["curves"]}
    assert curves["reward/mean"] == {"name": "reward/mean", "points": [[1, 0.1], [2, 0.2]], "eval": [[0, 0.125]]}
    assert curves["kl/mean"]["points"] == [[2, 0.25]] and "policy/entropy" not in curves
    assert state["rows"] == 2 and state["note"] == "" and state["problems"] == []


def test_pieces_make_up_the_text():
    for text in ("plain", "naïve – 你好 👩‍👩‍👧 é", "\u202ea\x00b"):
        got = pieces(BYTES.decode, ids(text))
        assert "".join(got) == text and len(got) == len(text.encode())
    assert pieces(BYTES.decode, ids("a€")[:-1]) == ["a", "", "\ufffd"]  # cut in the middle of a character
    noise = random.Random(0)
    for _ in range(50):
        some = [noise.randrange(256) for _ in range(40)]
        got = pieces(BYTES.decode, some)
        assert len(got) == 40 and all(any(got[i : i + 4]) for i in range(37))  # it never waits for long
    joined = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))  # decodes with blanks between
    assert pieces(joined.decode, [0, 1, 9, 0]) == ["a", " b", "", " a"]


def test_sorting_filters_and_pages(run: Folder):
    for step in range(1, 101):
        run.step(
            step,
            *(
                sample(
                    f"{'Éa' if step == 50 else 'b'}\n{'x' * k}",
                    row_id=f"{k}@{step}/0",
                    prompt=f"q{k}",
                    reward=None if k == 3 else step / 100 + k,
                    finish_reason="length" if k == 2 else "stop",
                    logprobs=[-(k + 1.0)] * (2 + k + 2 * (step == 50)),
                )
                for k in range(4)
            ),
        )
    with served(run.path) as page:
        state = page.get("state")
        assert state["rows"] == 400 and state["finish_reasons"] == ["length", "stop"]
        first = page.get("rows")
        assert first["total"] == 400 and [row["n"] for row in first["rows"]] == list(range(399, 199, -1))
        assert listed(page, first=200) == list(range(199, -1, -1)) and listed(page, first=400) == []
        assert listed(page, order="oldest", count=3) == [0, 1, 2]
        assert len(listed(page, count=10**9)) == 400 and listed(page, count=-1) == []
        assert listed(page, order="reward up", count=2) == [0, 4]
        down = listed(page, order="reward down", count=400)
        assert down[:2] == [398, 394] and {n % 4 for n in down[300:]} == {3}  # those without a reward are last
        assert listed(page, order="length down", count=1) == [199] and listed(page, order="logprob up", count=1) == [3]
        assert {n % 4 for n in listed(page, finish="length")} == {2}
        assert listed(page, step=50) == [199, 198, 197, 196]
        prompt = page.get("row", n=1)["prompt_number"]
        followed = listed(page, prompt=prompt, order="oldest")
        assert followed == list(range(1, 400, 4)) and listed(page, prompt=prompt, step=7) == [25]
        assert listed(page, text="éA\nXX") == [199, 198]
        assert listed(page, text="Q1", step=7) == [25]  # prompts too
        assert listed(page, text="finish_reason") == []  # but no keys
        row = page.get("rows", step=1, order="reward down")["rows"][0]
        assert row == {
            "n": 2, "step": 1, "row_id": "2@1/0", "reward": 2.01, "length": 4, "finish_reason": "length",
            "logprob": -3.0, "text": "b\nxx",
        }  # fmt: skip


def test_a_run_that_goes_on(run: Folder):
    run.step(1, sample(), policy__entropy=2.0)
    path = run.path / "samples.jsonl"
    with served(run.path) as page:
        seen = page.get("state")
        assert seen["rows"] == 1 and seen["status"].startswith("step 1 of 100, ")
        again = page.get("state", mark=seen["mark"])
        assert "curves" not in again and again["mark"] == seen["mark"]
        assert listed(page, text="later") == []
        whole = path.read_bytes()
        run.step(2, sample("later", row_id="8@1/0"), policy__entropy=1.0)
        line = path.read_bytes()[len(whole) :]
        path.write_bytes(whole + line[:50])  # a write that isn't through yet
        half = page.get("state", mark=seen["mark"])
        assert half["rows"] == 1 and half["problems"] == [] and half["behind"] == 0
        assert {curve["name"]: len(curve["points"]) for curve in half["curves"]}["policy/entropy"] == 2
        path.write_bytes(whole + line)
        assert page.get("state", mark=half["mark"])["rows"] == 2
        assert page.get("row", n=1)["row_id"] == "8@1/0" and listed(page, text="later") == [1]

        # a resume cuts the last step off and writes another
        writer = SampleWriter(path, 4, resume_step=1)
        writer.write_samples(2, [sample("anew, and at greater length than before " * 9, row_id="9@1/0")])
        writer.close()
        assert page.raw("/row?n=1")[0] == 404
        new = page.get("state", mark=half["mark"])
        assert new["generation"] == seen["generation"] + 1 and new["rows"] == 2
        assert page.get("row", n=1)["row_id"] == "9@1/0" and listed(page, text="later") == []

        path.unlink()
        assert page.get("state")["rows"] == 0 and page.raw("/row?n=0")[0] == 404

        (run.path / "config.yaml").write_text(
            (run.path / "config.yaml").read_text().replace("total_steps: 100", "total_steps: 2")
        )
        assert page.get("state")["status"] == "step 2 of 2: the run has ended"


def test_a_long_file_is_read_in_parts(run: Folder):
    for step in range(1, 51):
        run.step(step, sample())
    file = Samples(run.path / "samples.jsonl")
    counts = []
    while file.behind or not counts:
        file.refresh(4000)
        counts.append(len(file.rows))
    assert len(counts) > 3 and counts == sorted(set(counts)) and counts[-1] == 50
    assert [file.read(i)["step"] for i in (0, 49)] == [1, 50]


def test_curves_keep_their_spikes(run: Folder):
    for step in range(1, 1001):
        run.step(step, policy__grad_norm=90.0 if step == 777 else 1.0)
    steps = Steps(run.path / "metrics.jsonl", ["policy/grad_norm"])
    steps.refresh()
    thin = thinned(steps.points["policy/grad_norm"], 100)
    assert len(thin) <= 100 and (777, 90.0) in thin and thin == sorted(thin)


def test_status_tells_a_run_that_stopped(run: Folder):
    run.step(3)
    old = time.time() - 3 * 3600
    os.utime(run.path / "metrics.jsonl", (old, old))
    with served(run.path) as page:
        assert page.get("state")["status"] == "step 3 of 100, 3 h ago; stopped?"


# -- what is missing or broken ---------------------------------------------------------------------------------------


def test_an_empty_run(run: Folder):
    with served(run.path) as page:
        state = page.get("state")
        assert state["note"].startswith("no samples yet") and state["status"].startswith("no step yet")
        assert state["curves"] == [] and page.get("rows") == {"total": 0, "rows": []}
        status, body, _ = page.raw("/row?n=0")
        assert status == 404 and "there is no row 0" in body


def test_an_offline_run_has_curves_only(tmp_path: Path):
    (tmp_path / "data.jsonl").write_text("")
    folder = Folder(tmp_path / "run", algorithm={"name": "dpo"}, reward_fn=None)
    folder.metrics.write(1, {"policy/loss": 0.69, "preference/accuracy": 0.5, "policy/grad_norm": 2.0})
    folder.eval.append({"step": 1, "eval/accuracy": 0.75})
    with served(folder.path) as page:
        state = page.get("state")
    assert "dpo trains on rows of the data set" in state["note"] and state["rows"] == 0
    assert [curve["name"] for curve in state["curves"]] == ["policy/loss", "preference/accuracy", "policy/grad_norm"]
    assert state["curves"][1]["eval"] == [[1, 0.75]]


def test_a_row_of_an_older_version(run: Folder):
    run.step(1, sample())
    path = run.path / "samples.jsonl"
    row = json.loads(path.read_text())
    del row["token_logprobs"]
    path.write_text(json.dumps(row) + "\n")
    with served(run.path) as page:
        told = page.get("row", n=0)
    assert "token_logprobs" not in told and told["logprobs"] == row["logprobs"] and told["texts"][:2] == ["2", " "]


def test_without_a_tokenizer_tokens_are_ids(run: Folder, monkeypatch: pytest.MonkeyPatch):
    run.step(1, sample(), sample(response_ids=[1, 2, 10**12], logprobs=[-1.0] * 3))
    with served(run.path) as page:  # the second row's ids are no ids at all
        told = page.get("row", n=1)
        assert told["texts"] is None and "none of the tokenizer's" in told["no_texts"]
    os.unlink(run.path.parent / "model" / "tokenizer.json")
    with served(run.path) as page:
        told = page.get("row", n=0)
    assert told["texts"] is None and told["response_ids"] == ids("2 €") and len(told["token_logprobs"]) == 5
    assert f"{run.path.parent / 'model'} has no tokenizer here" in told["no_texts"]


def test_which_tokenizer(tmp_path: Path):
    """The run's own, else its model's: also an adapter's base, or one without tokenizer.json."""
    run, base, adapter, old = (tmp_path / name for name in ("run", "base", "adapter", "old"))
    for folder in (run, base, adapter, old):
        folder.mkdir()
    with pytest.raises(RequestError, match=f"none in {base}, nor in"):
        load_decoder(run, str(base))
    with pytest.raises(RequestError, match="loaded model"):
        load_decoder(run, None)
    BYTES.save(str(base / "tokenizer.json"))
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    assert load_decoder(run, str(adapter))(ids("a€")) == "a€"
    (old / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\none\ntwo\n")
    (old / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    assert load_decoder(run, str(old))([5, 3, 6]) == "one [SEP] two"
    saved = run / "checkpoints" / "step_4" / "hf"
    saved.mkdir(parents=True)
    BYTES.save(str(saved / "tokenizer.json"))
    assert load_decoder(run, str(old))(ids("b€")) == "b€"


def test_lines_that_cannot_be_read_are_named(run: Folder):
    path = run.path / "samples.jsonl"
    run.step(1, sample(row_id="first"))
    good = json.loads(path.read_text())
    odd: list[Any] = [
        "{", "[1]", "null", "\udcff", "[" * 100_000, json.dumps(good | {"step": None}),
        json.dumps(good | {"prompt": 3}),        json.dumps(good | {"logprobs": [1]}), json.dumps({"step": 1}),
    ]  # fmt: skip
    with path.open("ab") as file:
        file.write("".join(line + "\n" for line in odd).encode(errors="surrogateescape"))
        file.write(json.dumps(good | {"row_id": "last", "rewards": {"r": float("nan")}}).encode() + b"\n")
    with served(run.path) as page:
        state = page.get("state")
        rows = page.get("rows", order="oldest")["rows"]
        assert page.get("row", n=1)["rewards"] == {"r": None}
    assert [row["row_id"] for row in rows] == ["first", "last"]
    assert state["problems"] == [f"{path}: can't read line 2, 3, 4, 5, 6 and 4 others; left out"]


# -- who may ask, and what --------------------------------------------------------------------------------------------


def test_what_a_model_writes_stays_text(run: Folder):
    run.step(1, sample(HOSTILE.replace("\ud800", ""), response=HOSTILE, prompt=HOSTILE, row_id=HOSTILE))
    with served(run.path) as page:
        row = page.get("row", n=0)
        assert row["response"] == row["prompt"] == row["row_id"] == HOSTILE
        assert page.get("rows", text="<SCRIPT>")["total"] == 1
        status, html, headers = page.raw("/")
    assert status == 200 and headers["X-Content-Type-Options"] == "nosniff"
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "srcdoc", 'setAttribute("on'):
        assert way not in html
    assert set(re.findall(r"https?://[^\"\s]+", html)) == {"http://www.w3.org/2000/svg"}  # a name: nothing is fetched
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (own,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


def test_only_this_page_may_ask(run: Folder):
    run.step(1, sample("a secret"))
    with served(run.path) as page:
        for host in ("evil.example", "evil.example:80", f"localhost.evil.example:{page.port}", "", "127.0.0.1.nip.io"):
            status, body, _ = page.raw("/row?n=0", Host=host)
            assert status == 403 and "secret" not in body, host
        for host in ("localhost", f"localhost:{page.port}", "127.0.0.1:9999", "LOCALHOST:1"):  # a tunnel's other port
            assert page.raw("/", Host=host)[0] == 200, host
        for path in (
            "/../config.yaml",
            "/%2e%2e/config.yaml",
            "/config.yaml",
            "//etc/passwd",
            "/row/../../x",
            "/view.html",
        ):
            assert page.raw(path)[0] == 404, path
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            assert page.raw("/", method)[0] == 501, method
        for query in ("row", "row?n=x", "row?n=", "rows?order=size", "rows?first=x", "rows?step=1.5", "row?n=0&self=1",
                      "rows?order=reward%20sideways", "rows?text=%ff"):  # fmt: skip
            assert page.raw(f"/{query}")[0] == 400, query
        assert page.raw("/row?n=-1")[0] == page.raw("/row?n=1")[0] == 404
        assert "Access-Control-Allow-Origin" not in page.raw("/state")[2]


def test_requests_that_are_wrong(run: Folder, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch):
    def refused(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["verl", "view", *args])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert refused(str(tmp_path)) == f"verl: {tmp_path} is no run directory: it has no config.yaml"
    assert "is no run directory" in refused(str(run.path / "config.yaml"))
    with Server(run.path) as server:
        taken = server.server_address[1]
        assert f"port {taken} of 127.0.0.1 is taken" in refused(str(run.path), "--port", str(taken))
    assert "can't listen on port 7070 of no.such.host.invalid" in refused(
        str(run.path), "--host", "no.such.host.invalid"
    )
    (run.path / "samples.jsonl").unlink()
    (run.path / "samples.jsonl").mkdir()
    assert refused(str(run.path)) == f"verl: can't read {run.path / 'samples.jsonl'}: Is a directory"
    (run.path / "config.yaml").write_text("a: [")
    assert "is not the configuration of a run" in refused(str(run.path))


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """The real command, in a process group of its own: there SIGINT counts as in a terminal."""
    begun = []

    def start(code: str, *args: str) -> subprocess.Popen:
        begun.append(
            subprocess.Popen(
                [sys.executable, "-c", code, *args],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        )
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


# the command's own main; says at the end whether anything heavy was loaded
COMMAND = """
import atexit, sys
from verl.cli.main import main
atexit.register(lambda: print([name for name in ("torch", "transformers", "datasets") if name in sys.modules]))
main()
"""


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_the_command_is_light_and_ends_with_ctrl_c(run: Folder, start, host: str, warned: bool):
    run.step(1, sample())
    with (run.path / "samples.jsonl").open("a") as file:
        file.write("torn\n")
    process = start(COMMAND, "view", str(run.path), "--port", "0", "--host", host)
    line = process.stdout.readline()
    port = int(re.search(r"http://[\d.]+:(\d+)/", line)[1])
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    link.request("GET", "/row?n=0")
    assert json.loads(link.getresponse().read())["texts"][-1] == "€"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0 and out.split() == ["[]"]
    assert f"verl: {run.path / 'samples.jsonl'}: can't read line 2; left out" in err
    assert ("there is no password" in err) is warned and "Traceback" not in err


def test_a_second_address_of_this_machine(run: Folder):
    with Server(run.path, "::1") as server:
        assert server.local and server.url == f"http://[::1]:{server.server_address[1]}/"
    with pytest.raises(RequestError, match="no run directory"):
        Server(run.path / "nowhere")
    assert yaml.safe_load((run.path / "config.yaml").read_text())["algorithm"]["name"] == "grpo"
