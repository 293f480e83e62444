"""A checkpoint's policy or reward model as a Hugging Face folder that plain ``transformers`` (or peft) loads."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from verl.checkpoint.parts import write_parts
from verl.checkpoint.store import Checkpoint
from verl.checkpoint.tensorfile import Joined, TensorFile, read_tensors
from verl.config.errors import RequestError, RunError, writing
from verl.config.model import ModelConfig
from verl.models.adapters import base_of, is_adapter_folder
from verl.models.decoder import adapted, adapter_tensors
from verl.models.factory import eos_ids
from verl.models.scorer import is_scorer

_ELSEWHERE = "name a folder that can be made"
_KEPT = {"pad_token_id", "reward_rows"}  # what merging into a plain base would lose of the configuration
_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def model_files(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, cfg: ModelConfig | None = None
) -> Callable[[Path], None]:
    """What ``write_parts(files={"hf": ...})`` puts beside the weights: all of a model but its weights.

    ``config.json``, ``generation_config.json``, the tokenizer's files, and ``adapter_config.json`` where peft put an
    adapter into the model (of several, the active one). The adapter's base is ``cfg.model_name_or_path`` if that names
    one (an adapter's folder: the base of that), else what the model remembers; a folder is made absolute so that it is
    found from anywhere. Of a base read in 4 bits, it is the unquantised one. A reward model's padding is told apart
    from the ends of rows (``_with_pad``).
    """
    peft_config = getattr(model, "peft_config", None)
    base = model.get_base_model() if adapted(model) else model
    active = model.active_adapters[0] if adapted(model) else "default"
    if not isinstance(base, PreTrainedModel):
        raise TypeError(f"{type(base).__name__} is no Hugging Face model")
    if cfg is not None and cfg.use_lora and not peft_config:
        raise TypeError("use_lora is set, but the model carries no peft adapter")

    def write(folder: Path) -> None:
        config = copy.deepcopy(base.config)
        config.dtype = base.dtype
        config.architectures = config.architectures or [type(base).__name__]
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        own = tokenizer
        if is_scorer(base) and tokenizer is not None:
            own = _with_pad(config, tokenizer, eos_ids(base, tokenizer))
        config.save_pretrained(folder)
        if base.can_generate():
            base.generation_config.save_pretrained(folder)
        if own is not None:
            own.save_pretrained(folder)
        if peft_config:
            adapter = copy.deepcopy(peft_config[active])
            named = cfg.model_name_or_path if cfg is not None else None
            if isinstance(named, str) and is_adapter_folder(named):
                named = base_of(named)
            where = named if isinstance(named, str) else adapter.base_model_name_or_path or base.config._name_or_path
            adapter.base_model_name_or_path = str(Path(where).resolve()) if Path(where).is_dir() else where
            adapter.inference_mode = True
            adapter.save_pretrained(folder)

    return write


def _with_pad(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]
) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer that pads, as ``config`` then says, with a token that ends no row; with none in the worst
    case, and then transformers refuses to score several rows at once.

    transformers reads a row's score at the last id that isn't the pad id: where rows end with the pad id (often the
    end-of-sequence token serves as both), that would be one token too early.
    """
    own = copy.deepcopy(tokenizer)
    texts = [tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token]
    fit = [text for text in texts if text is not None and tokenizer.convert_tokens_to_ids(text) not in ends]
    own.pad_token = fit[0] if fit else None
    config.get_text_config().pad_token_id = own.pad_token_id
    return own


def export(checkpoint: Path, out: Path, *, merge: bool = True, trust_remote_code: bool = False) -> Path:
    """Write the policy (or reward model) of the checkpoint folder ``.../step_N`` to ``out`` and give ``out`` back.

    Full weights become ``model.safetensors``. An adapter (tensors as ``peft.get_peft_model_state_dict`` names them) is
    merged into its base model, loaded in its own dtype from where the adapter's configuration says, or with
    ``merge=False`` written as a peft adapter folder.
    Raises `RequestError` if ``out`` exists and isn't empty or can't be written, or ``checkpoint`` holds no policy,
    `RunError` naming a damaged file. ``out`` appears complete or not at all.
    """
    with writing(out, advice=_ELSEWHERE):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise RequestError(f"{out} exists and isn't empty")
    saved = Checkpoint.open(checkpoint)
    if "actor" not in saved or "hf/config.json" not in saved.files:
        raise RequestError(f"{checkpoint} holds no policy to export; it has {sorted(saved.files)}")
    is_adapter = f"hf/{_ADAPTER}" in saved.files
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    with writing(out, advice=_ELSEWHERE):
        aside.mkdir(parents=True)
    try:
        shutil.copytree(checkpoint / "hf", aside, dirs_exist_ok=True)
        weights = saved.tensors("actor")
        if is_adapter:
            _write_adapter(weights, aside)
            if merge:
                _merge(aside, trust_remote_code)
        else:
            _write_weights(weights, aside)
        if out.exists():
            out.rmdir()
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return out


def _write_weights(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """``model.safetensors``, tensor by tensor; a tensor's second names are written out unless the model ties them.

    A configuration that doesn't mention tying may still mean it; then the second copy is equal and does no harm.
    """
    config = json.loads((folder / "config.json").read_text())
    tied = config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False))
    by_id: dict[int, str] = {}
    shared = [] if tied or not isinstance(tensors, dict) else sorted(tensors)
    shared = [name for name in shared if by_id.setdefault(id(tensors[name]), name) != name]
    _write({**tensors, **{n: tensors[n].clone() for n in shared}} if shared else tensors, folder / "model.safetensors")


