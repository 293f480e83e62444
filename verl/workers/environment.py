"""Episodes: an environment answers each message of the policy, and the policy goes on, until one of them ends it.

Only sampled tokens are the policy's. What the environment says stands between them in the response, outside the mask,
and has no log-probability (NaN). Each message is sampled as the response to all ids before it, by any engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.config.errors import RequestError, RunError
from verl.data import chat
from verl.data.chat import Message
from verl.rewards.base import excerpt
from verl.rewards.calls import failed, is_async
from verl.rewards.functions import imported
from verl.rollout.base import FinishReason, Request, Response, RolloutEngine, Sampling
from verl.workers.rollout import Draw, RolloutWorker, Row

ROLES = ("user", "tool", "system")
THREADS = 32  # plain functions side by side


class Late(RunError):
    """The environment overran its time."""


class Environment:
    """The user's function: called with the messages so far, gives those to append, or None at the episode's end.

    ``source``: ``module:function`` or a function, plain or async. Its argument ``messages``, or its only required one,
    gets the messages; others get the data's column of their name, or the episode's ``row_id``; ``**kwargs`` all of
    these. ``timeout``: seconds for one call. ``RequestError`` where it can't be found or called so.
    """

    def __init__(self, source: Any, timeout: float | None) -> None:
        self.function: Callable[..., Any] = (
            imported(source, "rollout.environment") if isinstance(source, str) else source
        )
        self.label = source if isinstance(source, str) else getattr(source, "__name__", type(source).__name__)
        self.timeout = timeout
        try:
            self._parameters = list(inspect.signature(self.function).parameters.values())
        except (TypeError, ValueError) as error:
            raise RequestError(f"rollout.environment {self.label}: its arguments can't be read ({error})") from error
        self._threads = asyncio.Semaphore(THREADS)

    def check(self, fields: Mapping[str, Any]) -> None:
        """``RequestError`` where data of these columns leaves an argument empty."""
        self._arguments([], "", fields)

    def _arguments(self, messages: list[Message], row_id: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        offered = {**fields, "row_id": row_id, "messages": messages}
        named = [p for p in self._parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = [p.name for p in named if p.default is p.empty]
        if len(required) == 1 and required[0] not in offered:
            offered[required[0]] = messages
        if missing := [name for name in required if name not in offered]:
            raise RequestError(
                f"rollout.environment {self.label}: nothing matches its argument {missing[0]!r}; on offer: "
                f"{', '.join(sorted(offered))}"
            )
        if any(p.kind is p.VAR_KEYWORD for p in self._parameters):
            return offered
        return {p.name: offered[p.name] for p in named if p.name in offered}

    async def answer(self, messages: Sequence[Message], row_id: str, fields: Mapping[str, Any]) -> list[Message] | None:
        """What the environment says next. Raises what the function raised, ``Late``, or ``TypeError`` where it gave
        something else than messages."""
        arguments = self._arguments([dict(m) for m in messages], row_id, fields)
        try:
            if is_async(self.function):
                said = await self._in_time(self.function(**arguments))
            else:
                async with self._threads:  # waiting in line doesn't count
                    said = await self._in_time(_threaded(self.function, arguments))
        except SystemExit as error:  # ends the run, not the process
            raise RuntimeError(f"SystemExit: {error}") from error
        return None if said is None else [_checked(m) for m in _listed(said)]

    async def _in_time(self, call: Awaitable[Any]) -> Any:
        scope = asyncio.timeout(self.timeout)
        try:
            async with scope:
                return await call
        except TimeoutError:
            if not scope.expired():  # one of the function's own
                raise
            raise Late(f"did not return within {self.timeout:g} s (rollout.turn_timeout)") from None


class EpisodeWorker(RolloutWorker):
    """Samples episodes. ``Sampling.max_new_tokens`` bounds a whole one, what the environment says included.

    ``together``: the rows' turns are computed in one batch each, so that what is computed with what doesn't depend on
    how long the environment takes; else every row goes on by itself.
    """

    def __init__(
        self, engine: RolloutEngine, environment: Environment, tokenizer: PreTrainedTokenizerBase, max_turns: int,
        *, together: bool,
    ) -> None:  # fmt: skip
        super().__init__(engine)
        self.environment, self.tokenizer, self.max_turns, self.together = environment, tokenizer, max_turns, together

    async def generate(self, draws: Sequence[Draw], n: int, sampling: Sampling) -> AsyncIterator[Row]:
        for draw in draws:
            self.environment.check(draw.prompt.fields)
        episodes = [_Episode(draw, k) for draw in draws for k in range(n)]
        ended: asyncio.Queue[_Episode | BaseException] = asyncio.Queue()
        work = asyncio.create_task(self._play(episodes, sampling, ended))
        try:
            for _ in episodes:
                result = await ended.get()
                if isinstance(result, BaseException):
                    raise result
                yield result.row()
        finally:  # a caller that stops early leaves no work behind
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _play(
        self, episodes: list[_Episode], sampling: Sampling, ended: asyncio.Queue[_Episode | BaseException]
    ) -> None:
        async def turn(group: asyncio.TaskGroup, part: list[_Episode], room: int) -> None:
            places = {e.row_id: e for e in part}
            asked = dataclasses.replace(sampling, max_new_tokens=room)
            async for response in self.engine.generate([e.request() for e in part], asked):
                group.create_task(goes_on(group, places[response.row_id], response))

        async def goes_on(group: asyncio.TaskGroup, episode: _Episode, response: Response) -> None:
            await self._hear(episode, response, sampling.max_new_tokens)
            if episode.reason is not None:
                ended.put_nowait(episode)
            elif not self.together:
                group.create_task(turn(group, [episode], sampling.max_new_tokens - len(episode.ids)))

        try:
            while episodes:
                async with asyncio.TaskGroup() as group:
                    for room, part in _by_room(episodes, sampling.max_new_tokens):
                        group.create_task(turn(group, part, room))
                episodes = [e for e in episodes if e.reason is None]
        except* Exception as failures:
            ended.put_nowait(failures.exceptions[0])

    async def _hear(self, episode: _Episode, response: Response, limit: int) -> None:
        """Take in a message of the policy and what the environment says to it."""
        episode.sampled(response, chat.words_of(self.tokenizer, response.ids))
        if response.finish_reason != "stop":
            episode.reason = response.finish_reason
            return
        prompt = episode.draw.prompt
        try:
            new = await self.environment.answer(episode.messages, episode.row_id, prompt.fields)
            ids = chat.follow(self.tokenizer, episode.messages, new, response.ids) if new is not None else []
        except Exception as error:
            what = failed(error)
            reason = str(error) if isinstance(error, Late) else f"failed: {what.error}"
            told = RunError(
                f"environment {self.environment.label}: row {episode.row_id} {reason} in turn {episode.turns}. "
                f"Prompt {prompt.id}: {excerpt(prompt.text)}; the policy said: "
                f"{excerpt(episode.messages[-1]['content'])}"
            )
            told.add_note(what.trace)
            raise told from error
        if new is None:
            episode.reason = "stop"
        elif episode.turns == self.max_turns or len(episode.ids) + len(ids) >= limit:
            episode.reason = "length"  # what nothing could be said to stays out
        else:
            episode.told(ids, new)


@dataclass(eq=False)
class _Episode:
    """One row under way. ``ids``, ``logprobs`` and ``mask`` are those of the response so far."""

    draw: Draw
    sample: int
    messages: list[Message] = field(init=False)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    turns: int = 0  # messages of the policy
    version: int = 0
    reason: FinishReason | None = None
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        prompt = self.draw.prompt
        self.messages = [dict(m) for m in chat.as_messages(prompt.fields.get("prompt", prompt.text))]

    @property
    def row_id(self) -> str:
        return f"{self.draw.id}/{self.sample}"

    def request(self) -> Request:
        """For the next message. Each turn has noise of its own; the first, that of a row without an environment."""
        noise = f"{self.draw.id}+{self.turns}" if self.turns else self.draw.id
        return Request(self.row_id, noise, (*self.draw.prompt.ids, *self.ids), self.sample)

    def sampled(self, response: Response, words: str) -> None:
        self._add(response.ids, response.logprobs, True)
        self.version = min(self.version, response.version) if self.turns else response.version
        self.turns += 1
        self.seconds = time.monotonic() - self.began
        if self.messages[-1]["role"] == "assistant":  # begun by the prompt
            words = self.messages.pop()["content"] + words
        self.messages.append({"role": "assistant", "content": words})

    def told(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        self._add(ids, [math.nan] * len(ids), False)
        self.messages += messages

    def _add(self, ids: Sequence[int], logprobs: Sequence[float], sampled: bool) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.mask += [sampled] * len(ids)

    def row(self) -> Row:
        assert self.reason is not None
        response = Response(
            self.row_id, tuple(self.ids), tuple(self.logprobs), self.reason, self.version, self.seconds
        )  # fmt: skip
        return Row(self.draw, self.sample, response, tuple(self.mask), self.turns, self.messages)


def _by_room(episodes: Sequence[_Episode], limit: int) -> Iterator[tuple[int, list[_Episode]]]:
    """Episodes by the tokens that each may still sample."""
    rooms: dict[int, list[_Episode]] = {}
    for episode in episodes:
        rooms.setdefault(limit - len(episode.ids), []).append(episode)
    yield from rooms.items()


async def _threaded(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The call's result, from a thread that nothing waits for once this is cancelled."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def tell(setter: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            setter(value)

    def call() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (result.set_result, function(**arguments))
        except BaseException as error:
            told = RuntimeError(f"StopIteration: {error}") if isinstance(error, StopIteration) else error
            outcome = (result.set_exception, told)  # a future refuses a StopIteration
        try:
            loop.call_soon_threadsafe(tell, *outcome)
        except RuntimeError:  # the loop is closed: nobody waits
            return

    threading.Thread(target=call, name="verl-environment", daemon=True).start()
    said = await result
    return await said if inspect.isawaitable(said) else said


def _listed(said: Any) -> list[Any]:
    if not isinstance(said, list | tuple) or not said:
        raise TypeError(f"it must return a list of messages, or None at the end, not {said!r:.80}")
    return list(said)


def _checked(message: Any) -> Message:
    fits = isinstance(message, Mapping) and message.get("role") in ROLES and isinstance(message.get("content"), str)
    if not fits:
        raise TypeError(f"a message must have a role ({', '.join(ROLES)}) and its content as text, not {message!r:.80}")
    return dict(message)
