"""Random models of known shapes, made where they are used: speed and memory don't depend on what weights say."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SHAPES = {  # of Qwen2.5
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
    "toy": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
KEY_HEADS = {"0.5b": 2, "1.5b": 2, "7b": 4, "toy": 2}
VOCABULARY = 151936


def config(shape: str, vocabulary: int = VOCABULARY) -> Qwen2Config:
    """Qwen2's, with no end-of-sequence id: every response has the length asked for."""
    return Qwen2Config(
        vocab_size=vocabulary, num_key_value_heads=KEY_HEADS[shape], tie_word_embeddings=shape != "7b",
        max_position_embeddings=32768, bos_token_id=None, eos_token_id=None, pad_token_id=None, **SHAPES[shape],
    )  # fmt: skip


def model(shape: str, device: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen2ForCausalLM(config(shape))
    finally:
        torch.set_default_dtype(before)


def tokenizer(vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Byte-level, one token a byte, filled up with tokens that no text has; ``<end>`` is the last but one id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [f"<unused{i}>" for i in range(vocabulary - len(alphabet) - 2)] + ["<end>", "<pad>"]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


def save(folder: Path, shape: str, device: str, dtype: torch.dtype = torch.bfloat16) -> str:
    """A folder as of a hub, with weights and tokenizer."""
    model(shape, device, dtype).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def prompts(count: int, tokens: int, seed: int = 0) -> list[str]:
    """Unlike texts of so many tokens each."""
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=tokens)) for _ in range(count)]
