"""Two kinds of failure: the request is wrong (exit status 2), or the run failed (exit status 1)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit


class RequestError(ValueError):
    """What was asked can't be done: configuration, arguments or data. The message says what would be right."""


class ConfigError(RequestError):
    """The configuration breaks rules; the message lists every violation."""


class DataError(RequestError):
    """The data set can't be used as asked; the message names file, row and column."""


class RunError(RuntimeError):
    """The run failed; the message names node, step, row and prompt where known."""


class MisfitError(RunError):
    """Tensors are not those of the model, or of its optimizer, that is to take them."""


class RewardError(RunError):
    """A reward raised, timed out or returned something that is not a score."""


@contextlib.contextmanager
def writing(
    folder: str | Path | None, *, key: str = "", advice: str = "", kind: type[RequestError] = RequestError
) -> Iterator[None]:
    """The disk's refusal becomes an error that names ``folder``, the ``key`` that asked for it, and what would do."""
    try:
        yield
    except OSError as error:
        where = f"{key}: can't write to" if key else "can't write to"
        told = f"{where} {folder}: {error.strerror or error}"
        raise kind(f"{told}; {advice}" if advice else told) from error


def shown(url: str) -> str:
    """The address without what may be a secret: user, password, query."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