def _write_adapter(weights: Mapping[str, Tensor], folder: Path) -> None:
    """``adapter_model.safetensors``, names as peft wants them; an adapter put into the bare model lacks the prefix."""
    prefix = "base_model.model."
    _write({prefix + n.removeprefix(prefix): t for n, t in weights.items()}, folder / _ADAPTER_WEIGHTS)


def _write(tensors: Mapping[str, Tensor], path: Path) -> None:
    if isinstance(tensors, Joined):  # one tensor is whole at a time
        write_parts(path.parent, {path.stem: iter(tensors.items())})
        return
    with path.open("wb") as file:
        file.writelines(TensorFile(tensors).chunks())


def _merge(folder: Path, trust_remote_code: bool) -> None:
    """Replace the adapter in ``folder`` by the merged model; tokenizer and generation config stay the saved ones.

    A reward model's head is part of its adapter, so its base may be a language model.
    """
    adapter, saved = (json.loads((folder / name).read_text()) for name in (_ADAPTER, "config.json"))
    base_path, how = adapter["base_model_name_or_path"], {"dtype": "auto", "trust_remote_code": trust_remote_code}
    kind: Any = AutoModelForCausalLM
    if adapter.get("task_type") == "SEQ_CLS":
        kind, how["num_labels"] = AutoModelForSequenceClassification, 1
    try:
        base = kind.from_pretrained(base_path, **how)
    except OSError as error:
        raise RequestError(f"the adapter's base model {base_path} can't be loaded: {error}") from error
    from peft import PeftModel

    model = PeftModel.from_pretrained(base, folder)
    # peft only warns about tensors without a place, and a policy that lost half its adapter answers fluently
    placed, written = set(adapter_tensors(model)), set(read_tensors(folder / _ADAPTER_WEIGHTS))
    if placed != written:
        raise RunError(f"the adapter doesn't fit {base_path}: {sorted(placed ^ written)[:4]} on one side only")
    generation = folder / "generation_config.json"
    kept = generation.read_bytes() if generation.exists() else None
    merged = model.merge_and_unload()
    for key in _KEPT & saved.keys():
        setattr(merged.config, key, saved[key])
    merged.save_pretrained(folder)
    if kept is not None:
        generation.write_bytes(kept)
    for name in (_ADAPTER, _ADAPTER_WEIGHTS):
        (folder / name).unlink()
