"""AdamW whose two moments are kept in 8 bits, in blocks of 256 (arXiv 2110.02861): bitsandbytes' own.

Checkpoints have the moments as AdamW's, whole and in float32, so that any number of ranks, and AdamW itself, can go on
with them. Quantised again they are what they were to a part in 256 of a block's largest: what goes on from a
checkpoint is like what never stopped, but not bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from verl.config.errors import RequestError
from verl.models.quantize import INSTALL

BLOCK = 256
MOMENTS = {"exp_avg": "1", "exp_avg_sq": "2"}


def adamw8bit(groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """``RequestError`` without bitsandbytes."""
    if find_spec("bitsandbytes") is None:
        raise RequestError(f"optimizer adamw8bit needs the package bitsandbytes, which isn't installed: {INSTALL}")
    from bitsandbytes.optim import AdamW8bit

    class Adam(AdamW8bit):
        def update_step(self, group: Any, p: nn.Parameter, gindex: int, pindex: int) -> None:
            if p.numel():
                super().update_step(group, p, gindex, pindex)
            else:  # a rank's part may be empty, which kernels don't take
                self.state[p]["step"] += 1

    optimizer: torch.optim.Optimizer = Adam(groups, lr=lr, betas=betas, eps=eps)
    return optimizer


def moments(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A parameter's state as AdamW's; that of another optimizer as it is."""
    if "state1" not in state:
        return state
    from bitsandbytes.functional import dequantize_blockwise

    plain = {"step": torch.tensor(float(state["step"]))}
    for name, n in MOMENTS.items():
        value: Tensor = state[f"state{n}"]
        if value.dtype == torch.uint8:
            value = dequantize_blockwise(value, absmax=state[f"absmax{n}"], code=state[f"qmap{n}"], blocksize=BLOCK)
        plain[name] = value
    return plain


def take_back(optimizer: Any, states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """What ``moments`` gave, by parameter, into an optimizer that ``adamw8bit`` built."""
    from bitsandbytes.functional import quantize_blockwise

    optimizer.state.clear()
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if p not in states:
                continue
            optimizer.init_state(group, p, g, i)
            state = optimizer.state[p]
            state["step"] = int(states[p]["step"])
            for name, n in MOMENTS.items():
                value = states[p][name]
                if state[f"state{n}"].dtype == torch.uint8:
                    value, scales = quantize_blockwise(value, code=state[f"qmap{n}"], blocksize=BLOCK)
                    state[f"absmax{n}"].copy_(scales.absmax)
                state[f"state{n}"].copy_(value)
