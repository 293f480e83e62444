"""Tiny models and tokenizers that every test may share: they build in milliseconds and need no download.

``f_bpe``, ``f_gpt2`` and ``f_llama`` are the fixtures F-bpe, F-gpt2 and F-llama of the cases. Vocabulary of F-bpe:
``<pad>``0 ``<bos>``1 ``<eos>``2 ``x``3 ``a``4 ``b``5 ``c``6 ``ab``7 ``u``8 ``s``9 ``t``10 ``:``11 newline 12.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, processors
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

PAD, BOS, EOS = 0, 1, 2
VOCAB = {
    token: i for i, token in enumerate(("<pad>", "<bos>", "<eos>", "x", "a", "b", "c", "ab", "u", "s", "t", ":", "\n"))
}
_TURNS = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
TEMPLATES = {"plain": _TURNS, "bos": "{{ bos_token }}" + _TURNS}


def f_bpe(
    *, bos_post: bool = False, template: Literal["plain", "bos"] | None = None, pad: str | None = "<pad>"
) -> PreTrainedTokenizerFast:
    """F-bpe: BPE with the one merge a+b.

    ``bos_post``: the tokenizer prepends ``<bos>`` by itself. ``template``: a chat template (``u:xa``, newline, ``a:``
    for the user turn ``xa``) without ("plain") or with ("bos") a rendered ``<bos>``; ``None``: no template.
    ``pad``: the pad token, e.g. ``"<eos>"``, or ``None`` for a tokenizer that has none.
    """
    backend = Tokenizer(models.BPE(vocab=VOCAB, merges=[("a", "b")]))
    backend.decoder = decoders.Fuse()
    if bos_post:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token=pad, model_max_length=512
    )
    if template is not None:
        tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


def f_gpt2(seed: int = 0) -> GPT2LMHeadModel:
    """F-gpt2: learned absolute positions (32 of them), dropout 0.1 by default, random weights times 3."""
    config = GPT2Config(
        vocab_size=32,
        n_layer=2,
        n_embd=32,
        n_head=2,
        n_positions=32,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return _built(GPT2LMHeadModel, config, seed)


def f_llama(seed: int = 0, *, kv_heads: int = 2, tied: bool = False) -> LlamaForCausalLM:
    """F-llama: rotary positions, no dropout, random weights times 3."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return _built(LlamaForCausalLM, config, seed)


def _built(cls: type, config: GPT2Config | LlamaConfig, seed: int) -> PreTrainedModel:
    """fp32, in evaluation mode; the caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # norms too
    return model.eval()


def save(folder: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Write both so that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load ``folder``; gives the folder back."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
