"""A policy whose responses are short whatever is allowed, so that real length limits cost a test nothing."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from tests import tiny


def brief_llama() -> LlamaForCausalLM:
    """F-llama with near-uniform next tokens, of which about three in four end the response; 1024 positions."""
    lm = tiny.f_llama()
    lm.config.max_position_embeddings = 1024  # prompt 512 and response 512, the defaults
    lm.config.eos_token_id = lm.generation_config.eos_token_id = [tiny.EOS, *range(8, 32)]
    with torch.no_grad():
        lm.lm_head.weight.mul_(0.2)
    return lm
