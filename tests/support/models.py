"""Tiny random models of every supported family: small enough to export in seconds, odd enough to show mistakes.

Norm weights are not one, biases are not zero, windows are shorter than the tests' sequences, heads are grouped, and
head sizes are not hidden size / heads where the family allows it.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

WINDOW = 7
SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def llama(**changes: Any) -> PretrainedConfig:
    return LlamaConfig(**{**SIZES, "head_dim": 16, "tie_word_embeddings": False, **changes})


def llama3_rope(**changes: Any) -> PretrainedConfig:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return llama(rope_parameters=rope, tie_word_embeddings=True, **changes)


def mistral(**changes: Any) -> PretrainedConfig:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    fixed = {"sliding_window": WINDOW, "rope_parameters": rope, "tie_word_embeddings": False}
    return MistralConfig(**{**SIZES, **fixed, **changes})


def qwen2(**changes: Any) -> PretrainedConfig:
    return Qwen2Config(**{**SIZES, "tie_word_embeddings": True, **changes})


def qwen2_window(**changes: Any) -> PretrainedConfig:
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    return Qwen2Config(**{**SIZES, "rope_parameters": rope, "tie_word_embeddings": False, **window, **changes})


def qwen3(**changes: Any) -> PretrainedConfig:
    return Qwen3Config(**{**SIZES, "head_dim": 32, "tie_word_embeddings": True, **changes})


def gemma3(**changes: Any) -> PretrainedConfig:
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    special = {"head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 4, "layer_types": kinds}
    scales = {"query_pre_attn_scalar": 24, "final_logit_softcapping": 20.0, "tie_word_embeddings": True}
    return Gemma3TextConfig(**{**SIZES, **special, **scales, "pad_token_id": 0, **changes})


def phi3(**changes: Any) -> PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    fixed = {"rope_parameters": rope, "tie_word_embeddings": False, "hidden_size": 64}
    return Phi3Config(**{**SIZES, **fixed, **changes})


def gpt2(**changes: Any) -> PretrainedConfig:
    sizes = {"vocab_size": 101, "n_positions": 512, "n_embd": 48, "n_layer": 3, "n_head": 4}
    return GPT2Config(**{**sizes, "bos_token_id": 1, "eos_token_id": 2, **changes})


FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    family.__name__: family for family in (llama, llama3_rope, mistral, qwen2, qwen2_window, qwen3, gemma3, phi3, gpt2)
}


def random_model(config: PretrainedConfig, seed: int = 0) -> Any:
    """The model of `config` in fp32 with eager attention; every parameter random, none at a neutral value."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    centred_at_one = config.model_type != "gemma3_text"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * (1.2 / parameter.shape[-1] ** 0.5))
            else:
                parameter.copy_(noise * 0.3 + (1.0 if name.endswith("weight") and centred_at_one else 0.0))
    return model.eval().requires_grad_(False)
