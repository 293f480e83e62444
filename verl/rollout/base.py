"""What a rollout engine is asked and what it answers: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from verl.config.errors import RequestError

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Request:
    """One response to be sampled. Requests of equal ``prompt_ids`` share one prefill."""

    row_id: str
    prompt_id: str  # with ``sample`` it selects the sampling noise; equal prompts drawn twice need different ids
    prompt_ids: tuple[int, ...]
    sample: int = 0  # number of the response among those of its prompt


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, in this order: ``temperature``, ``top_k``, ``top_p``, one draw."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_new_tokens: int = 256
    seed: int = 0
    greedy: bool = False  # the most likely token; ``logprobs`` are those of the distribution at ``temperature``
    stop: tuple[str, ...] = ()  # texts that end a response; the tokens that complete one stay in the response

    def __post_init__(self) -> None:
        faults = [
            message
            for broken, message in (
                (
                    self.temperature <= 0,
                    f"temperature is {self.temperature}, must be above 0 (greedy=True takes modes)",
                ),
                (not 0 < self.top_p <= 1, f"top_p is {self.top_p}, must be in (0, 1]"),
                (self.top_k < 0, f"top_k is {self.top_k}, must be 0 (off) or more"),
                (self.max_new_tokens < 1, f"max_new_tokens is {self.max_new_tokens}, must be at least 1"),
                ("" in self.stop, "stop has an empty text, which would end every response"),
            )
            if broken
        ]
        if faults:
            raise RequestError("; ".join(faults))


@dataclass(frozen=True)
class Response:
    """A finished row. ``ids`` are the tokens as sampled, the one that ended the response included.

    The engine's word is the truth about the end: ``stop`` (an end-of-sequence id or a stop text), ``length``
    (``max_new_tokens`` reached), ``abort`` (``ids`` may be empty). No id needs to be compared to find it again.
    """

    row_id: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of each id, under the distribution it was drawn from (temperature, top_k, top_p)
    finish_reason: FinishReason
    version: int  # of the weights that sampled every token
    seconds: float  # from the request to the last token


def checked(requests: Sequence[Request]) -> Iterator[Request]:
    """The requests, each once it is sure that it has a prompt and was not asked for before; else ``RequestError``."""
    seen: set[str] = set()
    for r in requests:
        if not r.prompt_ids:
            raise RequestError(f"row {r.row_id}: the prompt has no tokens, so nothing predicts the first one")
        if r.row_id in seen:
            raise RequestError(f"row {r.row_id} is requested twice")
        seen.add(r.row_id)
        yield r


class RolloutEngine(Protocol):
    """Samples responses with the weights ``version``."""

    version: int

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Response]:
        """Responses in order of finishing, one for each request. Concurrent calls may be computed together.

        Raises:
            RequestError: a request can't be served (the message names its row); nothing was sampled.
        """
        ...

    def abort(self, row_ids: Iterable[str]) -> None:
        """End these rows after the token being computed; they come back with ``finish_reason="abort"``."""
        ...

    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """The very next token comes from these weights: whole tensors under Hugging Face's names, of a policy with
        adapters the adapter's alone. Each may be gone when the next is taken. Never while responses are pending.

        Raises:
            RunError: names or shapes that don't fit, or the engine can't say that it took them; it then refuses to
                generate until a ``load`` succeeds.
        """
        ...

    def sleep(self) -> None:
        """Give back the memory that only generation needs; ``wake`` comes before the next ``generate``."""
        ...

    def wake(self) -> None:
        """Undo ``sleep``; nothing where there was none."""
        ...

    def close(self) -> None:
        """End what the engine started; a second call does nothing."""
        ...
