"""Runs Triton's kernels on a CPU. To be imported before ``verl.rollout.kernels`` is, which decides by it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _interpret() -> None:
    """As the environment variable does; what Triton's own library made before it was set is made again. Nor is the
    language replaced and put back by every call of every function, which would be nearly all the time."""
    from triton import language
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    os.environ["TRITON_INTERPRET"] = "1"
    replace, replaced = interpreter._patch_lang, set()

    def once(fn: Any) -> Any:
        if fn not in replaced:
            replaced.add(fn)
            replace(fn)
            language.core.tensor.__index__ = lambda self: self.handle.data.item()  # NumPy's int() wants no dimensions
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = once
    for module in (language, language.core, language.math, language.standard):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, interpreter.InterpretedFunction(value.fn))


TRITON = find_spec("triton") is not None
WHY = "needs triton, which comes with torch where there is CUDA (pip install triton)"
needs_triton = pytest.mark.skipif(not TRITON, reason=WHY)
if TRITON and DEVICE == "cpu":
    _interpret()
