"""Episodes by hand: ids, masks, limits, who waits for whom, and what is said when an environment fails."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import torch

from tests.rollout_contract import logprobs_of
from tests.tiny import EOS, f_bpe, f_llama
from verl.config.errors import RequestError, RunError
from verl.data import chat
from verl.data.loader import Prompt
from verl.models.packing import ATTENTION
from verl.models.policy import Policy
from verl.rollout.base import Request, Response, Sampling
from verl.rollout.native import NativeEngine
from verl.workers.environment import Environment, EpisodeWorker
from verl.workers.rollout import Draw, RolloutWorker, Row

WORDS = f_bpe(template="plain")
START = (8, 11, 3, 4, 12, 4, 11)  # u:xa/a: (a slash for each newline)
BETWEEN = [12, 8, 11, 6, 12, 4, 11]  # /u:c/a:
ROOM = Sampling(max_new_tokens=32)


def draw(number: int = 0, **fields: Any) -> Draw:
    return Draw(number, Prompt("7", START, "u:xa\na:", {"prompt": "xa", **fields}))


class Scripted:
    """An engine that says what was written down: a list of messages for each sample, of ``(ids, how they end)``."""

    version = 3

    def __init__(self, *says: Sequence[tuple[Sequence[int], str]]) -> None:
        self.says = [list(lines) for lines in says]
        self.asked: list[list[Request]] = []
        self.rooms: list[int] = []

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Response]:
        self.asked.append(list(requests))
        self.rooms.append(sampling.max_new_tokens)
        for r in requests:
            ids, reason = self.says[r.sample].pop(0)
            yield Response(r.row_id, tuple(ids), tuple(-0.5 for _ in ids), reason, self.version, 0.1)  # type: ignore


def play(engine: Any, turn: Any, n: int = 1, sampling: Sampling = ROOM, *, most: int = 8, limit: float | None = 5.0,
         together: bool = True, given: Draw | None = None) -> list[Row]:  # fmt: skip
    """The rows by sample."""

    async def run() -> list[Row]:
        worker = EpisodeWorker(engine, Environment(turn, limit), WORDS, most, together=together)
        return [row async for row in worker.generate([given or draw()], n, sampling)]

    return sorted(asyncio.run(run()), key=lambda row: row.sample)


def once(messages: list[dict[str, str]]) -> list[dict[str, str]] | None:
    """One more turn, then it is over."""
    return None if len(messages) > 2 else [{"role": "user", "content": "c"}]


@pytest.mark.parametrize("together", [True, False])
def test_a_row_by_hand(together):
    engine = Scripted([((5, 2), "stop"), ((7,), "stop")])
    (row,) = play(engine, once, together=together)
    assert list(row.response.ids) == [5, 2, *BETWEEN, 7]
    assert row.mask == (True,) * 2 + (False,) * 7 + (True,)
    logprobs = row.response.logprobs
    assert [logprobs[i] for i in (0, 1, 9)] == [-0.5] * 3 and all(math.isnan(x) for x in logprobs[2:9])
    assert (row.response.finish_reason, row.turns, row.response.version) == ("stop", 2, 3)
    assert row.messages == [
        {"role": "user", "content": "xa"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "ab"},
    ]  # fmt: skip
    first, second = (asked[0] for asked in engine.asked)
    assert first == Request("7@0/0", "7@0", START, 0)
    assert second.prompt_ids == (*START, 5, 2, *BETWEEN) and engine.rooms == [32, 32 - 9]
    assert second.row_id == first.row_id and second.prompt_id != first.prompt_id  # noise of its own


def test_what_was_sampled_is_never_tokenised_again():
    """``a`` and ``b`` were sampled as two tokens, which the tokenizer would write as one."""
    (row,) = play(Scripted([((4, 5), "stop"), ((4, 5), "stop")]), once)
    assert list(row.response.ids) == [4, 5, *BETWEEN, 4, 5] and row.messages[1]["content"] == "ab"


def test_tools_and_several_messages_at_once():
    def turn(messages: list[dict[str, str]]) -> list[dict[str, str]] | None:
        if messages[-1]["content"] != "c:x":  # a call
            return None
        return [{"role": "tool", "content": "ab", "name": "x"}, {"role": "user", "content": "c"}]

    (row,) = play(Scripted([((6, 11, 3, 2), "stop"), ((5, 2), "stop")]), turn)
    between = [12, 10, 11, 7, 12, 8, 11, 6, 12, 4, 11]  # /t:ab/u:c/a:
    assert list(row.response.ids) == [6, 11, 3, 2, *between, 5, 2] and sum(row.mask) == 6
    assert row.messages[2] == {"role": "tool", "content": "ab", "name": "x"}


def test_a_message_that_the_prompt_began():
    given = Draw(0, Prompt("7", (8, 11, 3, 12, 4, 11, 5), "", {"prompt": [
        {"role": "user", "content": "x"}, {"role": "assistant", "content": "b"},
    ]}))  # fmt: skip
    (row,) = play(
        Scripted([((4, 2), "stop"), ((3, 2), "stop")]), lambda m: None if len(m) > 3 else once(m), given=given
    )
    assert [m["content"] for m in row.messages] == ["x", "ba", "c", "x"][: len(row.messages)]
    assert row.messages[1] == {"role": "assistant", "content": "ba"}


@pytest.mark.parametrize(("room", "second"), [(11, True), (10, True), (9, False), (3, False)])
def test_the_limit_bounds_all_of_it(room, second):
    """Two sampled ids and seven between them: with ten one more may be sampled, with nine none, and the seven go."""
    engine = Scripted([((5, 2), "stop"), ((7,), "length" if room == 10 else "stop")])
    (row,) = play(engine, once, sampling=Sampling(max_new_tokens=room))
    assert list(row.response.ids) == ([5, 2, *BETWEEN, 7] if second else [5, 2])
    assert engine.rooms == ([room, room - 9] if second else [room])
    assert row.response.finish_reason == ("stop" if room == 11 else "length")
    assert len(row.messages) == (4 if second else 2) and len(row.response.ids) <= room


def test_who_ends_an_episode():
    calls: list[int] = []

    def forever(messages: list[dict[str, str]]) -> list[dict[str, str]]:
        calls.append(len(messages))
        return [{"role": "user", "content": "c"}]

    (row,) = play(Scripted([((5, 2), "stop")] * 3), forever, most=2)
    assert (row.turns, row.response.finish_reason, calls) == (2, "length", [2, 4])  # it would have gone on
    (row,) = play(Scripted([((5, 2), "stop")] * 3), once, most=2)
    assert (row.turns, row.response.finish_reason) == (2, "stop")
    for reason in ("length", "abort"):
        calls.clear()
        (row,) = play(Scripted([((5, 6), reason)]), forever)
        assert (row.turns, row.response.finish_reason, calls) == (1, reason, [])  # nobody answers half a message
        assert row.messages[-1]["content"] == "bc"


def test_a_row_is_as_old_as_its_oldest_token():
    class Updated(Scripted):
        async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Response]:
            async for response in super().generate(requests, sampling):
                yield response
            self.version += 1

    (row,) = play(Updated([((5, 2), "stop"), ((7,), "stop")]), once)
    assert row.turns == 2 and row.response.version == 3


# -- what an environment is given ------------------------------------------------------------------------------------


def test_arguments_are_matched_by_name():
    got: list[Any] = []
    engine = [((5, 2), "stop")]

    def named(messages, answer, row_id, missing=4):
        got.append((messages[-1]["content"], answer, row_id, missing))

    class Whole:
        async def __call__(self, history, **columns):
            got.append((history[-1]["content"], sorted(columns)))

    play(Scripted(engine), named, given=draw(answer="9"))
    play(Scripted(engine), lambda history: got.append(history[-1]["content"]))
    play(Scripted(engine), Whole(), given=draw(answer="9"))
    columns = ["answer", "messages", "prompt", "row_id"]
    assert got == [("b", "9", "7@0/0", 4), "b", ("b", columns)]
    with pytest.raises(
        RequestError, match=r"nothing matches its argument 'answer'; on offer: messages, prompt, row_id"
    ):
        play(Scripted(engine), lambda messages, answer: None)
    with pytest.raises(RequestError, match="no module 'my_gmae'"):
        Environment("my_gmae:turn", None)


def test_it_may_change_what_it_is_given():
    def turn(messages):
        messages.clear()

    assert len(play(Scripted([((5, 2), "stop")]), turn)[0].messages) == 2


# -- who waits for whom ----------------------------------------------------------------------------------------------


def test_rows_go_on_by_themselves():
    """The first row's answer comes when the second row has ended."""
    over = asyncio.Event()

    async def turn(messages, row_id):
        if row_id == "7@0/0":
            await over.wait()
        elif len(messages) > 2:
            over.set()
        return once(messages)

    engine = Scripted(*([((5, 2), "stop"), ((7,), "stop")] for _ in range(2)))
    rows = play(engine, turn, 2, together=False)
    assert [len(asked) for asked in engine.asked] == [2, 1, 1] and all(row.turns == 2 for row in rows)


