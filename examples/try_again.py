"""A sum may be tried again: an environment that says whether the answer was too low or too high, and its reward.

verl train examples/try_again.yaml
"""

from __future__ import annotations

import re
from typing import Any

Message = dict[str, Any]


def turn(messages: list[Message], answer: str) -> list[Message] | None:
    """What is said to the policy's last message; None: nothing more. ``answer`` is a column of the data."""
    said = number(messages[-1])
    if said == int(answer):
        return None
    hint = "Please say a number." if said is None else f"That is too {'low' if said < int(answer) else 'high'}."
    return [{"role": "user", "content": f"{hint} Try again."}]


def score(transcript: list[Message], answer: str) -> dict[str, float]:
    """1 for the right number at once, a half at the second try, a third at the third, ..."""
    tries = [number(message) for message in transcript if message["role"] == "assistant"]
    right = tries[-1] == int(answer)
    return {"score": right / len(tries), "first_try": tries[0] == int(answer), "in_the_end": right}


def number(message: Message) -> int | None:
    """The last one that was said."""
    found = re.findall(r"-?\d{1,9}", message["content"])
    return int(found[-1]) if found else None
