"""What engines over HTTP share: rows go to the least loaded server, failed ones again, and weights are kept in a folder
from which a server that lost them gets them back.

One thread with an event loop of its own speaks to the servers, whoever calls. A row is one request with a seed of its
own, so an answer that was lost on the way is asked for again and is the same answer.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2 as httpx
import torch
from safetensors.torch import save_file
from torch import Tensor

from verl.config.errors import RequestError, RunError, shown, writing
from verl.models.naming import check_fit
from verl.rollout.base import FinishReason, Request, Response, Sampling, checked
from verl.rollout.sampling import noise_key

BACK_OFF, LONGEST = 0.5, 30.0  # seconds a server rests after its first failure in a row; doubles up to
SHARD = 2 << 30  # bytes of one weights file; so much is copied to this process's memory
T = TypeVar("T")
log = logging.getLogger(__name__)
PROBE = (1,)  # a prompt that every vocabulary has
FORM = (KeyError, TypeError, IndexError, ValueError)  # an answer that isn't of the form read
REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
Sampled = tuple[tuple[int, ...], tuple[float, ...], FinishReason]


class Failed(Exception):
    """The server can't be reached, or says that it may be tried again."""

    def __init__(self, words: str, status: int | None = None) -> None:
        super().__init__(words)
        self.status = status


class Refused(Exception):
    """The server says that the request is wrong."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"answered {status}: {words}")
        self.status = status


@dataclass(eq=False)
class Server:
    url: str
    rows: int = 0  # under way
    failures: int = 0  # in a row
    rests_until: float = 0.0
    weights: object | None = field(default_factory=object)  # another one with every load; None: it lost them
    known: bool = False  # it has answered at least once
    met: bool = False  # False: the next two are to be asked
    model: str = ""  # as served
    longest: int | None = None  # tokens of prompt and response
    tells: frozenset[str] | None = None  # which of temperature, truncation its logprobs reflect; None: to be probed
    mark: str = ""  # by which the weights that it took are known
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it is being prepared


@dataclass(eq=False)
class Row:
    request: Request
    key: int
    asked: float
    server: Server | None = None  # where it is under way
    name: str = ""  # of this attempt
    aborted: bool = False
    task: asyncio.Task[Any] | None = None  # once it runs: cancelled before, it could not deliver


def probe() -> Row:
    return Row(Request("probe", "probe", PROBE), 0, 0.0, name=f"probe-{time.monotonic_ns():x}")


def as_saved(tensor: Tensor) -> Tensor:
    """A copy in this process's memory."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _noting(tensors: Iterable[tuple[str, Tensor]], form: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The same; their names and shapes go into ``form``."""
    for name, tensor in tensors:
        form[name] = torch.empty(tensor.shape, device="meta")
        yield name, tensor


def common(sampling: Sampling, eos: frozenset[int]) -> dict[str, Any]:
    """Sampling options that both kinds of servers call alike: all are named, so that no default gets in."""
    return {
        "n": 1,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        "top_k": -1 if sampling.greedy else sampling.top_k or -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": sorted(eos),
        "stop": list(sampling.stop),
        "skip_special_tokens": False,
    }


