"""Small random models of many families, and what every test of models may ask of them."""

from __future__ import annotations

import torch
import transformers as tf
from torch import nn

from verl.config.model import ModelConfig
from verl.models.factory import load_model
from verl.models.policy import Policy

PLAIN = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEAD = {**PLAIN, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
SPARSE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "topk_group": 1,
}  # fmt: skip
CAPS = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0}
GRANITE = {
    "logits_scaling": 3.0, "attention_multiplier": 0.2, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
}  # fmt: skip
GPT2 = {
    "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**HEAD)),
    "smollm2 (llama, tied)": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**PLAIN, tie_word_embeddings=True)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**PLAIN)),
    "qwen2 window": lambda: tf.Qwen2ForCausalLM(
        tf.Qwen2Config(**PLAIN, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    ),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**HEAD)),
    "qwen3 moe": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**HEAD, **EXPERTS)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**HEAD, sliding_window=4)),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**HEAD, num_local_experts=4)),
    "deepseek v2": lambda: tf.DeepseekV2ForCausalLM(
        tf.DeepseekV2Config(**{**PLAIN, "num_key_value_heads": 4}, **LATENT, **SPARSE, q_lora_rank=None, n_group=1)
    ),
    "deepseek v3": lambda: tf.DeepseekV3ForCausalLM(
        tf.DeepseekV3Config(**{**PLAIN, "num_key_value_heads": 4}, **LATENT, **SPARSE, q_lora_rank=12, n_group=2)
    ),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**HEAD)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**HEAD, sliding_window=4, query_pre_attn_scalar=20, **CAPS)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**{**HEAD, "num_hidden_layers": 6}, sliding_window=4, query_pre_attn_scalar=20)
    ),
    "gemma4": lambda: tf.Gemma4ForCausalLM(
        tf.Gemma4TextConfig(
            **{**HEAD, "num_hidden_layers": 4},
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_kv_shared_layers=2,
            sliding_window=4,
            global_head_dim=16,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=64,
        )
    ),
    "smollm3": lambda: tf.SmolLM3ForCausalLM(tf.SmolLM3Config(**PLAIN)),
    "glm4 moe": lambda: tf.Glm4MoeForCausalLM(tf.Glm4MoeConfig(**HEAD, **SPARSE, n_group=1)),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(
            vocab_size=64,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=32,
            max_position_embeddings=64,
        )
    ),
    "gptneox": lambda: tf.GPTNeoXForCausalLM(
        tf.GPTNeoXConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        )
    ),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
    "granite": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**PLAIN, **GRANITE)),
    "cohere": lambda: tf.CohereForCausalLM(tf.CohereConfig(**PLAIN, logit_scale=0.3)),
    "cohere2": lambda: tf.Cohere2ForCausalLM(
        tf.Cohere2Config(**{**HEAD, "num_hidden_layers": 4}, logit_scale=0.3, sliding_window=4)
    ),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**PLAIN)),
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**PLAIN)),
}
REFUSED = {
    "alibi": lambda: tf.BloomForCausalLM(tf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)),
    "recurrent": lambda: tf.MambaForCausalLM(
        tf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    ),
    "chunked": lambda: tf.Llama4ForCausalLM(
        tf.Llama4TextConfig(**HEAD, num_local_experts=2, attention_chunk_size=4, intermediate_size_mlp=48)
    ),
    "sinks": lambda: tf.GptOssForCausalLM(
        tf.GptOssConfig(**HEAD, num_local_experts=4, num_experts_per_tok=2, sliding_window=4)
    ),
    "length-dependent rope": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**HEAD, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    ),
}


def built(make):
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    return model


def loaded(model: nn.Module, **options) -> Policy:
    return Policy(load_model(ModelConfig(model_name_or_path=model, **options), "cpu", torch.float32))


def rows(vocab=64):
    """Three rows, the first two of one prompt; long enough to leave a window of 4."""
    g = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, vocab, (n,), generator=g) for n in (7, 3)]
    responses = [torch.randint(3, vocab, (n,), generator=g) for n in (6, 1, 9)]
    return [prompts[0], prompts[0], prompts[1]], responses, [0, 0, 1]
