"""Whether plain Ray starts on this machine at all: a sandbox may lack what its servers need."""

from __future__ import annotations

import functools
import os
import secrets
import subprocess
import sys

TRY = """
import ray
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
assert ray.get(ray.remote(lambda: 7).remote()) == 7
"""
PATIENCE = 150  # seconds


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
