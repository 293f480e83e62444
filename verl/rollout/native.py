"""Our own generation on the trainer's own parameters: no copy, no publish, always the newest weights.

One thread computes. Waiting rows are admitted while there is room, new prompts are prefilled once each, then every
active row decodes one token per step; rows that end leave at once and make room. The rows of a prompt are admitted one
after the other and the prompt stays until the last has ended, so one prefill serves them all, however few fit side by
side. Nothing is kept when all are done, so weights may change between calls; a later call prefills its prompts anew.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.config.errors import RequestError, RunError
from verl.models.naming import check_fit, copy_by_name, own_tensors
from verl.models.policy import Policy
from verl.rollout.base import FinishReason, Request, Response, Sampling, checked
from verl.rollout.cache import GIB, Budget, Cache, DecodeLayout, PrefillLayout, bytes_per_token
from verl.rollout.sampling import choose, noise_key, uniforms
from verl.rollout.stop import StopTexts

if TYPE_CHECKING:
    from verl.rollout.graph import Decode, Pending

PREFILL_TOKENS = 8192  # prompt tokens of one forward; bounds its activations


@dataclass
class Work:
    """Work done since the engine was made."""

    prefills: int = 0  # prompts
    prefill_tokens: int = 0
    decode_steps: int = 0
    decode_rows: int = 0  # summed over the steps


@dataclass(eq=False)
class _Call:
    """One ``generate``: its rows, and where their responses go (or the exception that ended the batch)."""

    sampling: Sampling
    results: asyncio.Queue[Response | BaseException] = field(default_factory=asyncio.Queue)
    rows: list[_Row] = field(default_factory=list)


@dataclass(eq=False)
class _Row:
    call: _Call
    request: Request
    key: int
    asked: float
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None
    aborted: bool = False  # set by the event loop's thread, read by the computing one
    slot: int = -1  # where the decode step of a GPU has its keys and values


@dataclass(eq=False)
class _Group:
    """A prompt whose keys and values are in the cache."""

    prompt_ids: tuple[int, ...]
    first: Tensor  # [D] hidden state that predicts the first response token
    slot: int


class NativeEngine:
    """A ``RolloutEngine`` on a ``Policy`` in this process.

    Args:
        policy: whose parameters generate.
        eos: every id that ends a response.
        max_rows: most rows decoded side by side.
        tokenizer: needed for stop texts only.
        cache_gib: most GiB that keys and values take; rows that don't fit wait. ``None``: no limit.
        max_tokens: of a prompt with its response, where known; ``RequestError`` if one such row doesn't fit.
    """

    def __init__(
        self,
        policy: Policy,
        eos: frozenset[int],
        max_rows: int = 256,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        cache_gib: float | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if max_rows < 1:
            raise RequestError(f"max_rows is {max_rows}, must be at least 1")
        self.policy, self.eos, self.max_rows, self.tokenizer = policy, eos, max_rows, tokenizer
        self.budget = None if cache_gib is None else Budget(cache_gib, bytes_per_token(policy))
        if self.budget is not None and max_tokens is not None:
            self.budget.check(max_tokens)
        self.version = 0
        self._broken = ""  # why there are no whole weights
        self.counters = Work()
        self._step: Decode | None = None
        self._waiting: list[_Call] = []
        self._running: list[_Call] = []
        self._driver: asyncio.Task[None] | None = None
        # always the same thread: OpenMP keeps a team of threads for each thread that computes
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="verl-generate")

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Response]:
        """See ``RolloutEngine``. Calls of one event-loop turn are computed as one batch, in call order, so their
        results are reproducible to the bit; a call made while a batch is running waits for its end. Those of one batch
        may differ in ``seed`` and ``max_new_tokens`` only; others wait, too."""
        self._check(requests, sampling)
        call, now = _Call(sampling), time.monotonic()
        call.rows = [_Row(call, r, noise_key(sampling.seed, r.prompt_id, r.sample), now) for r in requests]
        if not call.rows:
            return
        self._waiting.append(call)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            for _ in requests:
                result = await call.results.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:  # a caller that stops early leaves no work behind
            for row in call.rows:
                row.aborted = True

    def abort(self, row_ids: Iterable[str]) -> None:
        """End these rows after the token being computed; unknown ids are ignored, as their rows may have just ended."""
        wanted = set(row_ids)
        for call in (*self._waiting, *self._running):
            for row in call.rows:
                row.aborted |= row.request.row_id in wanted

    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See ``RolloutEngine``; for a policy whose parameters are this engine's own."""
        with self.updating(version):
            self._take(tensors)

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """While open, whoever holds the policy changes its parameters; unless it ends well, nothing generates."""
        self._broken = f"loading version {version} failed"
        yield
        self._broken, self.version = "", version

    def _take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        into = dict(self.policy.shards())
        # of a file layout of its own (a mixture's experts one by one), each call of shards makes the tensors anew
        own = {tensor.data_ptr() for _, tensor in own_tensors(self.policy.lm)}
        in_place = all(tensor.data_ptr() in own for tensor in into.values())
        seen: dict[str, Tensor] = {}
        for name, tensor in tensors:
            fits = name in into and into[name].shape == tensor.shape
            if fits and in_place:
                copy_by_name({name: into[name]}, {name: tensor})
            seen[name] = into[name] if fits and in_place else tensor
        if in_place:
            check_fit(into, seen)
        else:
            self.policy.load(seen)

    def sleep(self) -> None:
        """Between calls nothing is kept but, on a GPU, the graphs: a few hundred MB, and seconds to make anew."""

    def wake(self) -> None:
        pass

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)

    def _check(self, requests: Sequence[Request], sampling: Sampling) -> None:
        if self._broken:
            raise RunError(f"the engine has no whole weights: {self._broken}")
        limit = getattr(self.policy.config.get_text_config(), "max_position_embeddings", None)
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop texts need the engine's tokenizer")
        for r in checked(requests):
            n = len(r.prompt_ids)
            if limit is not None and n + sampling.max_new_tokens > limit:
                raise RequestError(
                    f"row {r.row_id}: {n} prompt tokens and max_new_tokens {sampling.max_new_tokens} make "
                    f"{n + sampling.max_new_tokens}, the model has {limit} positions"
                )
            if self.budget is not None:
                self.budget.check(
                    n + sampling.max_new_tokens,
                    f"row {r.row_id} with {n} prompt tokens and max_new_tokens {sampling.max_new_tokens}",
                )

    def _together(self, calls: Sequence[_Call]) -> bool:
        """Whether these calls can be one batch: alike in what chooses tokens, the longest prompt fits beside the
        longest response."""
        alike = {replace(call.sampling, seed=0, max_new_tokens=1) for call in calls}
        prompt, response = _longest([row for call in calls for row in call.rows])
        return len(alike) == 1 and (self.budget is None or prompt + response <= self.budget.tokens)

    async def _drive(self) -> None:
        """Compute waiting calls, batch after batch; those at the head of the queue that go together are one batch."""
        loop = asyncio.get_running_loop()

        def deliver(call: _Call, result: Response | BaseException) -> None:
            loop.call_soon_threadsafe(call.results.put_nowait, result)

        try:
            while self._waiting:
                while self._waiting and self._together([*self._running, self._waiting[0]]):
                    self._running.append(self._waiting.pop(0))
                rows = [row for call in self._running for row in call.rows]
                try:
                    await loop.run_in_executor(self.thread, self._generate, rows, deliver)
                except Exception as error:
                    for call in self._running:
                        deliver(call, error)
                self._running = []
        finally:  # cancelled: the thread may still compute, and callers may still wait
            for call in (*self._running, *self._waiting):
                for row in call.rows:
                    row.aborted = True
                call.results.put_nowait(RunError("generation was cancelled"))
            self._running, self._waiting = [], []

    def _decode_step(self) -> Decode | None:
        """What decodes on a GPU where it fits the model, which may have changed its device or its class since."""
        if not self.fused:
            return None
        from verl.rollout.graph import Decode, fits

        if not fits(self.policy):
            return None
        if self._step is None or self._step.state.device != self.policy.device:
            self._step = Decode(self.policy, self.max_rows)
        return self._step

    @property
    def fused(self) -> bool:
        """Whether steps of kernels are tried; they need a GPU."""
        return self.policy.device.type == "cuda"

    def _generate(self, rows: Sequence[_Row], deliver: Callable[[_Call, Response | BaseException], None]) -> None:
        """In the computing thread: all rows to their ends."""
        version = self.version
        device = self.policy.device
        here = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with here, torch.no_grad():  # not inference mode, whose tensors a model might keep
            decode = self._decode_step()
            batch = _Batch(self, rows) if decode is None else _Pipelined(self, rows, decode)
            for row in batch.run():
                assert row.reason is not None
                deliver(
                    row.call,
                    Response(
                        row_id=row.request.row_id,
                        ids=tuple(row.ids),
                        logprobs=tuple(row.logprobs),
                        finish_reason=row.reason,
                        version=version,
                        seconds=time.monotonic() - row.asked,
                    ),
                )
                row.ids, row.logprobs = [], []  # the rows of a call stay to its end


