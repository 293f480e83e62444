"""The worker that samples responses, and what a reward sees of its rows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from verl.data.chat import Message
from verl.data.loader import Prompt
from verl.rewards.base import RewardRow
from verl.rollout.base import Request, Response, RolloutEngine, Sampling


@dataclass(frozen=True)
class Draw:
    """A prompt as drawn from the data set: ``number`` counts draws over the whole run, so it never repeats."""

    number: int
    prompt: Prompt

    @property
    def id(self) -> str:
        return f"{self.prompt.id}@{self.number}"


@dataclass(frozen=True)
class Row:
    """A prompt with one sampled response."""

    draw: Draw
    sample: int
    response: Response
    mask: tuple[bool, ...] | None = None  # of the response's ids, those that the policy sampled; None: all
    turns: int = 1  # messages of the policy
    messages: list[Message] | None = None  # of an episode: all of the conversation

    @property
    def id(self) -> str:
        return f"{self.draw.id}/{self.sample}"


class RolloutWorker:
    """Samples ``n`` responses to each prompt and hands rows over as they finish."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    async def generate(self, draws: Sequence[Draw], n: int, sampling: Sampling) -> AsyncIterator[Row]:
        places = {f"{draw.id}/{k}": (draw, k) for draw in draws for k in range(n)}
        requests = [Request(row_id, draw.id, draw.prompt.ids, k) for row_id, (draw, k) in places.items()]
        async for response in self.engine.generate(requests, sampling):
            draw, k = places[response.row_id]
            yield Row(draw, k, response)


def reward_row(
    row_id: str, prompt: Prompt, text: str, ids: tuple[int, ...], finish_reason: str, messages: list[Message] | None
) -> RewardRow:
    """What a reward sees of a row. ``text`` is the response ``ids`` decoded without special tokens."""
    return RewardRow(
        row_id=row_id,
        prompt_id=prompt.id,
        prompt=prompt.text,
        response=text,
        prompt_ids=prompt.ids,
        response_ids=ids,
        finish_reason=finish_reason,
        fields=prompt.fields,
        messages=messages,
    )
