"""Ready-made rewards: plain functions matched by argument name like a user's own.

Keyword-only arguments are options, set in the configuration: ``reward_fn: {name: numeric, integer: true}``.
Rules that run foreign or unbounded code (a regular expression, a parser, a verifier) run in scoring processes.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from verl.rewards.code import check as check_code
from verl.rewards.code import code
from verl.rewards.remote import check as check_http
from verl.rewards.remote import http

if TYPE_CHECKING:
    from verl.rewards.base import RewardRow

# linear time: no repetition inside a repetition can match the same text in two ways
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?")


def exact(response: str, answer: Any, *, ignore_case: bool = False) -> float:
    """1 where the response equals the answer, white space around both aside."""
    if answer is None:
        raise ValueError("the row has no answer")
    ours, theirs = response.strip(), str(answer).strip()
    return float(ours.casefold() == theirs.casefold() if ignore_case else ours == theirs)


def numeric(
    response: str,
    answer: Any,
    truncated: bool,
    *,
    integer: bool = False,
    tolerance: float = 0.0,
    cut_score: float = 1.0,
) -> float:
    """1 where the response's last number equals the answer's last number (``1,234`` reads as 1234).

    ``integer``: only whole numbers of the response count. ``tolerance``: largest absolute difference.
    ``cut_score``: the score of a right response that was cut by the length limit.
    """
    gold = _numbers(str(answer))
    if not gold:
        raise ValueError(f"the answer {answer!r} holds no number")
    found = [n for n in _numbers(response) if not integer or n == n.to_integral_value()]
    if not found or abs(found[-1] - gold[-1]) > Decimal(str(tolerance)):
        return 0.0
    return cut_score if truncated else 1.0


def _numbers(text: str) -> list[Decimal]:
    return [Decimal(m.group().replace(",", "")) for m in _NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-"))]


def format(response: str, *, tags: Sequence[str] = ("think", "answer")) -> float:
    """1 where the response is ``<tag>...</tag>`` for each tag, once and in order, with nothing but space between."""
    position = 0
    for tag in tags:
        start, end = f"<{tag}>", f"</{tag}>"
        opened, closed = response.find(start, position), response.find(end, position)
        if response.count(start) != 1 or response.count(end) != 1 or not position <= opened < closed:
            return 0.0
        if response[position:opened].strip():
            return 0.0
        position = closed + len(end)
    return float(not response[position:].strip())


def length(response_ids: Sequence[int], *, max_tokens: int, buffer: int) -> float:
    """DAPO's soft length penalty (arXiv 2503.14476, eq. 13): 0 up to ``max_tokens - buffer`` tokens, -1 above
    ``max_tokens``, a straight line between.
    """
    over = len(response_ids) - (max_tokens - buffer)
    return -min(max(over / buffer, 0.0), 1.0)


def regex(response: str, answer: Any = None, *, pattern: str, full: bool = False) -> float:
    """1 where ``pattern`` is found (``full``: matches the whole response; ``.`` matches newlines).

    A group named ``answer`` must also equal the answer column, white space around both aside.
    """
    compiled = re.compile(pattern, re.DOTALL)
    found = compiled.fullmatch(response) if full else compiled.search(response)
    if found is None:
        return 0.0
    if "answer" not in compiled.groupindex:
        return 1.0
    if answer is None:
        raise ValueError("the pattern has a group named answer, but the row has no answer")
    return exact(found.group("answer") or "", answer)


def math(response: str, answer: Any) -> float:
    """1 where math-verify finds the response's final expression equal to the answer (LaTeX or plain)."""
    from math_verify import parse, verify

    # both limits are off: they work by signals, and this process is stopped from outside instead
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn about that on every row
    if answer is None:
        raise ValueError("the row has no answer")
    text = str(answer)
    gold = parse(text if "$" in text or "\\boxed" in text else f"${text}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify can't read the answer {answer!r}")
    return float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))


def reasoning_gym(row: RewardRow, *, dataset: str | None = None, tag: str = "answer") -> float:
    """The score of reasoning-gym's own verifier, for rows with ``answer`` and ``metadata`` as the gym writes them.

    Judged is the text of the last ``<tag>``, or the whole response without one.
    """
    from reasoning_gym.utils import extract_answer

    metadata = row.fields.get("metadata")
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata or {}
    name = dataset or metadata.get("source_dataset")
    if name is None:
        raise ValueError("the row's metadata names no source_dataset; set the option dataset")
    answer = extract_answer(row.response, tag_name=tag)
    entry = {"question": row.prompt, **row.fields, "metadata": metadata}
    return _gym_verifier(name)(row.response.strip() if answer is None else answer, entry)


@lru_cache
def _gym_verifier(name: str) -> Any:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(name)


def _check_regex(options: dict[str, Any]) -> None:
    try:
        re.compile(options["pattern"])
    except (re.error, TypeError) as error:
        raise ValueError(f"pattern {options['pattern']!r} is invalid: {error}") from error


def _check_length(options: dict[str, Any]) -> None:
    if not 0 < options["buffer"] <= options["max_tokens"]:
        raise ValueError(f"buffer {options['buffer']} must lie in 1..max_tokens")


def _check_numeric(options: dict[str, Any]) -> None:
    if options["tolerance"] < 0:
        raise ValueError(f"tolerance {options['tolerance']} must be at least 0")


IN_PROCESS: dict[str, Callable[..., float]] = {"exact": exact, "numeric": numeric, "format": format, "length": length}
IN_WORKERS: dict[str, Callable[..., Any]] = {
    "regex": regex, "math": math, "code": code, "http": http, "reasoning_gym": reasoning_gym,
}  # fmt: skip
PACKAGES = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}  # what a rule imports when it runs
CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {  # raise ValueError for options that can't work
    "numeric": _check_numeric, "regex": _check_regex, "length": _check_length, "code": check_code, "http": check_http,
}  # fmt: skip
