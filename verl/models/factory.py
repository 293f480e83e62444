"""Tokenizers and models by hub name, folder or loaded module."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from verl.config.errors import RequestError
from verl.config.model import ModelConfig
from verl.models.adapters import add_lora
from verl.models.packing import ATTENTION
from verl.models.policy import base_model
from verl.models.probe import probe


def resolve_dtype(name: str, device: torch.device | str) -> torch.dtype:
    """``auto``, ``bf16`` or ``fp32`` -> dtype of the weights that compute.

    ``auto`` is bf16 on CUDA. On a CPU it is bf16 only with AMX or AVX512-BF16 instructions: measured without them,
    bf16 matrix products take about seven times as long as fp32 ones.
    """
    if name == "auto":
        if torch.device(device).type == "cuda":
            return torch.bfloat16
        fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    try:
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]
    except KeyError:
        raise RequestError(f"dtype {name!r} is not auto, bf16 or fp32") from None


def load_tokenizer(model: Any, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a hub name, a folder, or a loaded module (by the name it was loaded from).

    A pad token or a chat template is not needed. Missing: ``RequestError``.
    """
    name_or_path = base_model(model).config._name_or_path if isinstance(model, nn.Module) else model
    if not name_or_path:
        raise RequestError(
            f"the {type(model).__name__} names no tokenizer: save both to a folder and load the model from there"
        )
    try:
        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise _missing("tokenizer", name_or_path, error) from error


def load_model(cfg: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    """A causal LM ready for ``Policy`` or ``Value``: packed attention, no dropout, adapters where ``use_lora`` asks.

    A loaded module is taken as it is, not copied, and moved to ``device`` and ``dtype``; from then on it computes on
    packed rows only. The model proves at once that it does so correctly (``probe``).

    Raises:
        RequestError: no such model, a folder that holds an adapter instead of a model, an architecture that packed
            rows don't suit, or adapters that fit nowhere.
    """
    source: Any = cfg.model_name_or_path
    if source is None:
        raise RequestError("no model: set model_name_or_path to a hub name, a folder or a loaded module")
    lm: nn.Module
    if isinstance(source, nn.Module):
        lm = source
        if not isinstance(base_model(lm), PreTrainedModel):
            raise RequestError(f"{type(lm).__name__} is not a Hugging Face causal language model")
    else:
        lm = _from_pretrained(source, dtype, cfg.trust_remote_code)
    base = base_model(lm)
    base.set_attn_implementation(ATTENTION)
    if base.config._attn_implementation != ATTENTION:
        raise RequestError(
            f"{type(base).__name__} doesn't let its attention be replaced, so it can't compute on packed rows"
        )
    lm.to(device=device, dtype=dtype)
    probe(lm)
    return add_lora(lm, cfg) if cfg.use_lora else lm  # type: ignore[arg-type]


def create_model(
    model_name: str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A plain Hugging Face causal LM in evaluation mode, ``generate`` included; default dtype: the checkpoint's."""
    model = _from_pretrained(model_name, dtype, False)
    nn.Module.to(model, device)
    return model.eval()


def eos_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a response: the tokenizer's, the configuration's and the generation configuration's."""
    base = base_model(model)
    found: set[int] = set()
    for source in (tokenizer, base.config, base.config.get_text_config(), getattr(base, "generation_config", None)):
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(found)


def _from_pretrained(name: str, dtype: torch.dtype | None, trust_remote_code: bool) -> PreTrainedModel:
    if os.path.exists(os.path.join(name, "adapter_config.json")):
        raise RequestError(
            f"{name} holds an adapter, not a model: training would start from it but the reference would be its base. "
            "Merge it (peft's merge_and_unload, then save_pretrained) and name the merged folder"
        )
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        return AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=dtype if dtype is not None else "auto", trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise _missing("causal language model", name, error) from error


def _missing(what: str, name: str, error: Exception) -> RequestError:
    """Says where it was looked for and, shortly, what was wrong there."""
    reason = str(error).strip().splitlines()[0]
    where = (
        f"folder {os.path.abspath(name)}"
        if os.path.isdir(name)
        else f"folder {os.path.abspath(name)} (not there) and the hub"
    )
    return RequestError(f"no {what} {name!r}: looked in {where}: {reason}")
