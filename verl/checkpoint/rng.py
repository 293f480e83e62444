"""The process's random state as a tensor part, so that a resumed run draws what the stopped one would have drawn."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def rng_state() -> dict[str, Tensor]:
    """States of Python's, NumPy's and torch's global generators, and of every CUDA device once CUDA is in use."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": torch.tensor([version, *words]),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([position, has_gauss, *np.asarray(keys).tolist()]),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
        **{f"cuda{i}": state for i, state in enumerate(cuda)},
    }


def restore_rng(state: Mapping[str, Tensor]) -> None:
    """Set what `rng_state` gave. On fewer GPUs than before, those that exist are set."""
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    position, has_gauss, *keys = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, state["numpy_gauss"].item()))
    torch.set_rng_state(state["torch"])
    for device in range(torch.cuda.device_count()):
        if f"cuda{device}" in state:
            torch.cuda.set_rng_state(state[f"cuda{device}"], device)
