"""Imports of large packages."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Without garbage collection, which would look again and again through what stays anyway: a third less time.

    What is there by the end is left out of later collections, too; after a fork it stays shared.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was:
            gc.enable()
