"""vLLM's starts and ends on a CPU without what is the same each time: a process of the tests makes many engines."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

import pytest
import torch


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Garbage isn't collected eight times, at half a second each, nor are kernels looked for in all modules again."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(gc, "collect", lambda *_: 0)
            patch.setattr(gc, "unfreeze", lambda: None)
            kernels = sys.modules.get("vllm.triton_utils.dispatcher")
            if getattr(kernels, "_registry", None):  # the first engine's start has found them
                from vllm.platforms import current_platform

                patch.setattr(current_platform, "register_triton_kernel_overrides", lambda: None)
        yield
