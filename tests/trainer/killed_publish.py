"""A factory of hosts of which one is killed in the middle of a publish. In a module of its own: workers import it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.cluster.group import Context
from verl.config.run import RunConfig
from verl.hybrid import publish
from verl.runtime.host import Host
from verl.runtime.host import make_host as original

VERSION = 4  # in whose publish worker 1 dies, once
whole_buckets = publish.buckets


def small_buckets(moves: Any, limit: int) -> Any:
    return whole_buckets(moves, 1 << 12)


def struck(run_dir: str | Path) -> Path:
    """Where it is noted: the process, when (``time.time``), and of how many buckets which one was written last."""
    return Path(run_dir).with_name("struck")


def make_host(context: Context, cfg: RunConfig, *more: Any) -> Host:
    write = publish._Passage._write_bucket

    def write_and_die(self: Any, bucket: Any) -> Iterator[Any]:
        yield from write(self, bucket)
        if context.rank == 1 and self.version == VERSION and bucket.number == 1 and not struck(cfg.run_dir).exists():
            struck(cfg.run_dir).write_text(f"{os.getpid()} {time.time()} {bucket.number} {len(self.c.buckets)}")
            os.kill(os.getpid(), signal.SIGKILL)

    publish.buckets, publish.ALONE = small_buckets, 1 << 10
    publish._Passage._write_bucket = write_and_die  # type: ignore[method-assign]
    return original(context, cfg, *more)
