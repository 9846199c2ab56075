"""Sizes of a few models as their makers published them, for plans without their config.json.

The keys are those of config.json. They stand for these names alone: a folder is always read. Not
for: models of other names, whose config.json is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
_DEEPSEEK_V2: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rope_scaling": _YARN,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1536,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "n_group": 8,
    "topk_group": 3,
    "routed_scaling_factor": 16.0,
    "torch_dtype": "bfloat16",
}
_LLAMA_3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_LLAMA_3_70B = {
    **_LLAMA_3,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "deepseek-ai/DeepSeek-V2": _DEEPSEEK_V2,
        "deepseek-ai/DeepSeek-V2.5": _DEEPSEEK_V2,
        "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_3,
        "meta-llama/Llama-3.1-70B-Instruct": _LLAMA_3_70B,
        "meta-llama/Llama-3.3-70B-Instruct": _LLAMA_3_70B,
    }
)
