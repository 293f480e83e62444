"""LoRA: low-rank adapters in a frozen base (arXiv 2106.09685), fresh ones and ones that training goes on with."""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from verl.config.errors import RequestError
from verl.config.model import ModelConfig
from verl.models.decoder import adapted, adapter_tensors
from verl.models.scorer import HEAD, is_scorer

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel

CONFIG = "adapter_config.json"
_B = re.compile(r"(base_model\.model\.)?(?P<module>.+)\.lora_(embedding_)?B\b")  # the name of a module's ``B``


def is_adapter_folder(source: Any) -> bool:
    return isinstance(source, str) and os.path.isfile(os.path.join(source, CONFIG))  # False for what is no path, too


def settings_of(folder: str) -> dict[str, Any]:
    """peft's configuration of the adapter in a folder, as its file has it; ``RequestError`` where that is none."""
    try:
        settings: dict[str, Any] = json.loads((Path(folder) / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise RequestError(f"{Path(folder) / CONFIG} holds no adapter's settings: {error}") from error
    if not isinstance(settings, dict):
        raise RequestError(f"{Path(folder) / CONFIG} holds no adapter's settings, which are a JSON object")
    return settings


def task_of(folder: str) -> str | None:
    """``CAUSAL_LM``, ``SEQ_CLS``: what the adapter in a folder was made for."""
    return settings_of(folder).get("task_type")


def base_of(folder: str) -> str:
    """Name or folder of the model under an adapter; a relative folder is looked for here, then beside the adapter."""
    named = settings_of(folder).get("base_model_name_or_path")
    if not named:
        raise RequestError(f"{folder} holds an adapter that names no base: set base_model_name_or_path in its {CONFIG}")
    beside = Path(folder) / named
    return str(beside) if beside.is_dir() and not Path(named).is_dir() else named


def with_adapter(lm: Any, cfg: ModelConfig, device: Any = None) -> PreTrainedModel | PeftModel:
    """``lm`` with what ``cfg`` asks for: the adapter it has or whose folder is named, a fresh one, or none.

    Raises ``RequestError`` for adapters that fit nowhere, contradict ``cfg``, or are of another kind than LoRA.
    """
    if adapted(lm):
        return _go_on(lm, cfg)
    source = cfg.model_name_or_path
    if isinstance(source, str) and is_adapter_folder(source):
        return _from_folder(lm, source, cfg, device)
    return add_lora(lm, cfg) if cfg.use_lora else lm


def lora_config(cfg: ModelConfig, scores: bool = False) -> LoraConfig:
    """A fresh adapter's settings, of a policy or of what ``scores``."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
        r=cfg.lora_r,
        lora_alpha=cfg.lora_alpha if cfg.lora_alpha is not None else 2 * cfg.lora_r,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=cfg.lora_target_modules,
        modules_to_save=[HEAD] if scores else None,
    )


def add_lora(lm: PreTrainedModel, cfg: ModelConfig) -> PeftModel:
    """A fresh adapter around ``lm``, whose weights freeze. ``B`` starts at 0, so the policy starts as its base.

    Adapters have the base's dtype (in a 4-bit base: float32) and no dropout. A scorer's head is trained whole.
    Raises ``RequestError`` when a target module doesn't exist, or what names them is no regular expression.
    """
    from peft import get_peft_model

    try:
        return get_peft_model(lm, lora_config(cfg, is_scorer(lm)), autocast_adapter_dtype=False)
    except ValueError as error:
        raise RequestError(f"lora_target_modules {cfg.lora_target_modules!r}: {error}") from error
    except (re.error, OverflowError, RecursionError) as error:
        raise RequestError(
            f"lora_target_modules {cfg.lora_target_modules!r} is no regular expression ({error}); a list has the ends "
            "of modules' names"
        ) from error


def starts_at_base(lm: PeftModel, adapter: str) -> bool:
    """Whether the adapter changes nothing: all it adds but ``A`` is 0, as in a fresh one."""
    weights = adapter_tensors(lm, adapter)
    return not any(bool(w.any()) for name, w in weights.items() if ".lora_A" not in name and "embedding_A" not in name)


def keep_copy(lm: PeftModel, adapter: str, name: str) -> None:
    """Put a frozen copy of ``adapter`` beside it, as adapter ``name``; what is trained and active stays so."""
    from peft import LoraConfig, set_peft_model_state_dict

    trained = [(p, p.requires_grad) for p in lm.parameters()]
    if name in lm.peft_config:
        lm.delete_adapter(name)
    config = copy.deepcopy(lm.peft_config[adapter])
    config.inference_mode = True
    if isinstance(config, LoraConfig):
        config.init_lora_weights = True  # other ways of starting would change the base
    weights = {n: w.detach().clone() for n, w in adapter_tensors(lm, adapter).items()}
    with torch.random.fork_rng(devices=[]):  # the copy's first weights are drawn, then replaced
        lm.add_adapter(name, config, autocast_adapter_dtype=False)
    set_peft_model_state_dict(lm, weights, adapter_name=name)
    kept = adapter_tensors(lm, name)
    assert kept.keys() == weights.keys() and all(bool((kept[n] == w).all()) for n, w in weights.items())
    for part_name, p in lm.named_parameters():
        if f".{name}." in part_name:
            p.requires_grad_(False)
    for p, flag in trained:
        p.requires_grad_(flag)


def unscaled(
    adapter: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]
) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """The same adapter for readers that know one factor for all modules (vLLM 0.24: no ``rank_pattern``, no
    ``alpha_pattern``): each module's factor is in its ``B``, and every factor of the settings is 1.

    ``adapter``: peft's ``LoraConfig`` as a dictionary; ``tensors`` by the names of an adapter's file, ``B [out, r]``.
    """
    alphas: dict[str, float] = adapter.get("alpha_pattern") or {}

    def scaled() -> Iterator[tuple[str, Tensor]]:
        from peft.utils.other import get_pattern_key

        for name, tensor in tensors:
            if found := _B.match(name):
                key = get_pattern_key(list(alphas), found["module"])
                alpha, rank = alphas.get(key, adapter["lora_alpha"]), tensor.shape[-1]
                tensor = tensor * (alpha / (math.sqrt(rank) if adapter.get("use_rslora") else rank))
            yield name, tensor

    ones = {"lora_alpha": adapter["r"], "alpha_pattern": adapter.get("rank_pattern") or {}, "use_rslora": False}
    return {**adapter, **ones}, scaled()


def _go_on(lm: PeftModel, cfg: ModelConfig) -> PeftModel:
    """Train the adapter that a loaded module has active."""
    adapter = lm.active_adapters[0]
    _check(lm.peft_config[adapter], cfg, "the model's adapter")
    if not any(p.requires_grad for p in lm.parameters()):  # loaded as peft loads by default, for inference
        lm.set_adapter(adapter)
        lm.peft_config[adapter].inference_mode = False
    return lm


def _from_folder(lm: PreTrainedModel, folder: str, cfg: ModelConfig, device: Any) -> PeftModel:
    from peft import PeftConfig, PeftModel
    from peft.utils import load_peft_weights

    config = PeftConfig.from_pretrained(folder)
    _check(config, cfg, f"the adapter in {folder}")
    config.base_model_name_or_path = base_of(folder)
    try:
        model = PeftModel.from_pretrained(
            lm,
            folder,
            is_trainable=True,
            config=config,
            autocast_adapter_dtype=False,
            torch_device=str(device or "cpu"),
        )
    except (RuntimeError, ValueError) as error:
        raise RequestError(f"the adapter in {folder} doesn't fit {base_of(folder)}: {error}") from error
    # peft only warns about tensors without a place, and half an adapter answers fluently
    placed, written = set(adapter_tensors(model)), set(load_peft_weights(folder, device="cpu"))
    if placed != written:
        stray = sorted(placed ^ written)[:4]
        raise RequestError(f"the adapter in {folder} doesn't fit {base_of(folder)}: {stray} on one side only")
    return model


def _check(adapter: PeftConfig, cfg: ModelConfig, what: str) -> None:
    """Refuse settings that contradict the adapter. A default contradicts nothing: a resolved file names them all."""
    from peft import LoraConfig

    if not isinstance(adapter, LoraConfig):
        raise RequestError(
            f"{what} is of kind {adapter.peft_type}; training goes on with LoRA adapters only: merge it into its base "
            "(peft's merge_and_unload, then save_pretrained) and name the merged folder"
        )
    has = {"lora_r": adapter.r, "lora_alpha": adapter.lora_alpha, "lora_target_modules": adapter.target_modules}
    for key, value in has.items():
        asked, default = getattr(cfg, key), type(cfg).model_fields[key].default
        if asked != default and _plain(asked) != _plain(value):
            shown = sorted(value) if isinstance(value, set) else value
            raise RequestError(
                f"{key} is {asked!r}, but {what} has {shown!r}: leave {key} out, training goes on with it"
            )


def _plain(value: Any) -> Any:
    return set(value) if isinstance(value, Collection) and not isinstance(value, str) else value
