"""Tokenizers and models by hub name, folder or loaded module."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from verl.config.errors import RequestError
from verl.config.model import ModelConfig
from verl.models import unread
from verl.models.adapters import base_of, is_adapter_folder, task_of, with_adapter
from verl.models.decoder import adapted, base_model
from verl.models.packing import ATTENTION, set_attention
from verl.models.probe import probe
from verl.models.quantize import four_bit, is_four_bit, keep_gradients, warn_of_stacks
from verl.models.scorer import HEAD, is_scorer, mark, new_head
from verl.models.stored import incomplete, read, warn_of_rest

log = logging.getLogger(__name__)


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

    An adapter's folder without one means its base's. A pad token or a chat template is not needed. Missing:
    ``RequestError``.
    """
    name_or_path = base_model(model).config._name_or_path if isinstance(model, nn.Module) else model
    if not name_or_path:
        raise RequestError(
            f"the {type(model).__name__} names no tokenizer: save both to a folder and load the model from there"
        )
    if is_adapter_folder(name_or_path) and not any(Path(name_or_path).glob("tokenizer*")):
        name_or_path = base_of(name_or_path)
    try:
        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise _missing("tokenizer", name_or_path, error) from error


def load_model(
    cfg: ModelConfig, device: torch.device | str, dtype: torch.dtype, in_parts: bool = False, headless: bool = False
) -> nn.Module:
    """A causal LM ready for ``Policy`` or ``Value``: packed attention, no dropout, adapters where ``cfg`` has them.

    The source may be an adapter's folder, or a loaded module with an adapter: training goes on with that one. A loaded
    module is taken as it is, not copied, and moved to ``device`` and ``dtype``; from then on it computes on packed rows
    only. The model proves at once that it does so correctly (``probe``).

    ``in_parts``: where that is possible, leave the weights in their files (``unread.build``). The engine that shards
    the model over ranks reads each rank's part, and then has it proven.

    ``headless``: only the backbone will be used, so a reward model's files or a bare backbone's do as well.

    Raises:
        RequestError: no such model, files without some of its weights or with other shapes, an architecture that packed
            rows don't suit, adapters that fit nowhere or contradict ``cfg``, or a missing package.
    """
    source = _source(cfg)
    plain = not (cfg.use_lora or cfg.load_in_4bit or cfg.trust_remote_code)
    if in_parts and plain and isinstance(source, str) and (model := _unread(source, dtype)) is not None:
        return model
    if not isinstance(source, nn.Module):
        quantise_on = device if cfg.load_in_4bit else None
        source = _from_pretrained(source, dtype, cfg.trust_remote_code, quantise_on, headless)
    elif not isinstance(base_model(source), PreTrainedModel):
        raise RequestError(f"{type(source).__name__} is not a Hugging Face causal language model")
    return _ready(source, cfg, device, dtype)