def test_rows_in_step_are_one_batch_a_turn():
    """However long the environment takes for some; rows with less room are a call of their own, at the same time."""

    async def turn(messages, row_id):
        await asyncio.sleep(0.05 * (row_id == "7@0/0"))
        return once(messages)

    says = [
        [((5, 2), "stop"), ((7,), "stop")],
        [((5, 2), "stop"), ((7,), "stop")],
        [((5, 5, 2), "stop"), ((7,), "stop")],
    ]
    engine = Scripted(*says)
    play(engine, turn, 3)
    assert [[r.sample for r in asked] for asked in engine.asked] == [[0, 1, 2], [0, 1], [2]]


def test_plain_functions_run_side_by_side():
    meeting = threading.Barrier(4)

    def turn(messages):
        meeting.wait(5)

    assert len(play(Scripted(*([((5, 2), "stop")] for _ in range(4))), turn, 4)) == 4


def test_waiting_in_line_does_not_count(monkeypatch):
    monkeypatch.setattr("verl.workers.environment.THREADS", 1)
    rows = play(Scripted(*([((5, 2), "stop")] for _ in range(8))), lambda m: time.sleep(0.1), 8, limit=0.5)
    assert len(rows) == 8


# -- failures --------------------------------------------------------------------------------------------------------


