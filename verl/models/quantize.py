"""QLoRA: adapters over a frozen base whose weights are 4-bit NormalFloat (arXiv 2305.14314)."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from verl.config.errors import RequestError

log = logging.getLogger(__name__)
INSTALL = "pip install 'bitsandbytes>=0.50'"


def four_bit(device: torch.device | str, dtype: torch.dtype, leave_out: list[str] | None = None) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for a base quantised while it is read.

    NF4 with doubly quantised scales; products are computed in ``dtype``. Embeddings stay as they are, and so do the
    modules named in ``leave_out``, by default the language model's head.
    """
    if find_spec("bitsandbytes") is None:
        raise RequestError(f"load_in_4bit needs the package bitsandbytes, which isn't installed: {INSTALL}")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=leave_out,  # None: transformers finds the output head
    )
    return {"quantization_config": config, "device_map": {"": torch.device(device)}}


def is_four_bit(base: nn.Module) -> bool:
    return bool(getattr(base, "is_loaded_in_4bit", False))


def holds_four_bit(module: nn.Module) -> bool:
    """Whether any weight in ``module``, a part of a model perhaps, is in 4 bits."""
    return any(type(p).__name__ == "Params4bit" for p in module.parameters())


def warn_of_stacks(base: nn.Module) -> None:
    """Say how much isn't in 4 bits: a mixture's experts lie in one tensor each, which bitsandbytes leaves alone."""
    stacked = sum(p.numel() for p in base.parameters() if p.ndim > 2)
    if stacked:
        log.warning(
            "load_in_4bit: %.3g million weights of %s (experts stacked in one tensor) stay in full size",
            stacked / 1e6,
            type(base).__name__,
        )


def keep_gradients(base: nn.Module) -> None:
    """Forbid bitsandbytes to repack weights in a forward of evaluation mode on CPUs with AVX512-BF16: once repacked,
    no gradient passes them, without a word."""
    for part in base.modules():
        if hasattr(part, "support_avx512bf16_for_cpu"):
            vars(part)["support_avx512bf16_for_cpu"] = False
