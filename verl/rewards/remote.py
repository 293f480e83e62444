"""The rule ``http``: rewards from a server, as JSON over HTTP."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from verl.config.errors import RewardError, shown
from verl.rewards.calls import RewardShapeError, describe

if TYPE_CHECKING:
    from verl.rewards.base import RewardRow

BACK_OFF = 0.5  # seconds before the first retry; doubles


def http(
    rows: Sequence[RewardRow],
    *,
    url: str,
    timeout: float = 20.0,
    retries: int = 3,
    batch_size: int = 64,
    token_env: str | None = None,
) -> list[Any]:
    """The scores that ``url`` answers with, asked for ``batch_size`` rows at a time.

    ``timeout``: seconds for one request. ``retries``: further attempts where the server can't be reached or answers
    429 or 5xx. ``token_env``: environment variable with a bearer token. Raises ``RewardError`` where no attempt
    succeeds, ``RewardShapeError`` where the answer isn't ``{"scores": [one per row]}``.
    """
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if token_env is not None:
        headers["Authorization"] = f"Bearer {os.environ[token_env]}"
    scores: list[Any] = []
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        body = json.dumps({"rows": [_row(row) for row in batch]}, default=str).encode()
        scores += _scores(_ask(url, body, headers, timeout, retries), len(batch), shown(url))
    return scores


def check(options: dict[str, Any]) -> None:
    """Raises ``ValueError`` for options that can't work."""
    parts = urlsplit(str(options["url"]))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url {shown(str(options['url']))!r} must begin with http:// or https:// and name a host")
    if parts.username or parts.password:
        raise ValueError("the url must not hold a user or password; put a token into the variable that token_env names")
    if (name := options["token_env"]) is not None and not os.environ.get(name):
        raise ValueError(f"the environment variable {name!r} (token_env) is not set")
    if options["timeout"] <= 0 or options["retries"] < 0 or options["batch_size"] < 1:
        raise ValueError("timeout must be above 0, retries at least 0, batch_size at least 1")


def _row(row: RewardRow) -> dict[str, Any]:
    return {
        "id": row.row_id,
        "prompt_id": row.prompt_id,
        "prompt": row.fields.get("prompt", row.prompt),
        "prompt_text": row.prompt,
        "response": row.response,
        "finish_reason": row.finish_reason,
        "fields": {name: value for name, value in row.fields.items() if name != "prompt"},
    }


def _ask(url: str, body: bytes, headers: dict[str, str], timeout: float, retries: int) -> bytes:
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class Stay(HTTPRedirectHandler):
        """A redirect would turn the POST into a GET and carry the token to another host."""

        def redirect_request(self, *_: Any) -> None:
            return None

    opener = build_opener(Stay)
    for attempt in range(retries + 1):
        try:
            with opener.open(Request(url, body, headers), timeout=timeout) as response:
                if response.status // 100 == 2:
                    return response.read()
                problem, again = f"answered {response.status}", False
        except HTTPError as error:
            again = error.code == HTTPStatus.TOO_MANY_REQUESTS or error.code >= 500
            problem = f"answered {error.code} {error.reason}"
            error.close()
        except TimeoutError:
            problem, again = f"did not answer within {timeout:g} s", True
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            problem, again = f"can't be reached: {type(reason).__name__}: {reason}", True
        if not again or attempt == retries:
            break
        time.sleep(BACK_OFF * 2**attempt)
    tried = f" ({attempt + 1} attempts)" if attempt else ""
    raise RewardError(f"{shown(url)} {problem}{tried}; expected status 200 with scores in JSON") from None


def _scores(answer: bytes, size: int, url: str) -> list[Any]:
    expected = f'{url}: expected JSON {{"scores": [...]}} with {size} entries, one per row, received'
    try:
        read = json.loads(answer)
    except ValueError:
        raise RewardShapeError(f"{expected} what is no JSON: {answer[:80]!r}") from None
    if not isinstance(read, dict) or "scores" not in read:
        raise RewardShapeError(f"{expected} {f'the keys {sorted(read)}' if isinstance(read, dict) else describe(read)}")
    scores = read["scores"]
    if not isinstance(scores, list) or len(scores) != size:
        raise RewardShapeError(f"{expected} {len(scores) if isinstance(scores, list) else describe(scores)}")
    return scores