def raises(messages):
    raise ValueError("no such door")


async def raises_later(messages):
    raise ValueError("no such door")


async def has_a_limit_of_its_own(messages):
    async with asyncio.timeout(0.01):
        await asyncio.sleep(60)


def leaves(messages):
    raise SystemExit("bye")


async def leaves_later(messages):
    raise SystemExit("bye")


def has_nothing_left(messages):
    return next(iter(()))


def sleeps(messages):
    time.sleep(1.0)


async def sleeps_softly(messages):
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (raises, r"failed: ValueError: no such door \(test_environment.py:\d+\)"),
        (raises_later, r"failed: ValueError: no such door"),
        (has_a_limit_of_its_own, "failed: TimeoutError: "),
        (leaves, "failed: RuntimeError: SystemExit: bye"),
        (leaves_later, "failed: RuntimeError: SystemExit: bye"),
        (has_nothing_left, "failed: RuntimeError: StopIteration"),
        (sleeps, "did not return within 0.1 s"),
        (sleeps_softly, "did not return within 0.1 s"),
        (lambda m: [], r"a list of messages, or None at the end, not \[\]"),
        (lambda m: "more", "a list of messages, or None at the end, not 'more'"),
        (lambda m: [{"role": "assistant", "content": "c"}], r"a role \(user, tool, system\)"),
        (lambda m: [{"role": "user", "content": None}], "its content as text"),
    ],
)
def test_a_failure_names_function_row_prompt_and_what_was_said(turn, said):
    started = time.monotonic()
    name = f"environment {turn.__name__}: row 7@0/0 "
    with pytest.raises(RunError, match=f"{name}.*{said}.* in turn 1. Prompt 7: 'u:xa.*the policy said: 'b'"):
        play(Scripted([((5, 2), "stop")]), turn, limit=0.1)
    assert time.monotonic() - started < 0.9


