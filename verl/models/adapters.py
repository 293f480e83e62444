"""LoRA: low-rank adapters in a frozen base (arXiv 2106.09685)."""

from __future__ import annotations

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from verl.config.errors import RequestError
from verl.config.model import ModelConfig


def add_lora(lm: PreTrainedModel, cfg: ModelConfig) -> PeftModel:
    """A fresh adapter around ``lm``, whose weights freeze. ``B`` starts at 0, so the policy starts as its base.

    Adapters have the base's dtype and no dropout. Raises ``RequestError`` when a target module doesn't exist.
    """
    if isinstance(lm, PeftModel):
        raise RequestError(
            "use_lora adds a fresh adapter, but the model already has one: leave use_lora out, or merge it"
        )
    alpha = cfg.lora_alpha if cfg.lora_alpha is not None else 2 * cfg.lora_r
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=cfg.lora_r,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=cfg.lora_target_modules,
    )
    try:
        return get_peft_model(lm, lora, autocast_adapter_dtype=False)
    except ValueError as error:
        raise RequestError(f"lora_target_modules {cfg.lora_target_modules!r}: {error}") from error