class _Batch:
    """The continuous batch: ``rows`` and ``groups`` are in the order of their cache slots."""

    def __init__(self, engine: NativeEngine, rows: Sequence[_Row]) -> None:
        self.policy, self.eos, self.work = engine.policy, engine.eos, engine.counters
        self.sampling = rows[0].call.sampling  # the others' differ in seed and max_new_tokens only
        texts, tokenizer = self.sampling.stop, engine.tokenizer
        self.stop = StopTexts(tokenizer, texts) if tokenizer is not None and texts else None
        self.needed = Counter(row.request.prompt_ids for row in rows)  # rows that have not ended, waiting ones too
        order = {prompt: i for i, prompt in enumerate(self.needed)}
        self.waiting = deque(sorted(rows, key=lambda row: order[row.request.prompt_ids]))
        self.cache = Cache()
        self.rows: list[_Row] = []
        self.groups: list[_Group] = []
        self.by_prompt: dict[tuple[int, ...], _Group] = {}
        self.most_rows, self.most_groups = min(engine.max_rows, len(rows)), len(order)
        self._reserve(rows, engine.budget)

    def _reserve(self, rows: Sequence[_Row], budget: Budget | None) -> None:
        if budget is None:
            self.cache.responses.reserve(self.most_rows, 16)
            return
        prompt, response = _longest(rows)
        response -= 1  # the last token is nobody's key
        self.most_rows, self.most_groups = budget.room(self.most_rows, len(rows) / self.most_groups, prompt, response)
        self.cache.responses.reserve(self.most_rows, response)
        self.cache.prompts.reserve(self.most_groups, prompt)

    def run(self) -> Iterator[_Row]:
        """Gives rows as they end, ``reason`` set."""
        while self.waiting or self.rows:
            self._admit(self._next())
            yield from self._leave()
            if self.rows:
                self._decode()
                yield from self._leave()

    def _next(self) -> list[_Row]:
        """The waiting rows that there is room for."""
        new: list[_Row] = []
        prompts = set(self.by_prompt)
        while self.waiting and len(self.rows) + len(new) < self.most_rows:
            prompts.add(self.waiting[0].request.prompt_ids)
            if len(prompts) > self.most_groups:
                break
            new.append(self.waiting.popleft())
        return new

    def _admit(self, new: Sequence[_Row]) -> None:
        """Prefill the prompts that are new and sample each row's first token."""
        self.rows.extend(new)
        for row in new:
            if row.aborted:
                row.reason = "abort"
        new = [row for row in new if row.reason is None]
        if not new:
            return
        prompts = [p for p in dict.fromkeys(row.request.prompt_ids for row in new) if p not in self.by_prompt]
        for part in _by_tokens(prompts, PREFILL_TOKENS):
            slots = self._slots(len(part))
            layout = PrefillLayout(self.cache, part, slots, self.policy.device)
            hidden = self.policy.hidden(layout.packed.ids, layout.packed.positions, layout)[layout.last]
            for prompt, first, slot in zip(part, hidden, slots, strict=True):
                self.by_prompt[prompt] = _Group(prompt, first, slot)
                self.groups.append(self.by_prompt[prompt])
            self.work.prefills += len(part)
            self.work.prefill_tokens += len(layout.packed)
        groups = [self.by_prompt[row.request.prompt_ids] for row in new]
        place = {group: i for i, group in enumerate(dict.fromkeys(groups))}
        logits = self.policy.logits(torch.stack([group.first for group in place]))
        self._extend(new, logits[[place[group] for group in groups]])

    def _slots(self, prompts: int) -> list[int]:
        """Free ones."""
        return list(range(len(self.groups), len(self.groups) + prompts))

    def _decode(self) -> None:
        """One token for every row."""
        slot = {group: i for i, group in enumerate(self.groups)}
        layout = DecodeLayout(
            self.cache,
            groups=[slot[self.by_prompt[row.request.prompt_ids]] for row in self.rows],
            prompt_lengths=[len(group.prompt_ids) for group in self.groups],
            places=[len(row.ids) - 1 for row in self.rows],
            device=self.policy.device,
        )
        ids = torch.tensor([row.ids[-1] for row in self.rows], device=self.policy.device)
        self._extend(self.rows, self.policy.logits(self.policy.hidden(ids, layout.positions, layout)))
        self.work.decode_steps += 1
        self.work.decode_rows += len(self.rows)

    def _extend(self, rows: Sequence[_Row], logits: Tensor) -> None:
        """Sample each row's next token from its ``logits [N, V]`` and see whether it is the last."""
        self._append(rows, *self._draw(rows, logits))

    def _draw(self, rows: Sequence[_Row], logits: Tensor) -> tuple[list[int], list[float]]:
        keys = torch.tensor([row.key for row in rows], device=logits.device)
        positions = torch.tensor([len(row.ids) for row in rows], device=logits.device)
        ids, logprobs = choose(logits, uniforms(keys, positions), self.sampling)
        return ids.tolist(), logprobs.tolist()

    def _append(self, rows: Sequence[_Row], ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """These tokens, one of each row, if it goes on."""
        for row, token, logprob in zip(rows, ids, logprobs, strict=True):
            if row.reason is not None:
                continue
            if not math.isfinite(logprob):
                raise RunError(
                    f"row {row.request.row_id}: the model's logits are not finite at response token {len(row.ids)}"
                )
            row.ids.append(token)
            row.logprobs.append(logprob)
            if token in self.eos or (self.stop and self.stop.ends(row.ids)):
                row.reason = "stop"
            elif len(row.ids) == row.call.sampling.max_new_tokens:
                row.reason = "length"
            elif row.aborted:
                row.reason = "abort"

    def _leave(self) -> list[_Row]:
        """Take out the rows that ended, and the prompts that no row needs any more."""
        gone = [row for row in self.rows if row.reason is not None]
        if not gone:
            return gone
        self.needed.subtract(row.request.prompt_ids for row in gone)
        kept = [self.needed[group.prompt_ids] > 0 for group in self.groups]
        self.rows = self.cache.responses.keep(self.rows, [row.reason is None for row in self.rows])
        self.groups = self.cache.prompts.keep(self.groups, kept)
        self.by_prompt = {group.prompt_ids: group for group in self.groups}
        return gone


class _Pipelined(_Batch):
    """A batch whose steps ``Decode`` computes: the device is at one while the tokens of the one before are read here.

    Rows and prompts keep their slots of the cache to their ends. A row that ended is computed on, unread, until so many
    have ended that a smaller step or an admission is due; then no step is pending for a moment.
    """

    def __init__(self, engine: NativeEngine, rows: Sequence[_Row], step: Decode) -> None:
        self.step = step
        super().__init__(engine, rows)
        step.begin(self.cache, self.sampling)
        self.free_rows, self.free_groups = list(range(self.most_rows)), list(range(self.most_groups))

    def _reserve(self, rows: Sequence[_Row], budget: Budget | None) -> None:
        """Room for the longest response in each slot; without a budget of what is free on the device."""
        prompt, response = _longest(rows)
        if budget is None:
            size, need = self.step.bytes_per_token, self.most_rows * (prompt + response)
            budget = Budget(_free(self.policy.device, need * size), size)
            if budget.tokens < prompt + response:
                raise RunError(
                    f"{budget.gib:.2f} GiB are left for keys and values of {budget.per_token:,} bytes per token; "
                    f"a row of {prompt} prompt tokens and max_new_tokens {response} doesn't fit"
                )
        super()._reserve(rows, budget)
        self.most_groups = min(self.most_groups, len(self.needed))
        self.cache.prompts.slots = self.most_groups

    def _slots(self, prompts: int) -> list[int]:
        return [self.free_groups.pop() for _ in range(prompts)]

    def run(self) -> Iterator[_Row]:
        try:
            while self.waiting or self.rows:
                if self._room():
                    self._admit(self._next())
                    yield from self._leave()
                if self.rows:
                    yield from self._steps()
        finally:  # an exception's traceback would keep it
            self.cache.prompts.layers.clear()
            self.cache.responses.layers.clear()

    def _room(self) -> bool:
        """Whether an admission is worth a break."""
        if not self.waiting or (self.rows and 8 * (self.most_rows - len(self.rows)) < self.most_rows):
            return False
        return self.waiting[0].request.prompt_ids in self.by_prompt or len(self.groups) < self.most_groups

    def _next(self) -> list[_Row]:
        new = super()._next()
        for row in new:
            row.slot = self.free_rows.pop()
        return new

    def _steps(self) -> Iterator[_Row]:
        """Decode the present rows until another arrangement is due."""
        rows = self.rows
        self.step.arrange([self._state(row) for row in rows])
        pending: Pending | None = None
        while True:
            ahead = pending is not None
            going_on = sum(
                row.reason is None and len(row.ids) + ahead < row.call.sampling.max_new_tokens for row in rows
            )
            following = None
            if going_on and self.step.suits(going_on) and not self._room():
                following = self.step.launch()
                self.work.decode_steps += 1
            if pending is not None:
                ids, logprobs = pending.result()
                self.work.decode_rows += len(self.rows)
                self._append(rows, ids[: len(rows)], logprobs[: len(rows)])
                yield from self._leave()
            if following is None:
                return
            pending = following

    def _state(self, row: _Row) -> tuple[int, ...]:
        group = self.by_prompt[row.request.prompt_ids]
        last = row.call.sampling.max_new_tokens - 2  # the last token is nobody's key
        return row.ids[-1], row.slot, group.slot, len(group.prompt_ids), len(row.ids) - 1, row.key, last

    def _draw(self, rows: Sequence[_Row], logits: Tensor) -> tuple[list[int], list[float]]:
        return self.step.first(logits, [row.key for row in rows])

    def _leave(self) -> list[_Row]:
        gone = [row for row in self.rows if row.reason is not None]
        if gone:
            self.needed.subtract(row.request.prompt_ids for row in gone)
            self.free_rows += [row.slot for row in gone]
            self.free_groups += [group.slot for group in self.groups if not self.needed[group.prompt_ids]]
            self.rows = [row for row in self.rows if row.reason is None]
            self.groups = [group for group in self.groups if self.needed[group.prompt_ids]]
            self.by_prompt = {group.prompt_ids: group for group in self.groups}
        return gone


def _free(device: torch.device, need: int) -> float:
    """GiB that keys and values may take: ``need`` bytes, and of a GPU no more than 80 % of what is free."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        need = min(need, int(0.8 * (torch.cuda.mem_get_info(device)[0] + unused)))
    return need / GIB


def _longest(rows: Sequence[_Row]) -> tuple[int, int]:
    """Tokens of the longest prompt and of the longest response that these rows may come to."""
    prompt = max(len(row.request.prompt_ids) for row in rows)
    return prompt, max(row.call.sampling.max_new_tokens for row in rows)


def _by_tokens(prompts: Sequence[tuple[int, ...]], budget: int) -> Iterator[list[tuple[int, ...]]]:
    """Runs of prompts of at most ``budget`` tokens together; a longer prompt is a run of its own."""
    part: list[tuple[int, ...]] = []
    tokens = 0
    for prompt in prompts:
        if part and tokens + len(prompt) > budget:
            yield part
            part, tokens = [], 0
        part.append(prompt)
        tokens += len(prompt)
    if part:
        yield part