class HttpEngine:
    """The part of a ``RolloutEngine`` that doesn't depend on the servers' kind.

    Args:
        urls: where the servers are; all serve the same model.
        eos: every id that ends a response.
        model: the served name; ``None``: asked.
        api_key: sent as a bearer token; never logged.
        timeout: seconds for one answer.
        retries: further attempts at a row, or at giving weights, where a server fails.
        max_rows: most rows under way.
        folder: where weights are written for the servers, which must see it under this name; ``None``: a new
            temporary one.
    """

    def __init__(
        self,
        urls: Sequence[str],
        eos: frozenset[int],
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        retries: int = 8,
        max_rows: int = 256,
        folder: str | None = None,
    ) -> None:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
                raise RequestError(f"{shown(url)!r} must be http://host:port or https://host:port, without a password")
        found = [url.rstrip("/").removesuffix("/v1") for url in urls]
        if not found or len(set(found)) < len(found):
            raise RequestError(f"{len(urls)} urls of servers; at least one, and each once, would be right")
        if timeout <= 0 or retries < 0 or max_rows < 1:
            raise RequestError("timeout must be above 0, retries at least 0, max_rows at least 1")
        self.eos, self.model, self.retries, self.version = eos, model, retries, 0
        self.servers = [Server(url) for url in found]
        self.kept: Path | None = None  # the weights that every server must have
        self._key, self._under = api_key, folder
        self._folder: Path | None = None
        self._form: dict[str, Tensor] = {}  # shapes of the weights that were taken before
        self._loads = 0
        self._broken = ""  # why not every server has the weights
        self._calls: dict[asyncio.Task[Any], list[Row]] = {}
        self._slots = asyncio.Semaphore(max_rows)
        self._aside: set[asyncio.Task[None]] = set()
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # else a line for each request
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0), pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="verl-http", daemon=True)
        self._thread.start()

    # What a kind of server says of itself.

    def body(self, server: Server, row: Row, sampling: Sampling) -> tuple[str, dict[str, Any]]:
        """Path and JSON of the request for one row; every sampling option is named, so no default gets in."""
        raise NotImplementedError

    def read(self, answer: Any, sampling: Sampling) -> Sampled:
        """One of ``FORM`` is raised where the answer isn't of the form."""
        raise NotImplementedError

    async def likeliest(self, server: Server, sampling: Sampling) -> float:
        """The largest logprob that the server tells for the token after ``PROBE``."""
        raise NotImplementedError

    def untold(self, what: str) -> str:
        """What to change where logprobs don't reflect ``temperature`` or ``truncation``."""
        raise NotImplementedError

    async def install(self, server: Server) -> None:
        """Give ``kept`` to the server; nothing of the old weights may be left in its caches."""
        raise NotImplementedError

    async def holds(self, server: Server, answer: Any) -> bool:
        """Whether ``answer`` is from the weights last installed. ``answer`` is a ``Refused``, too."""
        raise NotImplementedError

    async def ended(self, server: Server, row: Row) -> None:
        """Tell the server of an aborted row, whose connection is closed."""

    async def forget(self, server: Server) -> None:
        """Take away from the server what this engine put there."""

    def files(self, folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write weights so that a server can read them, some at a time."""
        part: dict[str, Tensor] = {}
        number, size = 0, 0
        for name, tensor in tensors:
            part[name] = as_saved(tensor)
            size += part[name].nbytes
            if size > SHARD:
                save_file(part, folder / f"model-{number:05}.safetensors", {"format": "pt"})
                part, number, size = {}, number + 1, 0
        if part:
            save_file(part, folder / f"model-{number:05}.safetensors", {"format": "pt"})

    # The engine.

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Response]:
        """See ``RolloutEngine``. Rows finish in any order; with ``greedy`` logprobs are those at temperature 1. An
        aborted row comes back without tokens. A request that a server refuses ends the call after others may have
        been sampled."""
        if self._broken:
            raise RunError(f"the engine has no whole weights: {self._broken}")
        asked = list(checked(requests))
        if not asked:
            return
        results: asyncio.Queue[Response | BaseException] = asyncio.Queue()
        here, now = asyncio.get_running_loop(), time.monotonic()

        def deliver(result: Response | BaseException) -> None:
            with suppress(RuntimeError):  # the caller's loop has ended
                here.call_soon_threadsafe(results.put_nowait, result)

        rows = [Row(r, noise_key(sampling.seed, r.prompt_id, r.sample), now) for r in asked]
        call = asyncio.run_coroutine_threadsafe(self._sample(rows, sampling, deliver), self._loop)
        try:
            for _ in rows:
                result = await results.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:  # a caller that stops early leaves no work behind
            call.cancel()

    def abort(self, row_ids: Iterable[str]) -> None:
        """See ``RolloutEngine``; what an aborted row has sampled so far isn't known here, so it comes back empty."""
        self._loop.call_soon_threadsafe(self._abort, set(row_ids))

    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See ``RolloutEngine``. The weights stay in the folder until the next ones, for servers that restart.

        Raises:
            RequestError: the servers take no weights, and the message says how to start them; or the folder for
                weights can't be written to.
        """
        self._broken, self._loads = f"loading version {version} failed", self._loads + 1
        if self._folder is None:
            with writing(self._under, key="rollout.weights_dir"):
                self._folder = Path(tempfile.mkdtemp(prefix="verl-weights-", dir=self._under))
        if self.kept is not None:
            shutil.rmtree(self.kept, ignore_errors=True)
        self.kept, form = self._folder / f"{self._loads}-{version}", dict[str, Tensor]()
        try:
            self.kept.mkdir()
            self.files(self.kept, _noting(tensors, form))
        except OSError as error:
            raise RunError(f"the weights can't be written for the servers: {error}") from error
        check_fit(self._form or form, form)  # a server would not say that some are missing
        self._do(self._install_all())
        self._form, self._broken, self.version = form, "", version

    def sleep(self) -> None:
        """The servers' memory is their own."""

    def wake(self) -> None:
        pass

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # In the loop's thread.

    async def call(self, server: Server, method: str, path: str, body: Any = None) -> Any:
        """The server's answer, JSON or else text. ``Failed`` or ``Refused``, in the server's words."""
        try:
            answer = await self._client.request(method, server.url + path, json=body)
        except httpx.TimeoutException as error:
            raise Failed(f"{server.url} did not answer in time ({type(error).__name__})") from None
        except httpx.HTTPError as error:
            raise Failed(f"{server.url} can't be reached: {type(error).__name__}: {error}") from None
        server.known = True
        if answer.is_success:
            try:
                return answer.json()
            except ValueError:
                return answer.text
        words = self._words(answer)
        if answer.status_code in (408, 429) or answer.status_code >= 500:
            raise Failed(f"{server.url} answered {answer.status_code}: {words}", answer.status_code)
        raise Refused(answer.status_code, words)

    def _words(self, answer: httpx.Response) -> str:
        """What a server says of an error, without the key."""
        try:
            found: Any = answer.json()
            for name in ("error", "message", "detail"):
                found = found.get(name, found) if isinstance(found, dict) else found
        except ValueError:
            found = answer.text
        text = str(found).strip()[:500] or answer.reason_phrase
        return text.replace(self._key, "***") if self._key else text

    def _do(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _abort(self, row_ids: set[str]) -> None:
        for row in (row for rows in self._calls.values() for row in rows):
            if row.request.row_id in row_ids:
                row.aborted = True
                if row.task is not None:
                    row.task.cancel()

    async def _sample(
        self, rows: list[Row], sampling: Sampling, deliver: Callable[[Response | BaseException], object]
    ) -> None:
        call = asyncio.current_task()
        assert call is not None
        self._calls[call] = rows
        try:
            await self._check(rows, sampling)
            async with asyncio.TaskGroup() as group:
                for row in rows:
                    group.create_task(self._to_the_end(row, sampling, deliver))
        except asyncio.CancelledError:
            deliver(RunError("generation was cancelled"))
        except BaseExceptionGroup as errors:
            deliver(errors.exceptions[0])
        except Exception as error:
            deliver(error)
        finally:
            del self._calls[call]

    async def _check(self, rows: list[Row], sampling: Sampling) -> None:
        """Before anything is sampled: a server answers as needed, and rows fit."""
        await self._again(lambda server: self._prepare(server, sampling))
        longest = min((s.longest for s in self.servers if s.longest is not None), default=None)
        for row in rows:
            n = len(row.request.prompt_ids)
            if longest is not None and n + sampling.max_new_tokens > longest:
                raise RequestError(
                    f"row {row.request.row_id}: {n} prompt tokens and max_new_tokens {sampling.max_new_tokens} make "
                    f"{n + sampling.max_new_tokens}, the server's model has {longest} positions"
                )

    async def _to_the_end(self, row: Row, sampling: Sampling, deliver: Callable[[Response], object]) -> None:
        version, row.task = self.version, asyncio.current_task()
        sampled: Sampled = ((), (), "abort")
        try:
            if not row.aborted:  # else before it began
                async with self._slots:
                    sampled = await self._again(
                        lambda server: self._ask(server, row, sampling), f"row {row.request.row_id}: "
                    )
        except asyncio.CancelledError:
            if not row.aborted:
                raise
            if row.server is not None:
                self._beside(self.ended(row.server, row))
        deliver(Response(row.request.row_id, *sampled, version=version, seconds=time.monotonic() - row.asked))

    async def _ask(self, server: Server, row: Row, sampling: Sampling) -> Sampled:
        await self._prepare(server, sampling)
        weights, row.server, row.name = server.weights, server, f"{row.key & (1 << 64) - 1:x}-{time.monotonic_ns():x}"
        path, body = self.body(server, row, sampling)
        answer: Any
        try:
            answer = await self.call(server, "POST", path, body)
        except Refused as error:
            answer = error
        if not await self.holds(server, answer) or server.weights is not weights:
            if server.weights is weights:
                server.weights = None
            raise Failed(f"{server.url} no longer has the weights of version {self.version}: it was restarted")
        if isinstance(answer, Refused):
            raise RequestError(f"row {row.request.row_id}: {server.url} {answer}")
        try:
            ids, logprobs, reason = self.read(answer, sampling)
        except FORM as error:
            raise RequestError(
                f"row {row.request.row_id}: {server.url} does not answer as needed ({type(error).__name__}: {error})"
            ) from error
        if reason == "abort":  # not by this engine, whose call would have been cancelled
            raise Failed(f"{server.url} ended row {row.request.row_id} before its end")
        if len(ids) != len(logprobs) or len(ids) > sampling.max_new_tokens or any(not x <= 1e-3 for x in logprobs):
            raise RunError(
                f"row {row.request.row_id}: {server.url} gave {len(ids)} tokens of {sampling.max_new_tokens} with "
                f"{len(logprobs)} logprobs, the largest {max(logprobs, default=0.0):g}"
            )
        if reason == "stop" and not sampling.stop and (not ids or ids[-1] not in self.eos):
            raise RequestError(
                f"row {row.request.row_id}: {server.url} ended it at the id {ids[-1:]}, which ends nothing here: its "
                "model has other end-of-sequence ids, or its generation_config adds some"
            )
        row.server = None
        return ids, logprobs, reason

    async def _again(self, attempt: Callable[[Server], Awaitable[T]], whose: str = "") -> T:
        """Its result at the least loaded server that isn't resting; where that fails, up to ``retries`` times more."""
        for _ in range(self.retries + 1):
            while not (awake := [s for s in self.servers if s.rests_until <= time.monotonic()]):
                await asyncio.sleep(max(0.0, min(s.rests_until for s in self.servers) - time.monotonic()))
            server = min(awake, key=lambda s: (s.lock.locked(), s.rows))
            server.rows += 1
            try:
                result = await attempt(server)
                server.failures = 0
                return result
            except Failed as error:
                problem = str(error)
                self._rest(server, problem)
            finally:
                server.rows -= 1
        raise self._gave_up(whose, problem)

    def _rest(self, server: Server, problem: str) -> None:
        """After a failure; those of rows that were under way together are one."""
        now = time.monotonic()
        if now >= server.rests_until:
            if not server.failures:
                self._tell(problem)
            server.rests_until = now + min(BACK_OFF * 2**server.failures, LONGEST)
            server.failures += 1
        server.met, server.tells = False, None  # it may be another one that comes back

    def _gave_up(self, what: str, problem: str) -> RequestError | RunError:
        """What the last attempt's failure is: where no server ever answered, the request is wrong."""
        problem += f" ({self.retries + 1} attempts)"
        if any(server.known for server in self.servers):
            return RunError(what + problem)
        return RequestError(f"{problem}; nothing ever answered there: start the server first, or correct rollout.url")

    def _tell(self, problem: str) -> None:
        """That a wait begins, and how long it is before the call fails."""
        waits = sum(min(BACK_OFF * 2**number, LONGEST) for number in range(self.retries))
        if waits:
            log.warning("%s; trying again for about %.3g s", problem, waits)

    async def _prepare(self, server: Server, sampling: Sampling) -> None:
        """What must be known of a server, and what it must have, before it answers."""
        async with server.lock:
            if not server.met:
                await self._meet(server)
            if server.weights is None:
                await self.install(server)
                server.weights = object()
            needed = {"temperature"} if sampling.temperature != 1 else set()
            needed |= {"truncation"} if sampling.top_k or sampling.top_p < 1 else set()
            if not needed or sampling.greedy:
                return
            if server.tells is None:
                try:  # 2 is the highest temperature that vLLM takes
                    warm, hot, cut = [
                        await self.likeliest(server, Sampling(temperature=t, top_k=k, max_new_tokens=1))
                        for t, k in ((1.0, 0), (2.0, 0), (2.0, 2))
                    ]
                except (Refused, *FORM) as error:
                    raise RequestError(f"{server.url} does not tell logprobs as needed: {error!r}") from error
                found = {"temperature": abs(warm - hot) > 1e-3, "truncation": cut - hot > 1e-3}
                server.tells = frozenset(name for name, told in found.items() if told)
            for what in sorted(needed - server.tells):
                raise RequestError(f"{server.url} tells logprobs of another distribution than the sampled one: it "
                                   f"leaves out {what}; {self.untold(what)}")  # fmt: skip

    async def _meet(self, server: Server) -> None:
        try:
            cards = (await self.call(server, "GET", "/v1/models"))["data"]
            card = next((c for c in cards if c["id"] == self.model), cards[0])
            name, longest = card["id"], card.get("max_model_len")
        except Refused as error:
            raise RequestError(f"{server.url}/v1/models {error}") from None
        except FORM:
            raise RequestError(f"{server.url}/v1/models does not list models as OpenAI's API does") from None
        if self.model not in (None, name):
            raise RequestError(f"{server.url} serves {', '.join(c['id'] for c in cards)}, not {self.model}")
        server.met, server.model, server.longest = True, name, longest

    async def _install_all(self) -> None:
        async def patiently(server: Server) -> None:
            for number in range(self.retries + 1):
                try:
                    async with server.lock:
                        server.weights = None
                        await self.install(server)
                        server.weights = object()
                    return
                except Failed as error:
                    problem = str(error)
                    if not number:
                        self._tell(problem)
                    await asyncio.sleep(min(BACK_OFF * 2**number, LONGEST) if number < self.retries else 0)
            raise self._gave_up("new weights are not everywhere: ", problem)

        for result in await asyncio.gather(*(patiently(s) for s in self.servers), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def _beside(self, coroutine: Coroutine[Any, Any, None]) -> None:
        async def quietly() -> None:
            with suppress(Failed, Refused):
                await coroutine

        task = self._loop.create_task(quietly())
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)

    async def _close(self) -> None:
        for server in self.servers:
            self._beside(self.forget(server))
        tasks = self._aside | self._calls.keys()
        for call in self._calls:
            call.cancel()
        _, late = await asyncio.wait(tasks, timeout=5.0)
        for task in late:
            task.cancel()
        await self._client.aclose()
