"""Whether plain Ray starts on this machine at all: a sandbox may lack what its servers need."""

from __future__ import annotations

import functools
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

TRY = """
import ray
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
assert ray.get(ray.remote(lambda: 7).remote()) == 7
"""
PATIENCE = 150  # seconds
BARE = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}  # what a node can do without
TOKEN = secrets.token_hex(32)  # Ray keeps the first that a process has seen


@functools.cache
def why_not() -> str | None:
    """What Ray said when it could not run a single task, without any code of ours; None: it can."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env |= {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        done = subprocess.run([sys.executable, "-c", TRY], env=env, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"plain Ray runs no task within {PATIENCE} s here"
    said = (done.stderr or done.stdout).strip().splitlines()
    return None if done.returncode == 0 else f"plain Ray doesn't start here: {said[-1] if said else done.returncode}"


def surroundings(patch: pytest.MonkeyPatch) -> None:
    """What a cluster of the tests is started with, guarded as ``ray.init`` guards one where this Ray does so."""
    patch.setenv("RAY_AUTH_TOKEN", TOKEN)  # else Ray leaves one in the home folder
    patch.delenv("RAY_AUTH_MODE", raising=False)
    with suppress(ImportError):
        from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default

        enable_token_auth_by_default()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@contextmanager
def ray_cluster(cpus: int = 2) -> Iterator[None]:
    """A Ray cluster of this machine, which the runs that are started meanwhile find."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        surroundings(patch)
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, **BARE})
        patch.setenv("RAY_ADDRESS", nodes.address)
        try:
            yield
        finally:
            nodes.shutdown()