def test_a_template_that_refuses_is_told_with_the_row(monkeypatch):
    strict = "{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    monkeypatch.setattr(WORDS, "chat_template", strict + WORDS.chat_template)
    with pytest.raises(RunError, match=r"row 7@0/0 failed: DataError: the chat template refuses the turns .*no tools"):
        play(Scripted([((5, 2), "stop")]), lambda m: [{"role": "tool", "content": "c"}])


def test_a_caller_may_stop_early():
    cancelled = threading.Event()

    async def turn(messages, row_id):
        if row_id != "7@0/0":
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()

    async def run() -> None:
        says = [[((5, 2), "stop")], [((5, 2), "stop")]]
        worker = EpisodeWorker(Scripted(*says), Environment(turn, None), WORDS, 8, together=True)  # type: ignore
        rows = worker.generate([draw()], 2, ROOM)
        await anext(rows)
        await rows.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    assert cancelled.is_set()


# -- with a real engine ----------------------------------------------------------------------------------------------


def native(seed: int = 0, eos: frozenset[int] = frozenset({EOS, 5, 6, 7})) -> NativeEngine:
    lm = f_llama(seed)
    lm.set_attn_implementation(ATTENTION)
    return NativeEngine(Policy(lm), eos, 4, WORDS)


def test_without_an_answer_it_is_a_row_like_any_other():
    async def plain() -> list[Row]:
        return [row async for row in RolloutWorker(native()).generate([draw()], 6, ROOM)]

    rows = sorted(asyncio.run(plain()), key=lambda row: row.sample)
    for row, episode in zip(rows, play(native(), lambda m: None, 6), strict=True):
        assert (row.response.ids, row.response.logprobs) == (episode.response.ids, episode.response.logprobs)
        assert row.response.finish_reason == episode.response.finish_reason and all(episode.mask)


@pytest.mark.parametrize("together", [True, False])
def test_every_sampled_token_has_the_log_probability_of_a_plain_forward(together):
    """Of all ids before it, the environment's included; whatever was computed side by side."""

    def more(messages: list[dict[str, str]]) -> list[dict[str, str]]:
        return [{"role": "user", "content": messages[-1]["content"][:1] or "c"}]

    rows = play(native(), more, 6, Sampling(max_new_tokens=60, temperature=0.8), most=4, together=together)
    assert max(row.turns for row in rows) == 4 and len({row.response.ids for row in rows}) == 6
    for row in rows:
        mask, ids = torch.tensor(row.mask), row.response.ids
        expected = logprobs_of(f_llama(), START, ids, 0.8).gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row.response.logprobs)[mask], expected[mask], atol=1e-5, rtol=0)
        said = [m["content"] for m in row.messages if m["role"] == "assistant"]
        assert said == [chat.words_of(WORDS, part) for part in parts(ids, row.mask)]
        assert len(ids) <= 60


def test_in_step_a_run_is_the_same_to_the_bit():
    def turn_of(wait: Callable[[int], float]) -> Any:
        async def turn(messages, row_id):
            await asyncio.sleep(wait(int(row_id[-1])))
            return [{"role": "user", "content": "c"}]

        return turn

    runs = [
        play(native(), turn_of(wait), 6, Sampling(max_new_tokens=60), most=3)
        for wait in (lambda k: 0.0, lambda k: 0.01 * k, lambda k: 0.01 * (6 - k))
    ]
    told = [[(r.response.ids, torch.tensor(r.response.logprobs).tolist().__repr__()) for r in rows] for rows in runs]
    assert told[0] == told[1] == told[2]


def parts(ids: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
    """Runs of sampled ids."""
    found: list[list[int]] = []
    for i, (token, sampled) in enumerate(zip(ids, mask, strict=True)):
        if sampled and (i == 0 or not mask[i - 1]):
            found.append([])
        if sampled:
            found[-1].append(token)
    return found
