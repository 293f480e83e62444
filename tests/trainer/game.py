"""A game of two turns: the environment says a letter after the policy's first message; it counts who repeats it."""

from __future__ import annotations

from typing import Any


async def turn(messages: list[dict[str, Any]], answer: str) -> list[dict[str, Any]] | None:
    return [{"role": "tool", "content": answer}] if len(messages) == 2 else None


def repeated(transcript: list[dict[str, Any]], answer: str) -> float:
    return float(len(transcript) == 4 and transcript[-1]["content"] == answer)


def closeness(transcript: list[dict[str, Any]], response_ids: tuple[int, ...]) -> float:
    """Signal on any model: an even first letter in each message, and many of them."""
    said = [m["content"] for m in transcript if m["role"] == "assistant"]
    return len(said) / 4 + sum(len(words) % 2 for words in said) / 4 + (response_ids[0] % 3) / 3


def even(response_ids: tuple[int, ...]) -> float:
    return float(response_ids[0] % 2 == 0)


def chatter(messages: list[dict[str, Any]], prompt: str) -> list[dict[str, Any]] | None:
    """Goes on for as long as the policy's messages are short."""
    return [{"role": "user", "content": prompt[-1]}] if len(messages[-1]["content"]) < 4 else None


def fails(messages: list[dict[str, Any]]) -> None:
    raise ValueError("no such door")
