"""The live source: appended and posted rows, in order of arrival; repeats, waits, resume, and what is refused."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from tests.tiny import f_bpe
from verl.config.errors import DataError
from verl.data.loader import PromptDataset, open_example_set, open_examples, open_prompts

LIMITS = {"max_prompt_length": 32, "max_response_length": 8}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "events.jsonl"


@pytest.fixture
def feeds():
    """Opens feeds and closes them."""
    made = []

    def opened(file, kind="prompts", **how):
        data = {"name": "live", "path": str(file), **{k: how.pop(k) for k in LIVE_KEYS if k in how}}
        seed, bad_rows, tokenizer = how.pop("seed", 0), how.pop("bad_rows", "error"), f_bpe()
        if kind == "prompts":
            feed = PromptDataset(data, bad_rows=bad_rows).feed(tokenizer, max_prompt_length=8, seed=seed, **how)
        else:
            feed = open_examples(data, tokenizer, kind, seed=seed, bad_rows=bad_rows, **LIMITS, **how)
        made.append(feed)
        return feed

    yield opened
    for feed in made:
        feed.close()


LIVE_KEYS = ("port", "when_empty", "wait_timeout")


def add(file, *prompts):
    with file.open("a") as stream:
        stream.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)


def post(feed, body, **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(feed.address, data, {k: v for k, v in sent.items() if v is not None})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ids(items):
    return [item.id for item in items]


def test_rows_come_in_order_of_arrival_and_earlier_ones_repeat_in_passes(file, feeds):
    add(file, "x", "xx", "xxx")
    feed = feeds(file)
    assert ids(feed.take(2)) == ["0", "1"]
    add(file, "a")
    assert ids(feed.take(2)) == ["2", "3"] and feed.epoch == 0
    passes = [ids(feed.take(4)) for _ in range(3)]
    assert all(sorted(drawn) == list("0123") for drawn in passes) and len({tuple(p) for p in passes}) > 1
    assert feed.epoch == 3 and feed.size is None and feed.counts == {"kept": 4, "filtered": 0, "truncated": 0}
    middle = feed.take(2)
    add(file, "b")
    assert ids(feed.take(1)) == ["4"], "what is new comes first"
    assert sorted(ids(middle + feed.take(2))) == list("0123"), "the pass goes on"
    assert sorted(ids(feed.take(5))) == list("01234"), "and the next one has it"
    again = feed.take(1)[0]
    assert again.text == ["x", "xx", "xxx", "a", "b"][int(again.id)]


def test_the_order_of_repeats_is_seeded(file, feeds):
    add(file, *["x" * n for n in range(1, 7)])
    drawn = {
        seed: [tuple(ids(f.take(30))) for f in (feeds(file, seed=seed), feeds(file, seed=seed))] for seed in (0, 1)
    }
    assert drawn[0][0] == drawn[0][1] != drawn[1][0]
    assert ids(feeds(file, shuffle=False).take(9)) == [*"012345", *"012"]


@pytest.mark.parametrize("when_empty", ["repeat", "wait"])
def test_an_empty_source_waits_and_then_gives_up(file, feeds, when_empty):
    feed = feeds(file, when_empty=when_empty, wait_timeout=0.15)
    with pytest.raises(DataError, match=r"no new row for 0.15 s, 2 more are needed"):
        feed.take(2)
    add(file, "x")
    if when_empty == "repeat":
        assert ids(feed.take(2)) == ["0", "0"]
        return
    with pytest.raises(DataError, match="1 more are needed"):
        feed.take(2)
    assert feed.counts["kept"] == 0, "the position is where it was"
    add(file, "a")
    assert ids(feed.take(2)) == ["0", "1"] and feed.counts["kept"] == 2


def test_a_take_that_waits_goes_on_with_the_row_that_is_posted(file, feeds):
    feed = feeds(file, port=0, when_empty="wait", wait_timeout=10)
    got = []
    thread = threading.Thread(target=lambda: got.extend(feed.take(1)))
    thread.start()
    start = time.monotonic()
    assert post(feed, {"prompt": "xa"}) == (200, {"accepted": 1})
    thread.join(5)
    assert ids(got) == ["0"] and time.monotonic() - start < 5


def test_closing_ends_a_take_that_waits(file, feeds):
    feed = feeds(file, when_empty="wait")
    failed = []

    def take():
        with pytest.raises(DataError, match="closed while it waited"):
            feed.take(1)
        failed.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    feed.close()
    thread.join(5)
    assert failed == [True]


def test_a_half_written_line_is_left_for_the_next_take(file, feeds):
    feed = feeds(file)
    line = json.dumps({"prompt": "xa", "note": "ä"}, ensure_ascii=False).encode()
    file.write_bytes(b'{"prompt": "x"}\n\n' + line[:20])
    assert ids(feed.take(2)) == ["0", "0"]
    for cut in (line.index(b"\xc3") + 1, len(line) - 1):
        file.write_bytes(b'{"prompt": "x"}\n\n' + line[:cut])
        assert ids(feed.take(1)) == ["0"]
    file.write_bytes(b'{"prompt": "x"}\n\n' + line)  # whole, though its end is still missing
    assert feed.take(1)[0].fields["note"] == "ä"
    with file.open("ab") as stream:
        stream.write(b'\n{"prompt": "b"}')
    assert ids(feed.take(1)) == ["2"]


@pytest.mark.parametrize("kind", ["pairs", "labelled", "chats"])
def test_events_of_every_kind(file, feeds, kind):
    row = {
        "pairs": {"prompt": "xa", "chosen": "c", "rejected": "b"},
        "labelled": {"prompt": "xa", "response": "c", "label": True},
        "chats": {"messages": [{"role": "user", "content": "xa"}, {"role": "assistant", "content": "c"}]},
    }[kind]
    feed = feeds(file, kind, port=0)
    assert post(feed, [row, row]) == (200, {"accepted": 2})
    first, second = feed.take(2)
    assert (first.id, second.id) == ("0", "1") and first.completions == second.completions
    assert (*first.prompt_ids, *first.completions[0].ids) == (3, 4, 6, 2)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [row, row]


def test_events_may_differ_in_their_columns(file, feeds):
    feed = feeds(file, "labelled", port=0)
    click, pair = {"prompt": "x", "response": "c", "label": False}, {"question": "xx", "chosen": "c", "rejected": "a"}
    post(feed, [pair, click, pair])
    drawn = feed.take(5)
    assert [(e.id, e.label) for e in drawn] == [
        ("0/chosen", True), ("0/rejected", False), ("1", False), ("2/chosen", True), ("2/rejected", False),
    ]  # fmt: skip


@pytest.mark.parametrize("taken", range(9))
def test_resume_at_any_point(file, feeds, taken):
    def row(n):
        pair = {"prompt": "x" * n, "chosen": "c", "rejected": "a"}
        return json.dumps(pair if n % 2 else {"prompt": "x" * n, "completion": "c", "label": 1}) + "\n"

    file.write_text(row(1) + "not JSON\n" + row(2) + row(3))
    whole = feeds(file, "labelled", bad_rows="drop", seed=3)
    drawn = whole.take(14)
    before = feeds(file, "labelled", bad_rows="drop", seed=3)
    assert before.take(taken) == drawn[:taken]
    resumed = feeds(file, "labelled", bad_rows="drop", seed=3)
    resumed.restore(json.loads(json.dumps(before.state())))
    assert resumed.counts == before.counts and resumed.epoch == before.epoch
    assert resumed.take(14 - taken) == drawn[taken:]
    file.write_text(file.read_text() + row(4))
    assert "4" in ids(resumed.take(2)), "at most the other side of a pair comes first"


def test_a_position_of_another_file_or_seed_is_refused(file, feeds):
    add(file, "x", "xx")
    feed = feeds(file)
    feed.take(2)
    with pytest.raises(DataError, match="saved data position is for seed 0"):
        feeds(file, seed=1).restore(feed.state())
    file.write_text('{"prompt": "b"}\n{"prompt": "xx"}\n')
    with pytest.raises(DataError, match="first 2 rows aren't those"):
        feeds(file).restore(feed.state())
    file.write_text('{"prompt": "x"}\n')
    with pytest.raises(DataError, match="first 2 rows aren't those"):
        feeds(file).restore(feed.state())
    with pytest.raises(DataError, match="got shorter"):
        feed.take(1)


def test_bad_lines_follow_the_policy(file, feeds, caplog):
    file.write_text('{"prompt": "x"}\nnot JSON\n{"prompt": ""}\n{"other": 1}\n[2]\n{"prompt": "xx"}\n')
    feed = feeds(file, bad_rows="drop")
    with caplog.at_level(logging.WARNING, "verl"):
        assert ids(feed.take(2)) == ["0", "5"]
        assert sorted(ids(feed.take(2))) == ["0", "5"], "a pass leaves bad rows out"
    assert feed.counts == {"kept": 2, "filtered": 0, "truncated": 0, "bad": 4} and len(caplog.records) == 3
    strict = feeds(file)
    strict.take(1)
    with pytest.raises(DataError, match=r"events.jsonl: row 1: .*not JSON"):
        strict.take(1)


ROW = {"prompt": "x"}


@pytest.mark.parametrize(
    ("body", "headers", "status", "said"),
    [
        (b'{"prompt": ', {}, 400, "not JSON"),
        (b'{"prompt": "\xff"}', {}, 400, "not JSON"),
        (b'{"prompt": "\\ud800"}', {}, 400, "not JSON"),
        (b'{"prompt": "x", "score": NaN}', {}, 400, "NaN is no JSON number"),
        (b"[" * 100_000, {}, 400, "not JSON"),
        (b"3", {}, 400, "row 0 is a int, not an object"),
        ([ROW, "x"], {}, 400, "row 1 is a str, not an object"),
        ([ROW, {"prompt": ""}], {}, 422, "row 1: prompt is empty"),
        ({"other": "x"}, {}, 422, "no prompt column"),
        (ROW, {"Content-Type": "text/plain"}, 415, "must be application/json"),
        (ROW, {"Host": "evil.example:8700"}, 403, "the host must be 127.0.0.1"),
        (ROW, {"Host": "evil.example"}, 403, "the host must be 127.0.0.1"),
    ],
)
def test_bad_bodies_are_refused_with_a_reason_and_nothing_is_written(file, feeds, body, headers, status, said):
    feed = feeds(file, port=0)
    code, answer = post(feed, body, **headers)
    assert code == status and said in answer["error"]
    assert file.read_bytes() == b""
    assert post(feed, ROW)[0] == 200 and ids(feed.take(1)) == ["0"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/", {"Content-Length": str(10**9)}, 413),
        ("POST", "/", {"Content-Length": "-1"}, 411),
        ("POST", "/", {}, 411),
        ("POST", "/other", {"Content-Length": "2"}, 404),
        ("GET", "/", {}, 501),
    ],
)
def test_requests_that_are_no_rows(file, feeds, method, path, headers, status):
    feed = feeds(file, port=0)
    connection = http.client.HTTPConnection(feed.address.removeprefix("http://").rstrip("/"), timeout=5)
    connection.putrequest(method, path)
    for name, value in {"Content-Type": "application/json", **headers}.items():
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == status and file.read_bytes() == b""
    connection.close()


def test_it_listens_on_loopback_only_and_a_taken_port_is_named(file, feeds):
    feed = feeds(file, port=0)
    port = int(feed.address.rstrip("/").rpartition(":")[2])
    assert feed._endpoint._server.server_address == ("127.0.0.1", port)
    outside = socket.socket()
    outside.bind(("127.0.0.2", port))  # free: the port isn't bound on every address
    outside.close()
    with pytest.raises(DataError, match=f"port {port} can't be opened"):
        feeds(file, port=port)
    feed.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
    assert not [t for t in threading.enumerate() if t.name.startswith("live source")]
    feeds(file, port=port)


def test_posts_beside_another_writer(file, feeds):
    feed = feeds(file, port=0)
    file.write_bytes(b'{"prompt": "x')
    code, answer = post(feed, {"prompt": "b"})
    assert code == 503 and "half a line" in answer["error"] and file.read_bytes() == b'{"prompt": "x'
    file.write_bytes(b'{"prompt": "x"}')
    assert post(feed, {"prompt": "b"})[0] == 200
    assert file.read_bytes() == b'{"prompt": "x"}\n{"prompt": "b"}\n'


def test_many_posts_at_once_lose_nothing(file, feeds):
    feed = feeds(file, port=0)
    threads = [threading.Thread(target=post, args=(feed, [{"prompt": "x", "n": n}] * 5)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [prompt.fields["n"] for prompt in feed.take(40)]
    assert sorted(numbers) == sorted(list(range(8)) * 5)
    assert all(len(set(numbers[i : i + 5])) == 1 for i in range(0, 40, 5)), "a request's rows stay together"


def test_wrong_keys_and_wrong_uses_are_told(file):
    for wrong, said in [
        ({"when_empty": "stop"}, "when_empty"),
        ({"port": 70_000}, "port"),
        ({"prot": 1}, "prot"),
        ({"wait_timeout": 0}, "wait_timeout"),
    ]:
        with pytest.raises(DataError, match=f"live source: {said}"):
            PromptDataset({"name": "live", "path": str(file), **wrong}).feed(f_bpe(), max_prompt_length=8)
    spec = {"name": "live", "path": str(file)}
    with pytest.raises(DataError, match="has no end"):
        open_prompts(spec, f_bpe(), max_prompt_length=8)
    with pytest.raises(DataError, match="has no end"):
        open_example_set(spec, f_bpe(), "pairs", **LIMITS)
    with pytest.raises(DataError, match=r"nowhere.* can't be opened"):
        PromptDataset(spec | {"path": str(file.parent / "nowhere" / "a"), "port": 0}).feed(f_bpe(), max_prompt_length=8)


def test_the_columns_are_the_first_rows(file):
    data = PromptDataset({"name": "live", "path": str(file)})
    assert data.field_names == {"prompt"}
    file.write_text('{"question": "x", "answer": "1"}\n')
    assert data.field_names == {"question", "prompt", "answer"}