def load_scorer(cfg: ModelConfig, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """A sequence-classification decoder with one label, ready for ``Scorer``; else as ``load_model``.

    The source is a causal LM, which gets a new head drawn from ``seed``, or a sequence-classification model, or either
    one loaded; a loaded causal LM lends its backbone. With LoRA the head is trained whole beside the adapter.

    Raises:
        RequestError: besides ``load_model``'s reasons, an architecture without a sequence-classification form, several
            labels, or a language model's adapter.
    """
    source = _source(cfg)
    if isinstance(source, nn.Module):
        base = base_model(source)
        if not is_scorer(base):
            if adapted(source):
                raise _not_merged(type(source).__name__)
            source = _on_backbone_of(base, seed)
    else:
        if is_adapter_folder(source) and task_of(source) != "SEQ_CLS":
            raise _not_merged(source)
        source = _scorer_from_pretrained(source, dtype, cfg, device, seed)
    mark(base_model(source))
    return _ready(source, cfg, device, dtype)


def create_model(
    model_name: str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A plain Hugging Face causal LM in evaluation mode, ``generate`` included; default dtype: the checkpoint's.

    Of an adapter's folder: its base with the adapter merged into it.
    """
    model = _from_pretrained(model_name, dtype, False)
    if is_adapter_folder(model_name):
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, model_name).merge_and_unload()
    nn.Module.to(model, device)
    return model.eval()


def outline(name: str, trust_remote_code: bool = False, **options: Any) -> PreTrainedModel:
    """The causal LM of a hub name or folder without memory for its weights (they are on the meta device).

    ``options`` are ``from_config``'s. ``RequestError`` where there is none.
    """
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError) as error:
        raise _missing("causal language model", name, error) from error


def eos_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Every id that ends a response: the tokenizer's, the configuration's and the generation configuration's."""
    base = base_model(model)
    return end_ids(tokenizer, base.config, getattr(base, "generation_config", None))


def end_ids(tokenizer: PreTrainedTokenizerBase | None, config: Any, generation_config: Any) -> frozenset[int]:
    """As ``eos_ids``, of a model that need not be loaded."""
    found: set[int] = set()
    for source in (tokenizer, config, config.get_text_config(), generation_config):
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(found)


def _source(cfg: ModelConfig) -> Any:
    if cfg.model_name_or_path is None:
        raise RequestError("no model: set model_name_or_path to a hub name, a folder or a loaded module")
    return cfg.model_name_or_path


def _ready(lm: nn.Module, cfg: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    """Packed attention, placed, probed, with adapters."""
    base = base_model(lm)
    packed_attention(base)
    if cfg.load_in_4bit and not is_four_bit(base):
        raise RequestError("load_in_4bit quantises a model while it is read: give its name or folder, not the module")
    if isinstance(cfg.model_name_or_path, nn.Module) and not is_four_bit(base):
        # parameters alone: rotary frequencies and the like are buffers, and rounding them would shift far positions
        for p in lm.parameters():
            p.data = p.data.to(dtype)
    lm.to(device=device)
    if is_four_bit(base):
        keep_gradients(base)
        warn_of_stacks(base)
    probe(lm)
    lm = with_adapter(lm, cfg, device)
    if is_four_bit(base) and not adapted(lm):
        lm.requires_grad_(False)  # a teacher, say; what could be trained beside 4-bit weights is not worth it
    return lm


def packed_attention(base: PreTrainedModel) -> None:
    """From now on the model computes on packed rows; ``RequestError`` where its attention can't be replaced."""
    set_attention(base, ATTENTION)
    if base.config._attn_implementation != ATTENTION:
        raise RequestError(
            f"{type(base).__name__} doesn't let its attention be replaced, so it can't compute on packed rows"
        )


def _unread(name: str, dtype: torch.dtype) -> PreTrainedModel | None:
    """The model without its weights; ``None`` where it can't be had so."""
    if is_adapter_folder(name):
        return None
    try:
        model = unread.build(name, dtype)
    except (OSError, ValueError) as error:
        raise _missing("causal language model", name, error) from error
    if isinstance(model, str):
        log.info("%s is read whole by each rank and sharded then: %s", name, model)
        return None
    packed_attention(model)
    return model


def _from_pretrained(
    name: str, dtype: torch.dtype | None, trust_remote_code: bool, quantise_on: torch.device | str | None = None,
    headless: bool = False,
) -> PreTrainedModel:  # fmt: skip
    """The causal LM of this name; of an adapter's folder, its base. ``quantise_on``: in 4 bits, on that device.
    ``headless``: what is outside of the backbone may be missing and is drawn then."""
    name = base_of(name) if is_adapter_folder(name) else name
    how: dict[str, Any] = {"dtype": "auto" if dtype is None else dtype, "trust_remote_code": trust_remote_code}
    if quantise_on is not None and dtype is not None:
        how |= four_bit(quantise_on, dtype)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        model, absent, rest = read(AutoModelForCausalLM, name, config, **how)
    except RequestError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise _missing("causal language model", name, error) from error
    if headless:
        inside = {id(p) for p in model.get_decoder().parameters()}
        absent = [n for n in absent if id(model.get_parameter(n)) in inside]
    if absent:
        raise incomplete(name, model, absent, rest)
    if rest and not headless:
        warn_of_rest(name, type(model).__name__, tuple(rest))
    return model


def _scorer_from_pretrained(
    name: str, dtype: torch.dtype, cfg: ModelConfig, device: torch.device | str, seed: int
) -> PreTrainedModel:
    """The sequence-classification model of this name, or the causal LM of this name with a new head; of an adapter's
    folder, what it was put on."""
    name = base_of(name) if is_adapter_folder(name) else name
    how: dict[str, Any] = {"dtype": dtype, "trust_remote_code": cfg.trust_remote_code}
    if cfg.load_in_4bit:
        how |= four_bit(device, dtype, leave_out=[HEAD])
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=cfg.trust_remote_code)
    except (OSError, ValueError) as error:
        raise _missing("model", name, error) from error
    trained = any(kind.endswith("ForSequenceClassification") for kind in config.architectures or ())
    if trained and config.num_labels != 1:
        raise RequestError(f"{name} gives {config.num_labels} numbers per row (num_labels), a reward is one")
    config.num_labels = 1
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not hasattr(config, "auto_map"):
        raise _no_form(type(config).__name__)
    try:
        with torch.random.fork_rng(devices=[]):  # transformers draws a head, which is then drawn again
            model, absent, _ = read(AutoModelForSequenceClassification, name, config, **how)
    except RequestError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise _missing("sequence-classification model", name, error) from error
    if lacking := [n for n in absent if trained or not n.startswith(f"{HEAD}.")]:
        raise incomplete(name, model, lacking)
    if not is_scorer(model):
        raise RequestError(
            f"{name} ({type(model).__name__}) is no decoder: reward models that are trained here are decoders, such as "
            "Llama's or Qwen's; one that is trained already can score as reward_model_config"
        )
    if absent:
        new_head(model, seed)
    return model


def _on_backbone_of(base: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The sequence-classification form of a loaded causal LM, around the LM's own backbone."""
    if not isinstance(base, PreTrainedModel):
        raise RequestError(f"{type(base).__name__} is not a Hugging Face causal language model")
    config = copy.deepcopy(base.config)
    config.num_labels = 1
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise _no_form(type(base).__name__)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    old = getattr(model, HEAD, None)
    if old is None or type(model.base_model) is not type(base.base_model):
        raise _no_form(type(base).__name__)
    setattr(model, model.base_model_prefix, base.base_model)
    bias = old.bias is not None
    setattr(model, HEAD, nn.Linear(old.in_features, 1, bias=bias, device=base.device, dtype=base.dtype))
    new_head(model, seed)
    return model.eval()


def _no_form(kind: str) -> RequestError:
    return RequestError(
        f"{kind} has no sequence-classification form in transformers, so no reward model can be made of it"
    )


def _not_merged(what: str) -> RequestError:
    return RequestError(
        f"{what} holds a language model's adapter, which a reward model can't go on with: merge it into its base "
        "(verl export, or peft's merge_and_unload and save_pretrained) and name the merged folder"
    )


def _missing(what: str, name: str, error: Exception) -> RequestError:
    """Says where it was looked for and, shortly, what was wrong there."""
    reason = str(error).strip().splitlines()[0]
    where = (
        f"folder {os.path.abspath(name)}"
        if os.path.isdir(name)
        else f"folder {os.path.abspath(name)} (not there) and the hub"
    )
    return RequestError(f"no {what} {name!r}: looked in {where}: {reason}")
