"""Random models of known shapes, made where they are used: speed and memory don't depend on what weights say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

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


def model(
    shape: str, device: str | torch.device, dtype: torch.dtype = torch.bfloat16, vocabulary: int = VOCABULARY
) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen2ForCausalLM._from_config(config(shape, vocabulary), dtype=dtype).eval()


def tokenizer(vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Byte-level, one token a byte, filled up with tokens that no text has; ``<|endoftext|>``, which transformers would
    add to a Qwen2 that lacks it, is the last but one id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [f"<unused{i}>" for i in range(vocabulary - len(alphabet) - 2)] + ["<|endoftext|>", "<pad>"]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<pad>")


def save(
    folder: Path, shape: str, device: str, dtype: torch.dtype = torch.bfloat16, vocabulary: int = VOCABULARY
) -> str:
    """A folder as of a hub, with weights and tokenizer."""
    model(shape, device, dtype, vocabulary).save_pretrained(folder)
    tokenizer(vocabulary).save_pretrained(folder)
    return str(folder)


def save_words(
    folder: Path,
    words: Sequence[str],
    positions: int = 64,
    *,
    width: int = 16,
    inner: int = 32,
    layers: int = 1,
    heads: int = 2,
    ends: bool = False,
) -> str:
    """A folder with a Llama (by default of 20,000 parameters) whose tokens are these words; ``ends``: and one that
    ends a response, which has the length asked for otherwise."""
    special = ["<pad>", "<eos>"] if ends else ["<pad>"]
    vocabulary = {word: i for i, word in enumerate([*special, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"pad_token": "<pad>"} | ({"eos_token": "<eos>"} if ends else {})
    PreTrainedTokenizerFast(tokenizer_object=backend, **named).save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary), hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=positions,
            bos_token_id=None, eos_token_id=1 if ends else None, pad_token_id=0,
        )
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def letters(response: str) -> float:
    """A reward that differs from row to row."""
    return len(set(response)) / 100


def prompts(count: int, tokens: int, seed: int = 0) -> list[str]:
    """Unlike texts of so many tokens each."""
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=tokens)) for _ in range(count)]
