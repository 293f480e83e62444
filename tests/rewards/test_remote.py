from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.rewards.rows import make_rows
from tests.rewards.server import Server, lengths, scores, serving
from verl.config.errors import RequestError, RewardError
from verl.rewards import remote
from verl.rewards.base import Rewards, Scores
from verl.rewards.functions import resolve

ROWS = make_rows(["a", "bb", "ccc"], answer=["x", "y", {"deep": [1]}])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BACK_OFF", 0.01)


def ask(server: Server, rows: Any = ROWS, **options: Any) -> Any:
    return remote.http(rows, url=server.url, **options)


def test_rows_go_in_batches_and_scores_come_back_in_order() -> None:
    with serving(lengths) as server:
        assert ask(server, batch_size=2) == [1, 2, 3]
        assert [len(asked["rows"]) for asked in server.asked] == [2, 1]
        assert server.asked[1]["rows"] == [
            {
                "id": "p0/2",
                "prompt_id": "p0",
                "prompt": "Q?",
                "prompt_text": "<user>Q?<assistant>",
                "response": "ccc",
                "finish_reason": "stop",
                "fields": {"answer": {"deep": [1]}},
            }
        ]
        assert server.headers[0]["Content-Type"] == "application/json" and "Authorization" not in server.headers[0]


def test_as_a_reward_with_null_dict_and_weights() -> None:
    answer = scores(0.5, None, {"score": 2, "style": 0.25})
    with (
        serving(answer) as server,
        Rewards([{"name": "http", "url": server.url}, len], [2, 1], processes=1) as rewards,
    ):
        found = rewards.score(ROWS)
    assert found.per_reward["http"] == [0.5, None, 2.0] and found.totals == [2.0, 2.0, 7.0]
    assert found.extra == {"http/style": [None, None, 0.25]}


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_server_that_fails_twice_is_asked_again(status: int) -> None:
    with serving(lambda asked: lengths(asked) if len(server.asked) > 2 else (status, b"busy")) as server:
        assert ask(server) == [1, 2, 3] and len(server.asked) == 3


@pytest.mark.parametrize(
    ("status", "body", "attempts", "message"),
    [
        (500, b"", 3, r"answered 500 Internal Server Error \(3 attempts\); expected status 200 with scores in JSON"),
        (404, b"", 1, "answered 404 Not Found; expected"),
        (401, b"", 1, "answered 401"),
        (302, b"", 1, "answered 302"),
        (200, b"<html>", 1, r'expected JSON {"scores": \[...\]} with 3 entries, one per row, received what is no JSON'),
        (200, b"\x80\x04N.", 1, "received what is no JSON"),
        (200, b"[1, 2, 3]", 1, "received a list of 3"),
        (200, b'{"rewards": [1, 2, 3]}', 1, r"received the keys \['rewards'\]"),
        (200, b'{"scores": 1}', 1, "received a bare int 1"),
        (200, b'{"scores": [1, 2]}', 1, "received 2"),
        (200, b'{"scores": [1, 2, 3, 4]}', 1, "received 4"),
    ],
)
def test_what_is_no_answer_names_url_and_what_was_expected(
    status: int, body: bytes, attempts: int, message: str
) -> None:
    with serving(lambda asked: (status, body)) as server, pytest.raises(RewardError, match=message) as error:
        ask(server, retries=2)
    assert server.url in str(error.value) and len(server.asked) == attempts


def test_a_server_that_is_not_there_or_hangs() -> None:
    hang = threading.Event()

    def wait(asked: Any) -> Any:
        hang.wait(20)
        return 200, {}

    with serving(wait) as server:
        start = time.perf_counter()
        with pytest.raises(RewardError, match=r"/score did not answer within 0.2 s \(2 attempts\)"):
            ask(server, timeout=0.2, retries=1)
        assert time.perf_counter() - start < 10 and len(server.asked) == 2
        hang.set()
    with pytest.raises(RewardError, match=r"can't be reached: ConnectionRefusedError.*\(2 attempts\)"):
        ask(server, retries=1)


def score(answer: Any, **settings: Any) -> Scores:
    spec = {"retries": 0} | settings.pop("spec", {})
    with serving(answer) as server, Rewards([{"name": "http", "url": server.url, **spec}], **settings) as rewards:
        return rewards.score(ROWS)


def test_an_unreachable_server_follows_the_policy_a_wrong_answer_never_does() -> None:
    assert score(lambda asked: (500, b""), failure="default", default=-1.0, processes=1).totals == [-1.0] * 3
    with pytest.raises(RewardError, match=r"reward rule 'http': row 0 \(p0/0\) failed: RewardError: http://.*500"):
        score(lambda asked: (500, b""), processes=1)
    with pytest.raises(RewardError, match=r"reward rule 'http': http://.* 3 entries, one per row, received 1$"):
        score(scores(1.0), failure="default", processes=1)


def test_the_token_travels_in_the_header_and_is_never_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SCORER_TOKEN", "hunter2")
    with serving(lambda asked: (500, b"hunter2")) as server:
        spec = {"name": "http", "url": f"{server.url}?key=hunter2", "token_env": "SCORER_TOKEN", "retries": 0}
        with Rewards([spec], processes=1) as rewards, pytest.raises(RewardError) as error:
            rewards.score(ROWS)
    assert server.headers[0]["Authorization"] == "Bearer hunter2"
    told = [str(error.value), *error.value.__notes__, caplog.text, *capfd.readouterr()]
    assert server.url in told[0] and not any("hunter2" in text for text in told)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs the option 'url'"),
        ({"url": "file:///etc/passwd"}, "must begin with http:// or https://"),
        ({"url": "http://"}, "name a host"),
        ({"url": "http://me:hunter2@host/"}, "must not hold a user or password"),
        ({"url": "http://host", "token_env": "NO_SUCH_VARIABLE_X"}, "'NO_SUCH_VARIABLE_X' .token_env. is not set"),
        ({"url": "http://host", "timeout": 60.0}, "timeout 60 must be under reward_timeout 60"),
        ({"url": "http://host", "batch_size": 0}, "batch_size at least 1"),
    ],
)
def test_wrong_options_are_told_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        resolve({"name": "http", **options}, 60.0)
    assert "hunter2" not in str(error.value)
