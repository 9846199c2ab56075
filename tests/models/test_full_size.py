"""Models at their published sizes, without memory: built and filled with dummies on `meta`.

What is allocated is counted, and compared with a formula in terms of the config alone, and with
what transformers builds of the same config.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from octavo.models.load import build_model
from octavo.models.registry import read_spec
from octavo.weights.loader import load_dummy
from tests.models.driver import make_build

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "beta_fast": 32,
    "beta_slow": 1,
}
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rope_scaling": YARN,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "torch_dtype": "bfloat16",
}
V2: dict[str, Any] = {
    **V2_LITE,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "q_lora_rank": 1536,
    "n_routed_experts": 160,
    "moe_intermediate_size": 1536,
    "topk_method": "group_limited_greedy",
    "n_group": 8,
    "topk_group": 3,
    "routed_scaling_factor": 16.0,
}
V3: dict[str, Any] = {
    **V2,
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}


def llama(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }


def qwen3(
    hidden: int, inner: int, layers: int, heads: int, *, tied: bool = False
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


# name -> (config, published size in billions of parameters)
MODELS: dict[str, tuple[dict[str, Any], float]] = {
    "llama-3.1-8b": (llama(4096, 14336, 32, 32), 8.03),
    "llama-3.1-70b": (llama(8192, 28672, 80, 64), 70.55),
    "qwen3-0.6b": (qwen3(1024, 3072, 28, 16, tied=True), 0.60),
    "qwen3-1.7b": (qwen3(2048, 6144, 28, 16, tied=True), 1.72),
    "qwen3-4b": (qwen3(2560, 9728, 36, 32, tied=True), 4.02),
    "qwen3-8b": (qwen3(4096, 12288, 36, 32), 8.19),
    "qwen3-14b": (qwen3(5120, 17408, 40, 40), 14.77),
    "qwen3-32b": (qwen3(5120, 25600, 64, 64), 32.76),
    "qwen3-30b-a3b": (QWEN3_30B, 30.53),
    "mixtral-8x7b": (MIXTRAL, 46.70),
    "deepseek-v2-lite": (V2_LITE, 15.71),
    "deepseek-v2.5": (V2, 235.74),
    "deepseek-v3": (V3, 671.03),
}


def by_formula(config: dict[str, Any]) -> int:
    """Parameters, from the config's own words."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    tables = 1 if config.get("tie_word_embeddings") else 2
    total = tables * config["vocab_size"] * hidden + hidden
    dense = 3 * hidden * config["intermediate_size"]
    per_layer = 2 * hidden + _attention(config)
    experts = config.get("n_routed_experts", config.get("num_experts", 0))
    experts = config.get("num_local_experts", experts)
    if not experts:
        return int(total + layers * (per_layer + dense))
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    shared = config.get("n_shared_experts", 0)
    routed = experts * hidden + 3 * hidden * width * (experts + shared)
    if config.get("scoring_func") == "sigmoid":
        routed += experts
    first = config.get("first_k_dense_replace", 0)
    return int(total + layers * per_layer + first * dense + (layers - first) * routed)


def _attention(config: dict[str, Any]) -> int:
    """Parameters of one layer's attention."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "kv_lora_rank" not in config:
        size = config.get("head_dim", hidden // heads)
        kv = config["num_key_value_heads"]
        norms = 2 * size if "Qwen3" in config["architectures"][0] else 0
        return int(2 * hidden * size * (heads + kv) + norms)
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    low = config["q_lora_rank"]
    queries = heads * (plain + turned)
    query = hidden * low + low + low * queries if low else hidden * queries
    cached = hidden * (rank + turned) + rank
    return int(query + cached + rank * heads * (plain + value) + heads * value * hidden)


def by_transformers(config: dict[str, Any]) -> int:
    """Parameters of the model that transformers builds."""
    name = config["architectures"][0].removesuffix("ForCausalLM")
    with torch.device("meta"):
        made = getattr(transformers, f"{name}Config")(**config)
        model = getattr(transformers, f"{name}ForCausalLM")(made)
    buffers = sum(
        buffer.numel()
        for key, buffer in model.named_buffers()
        if key.endswith("e_score_correction_bias")
    )
    return sum(parameter.numel() for parameter in model.parameters()) + buffers


@pytest.mark.parametrize("name", MODELS)
def test_what_is_allocated_is_what_the_config_says(name: str) -> None:
    config, billions = MODELS[name]
    spec = replace(read_spec(config), max_model_len=64)
    build = replace(make_build(spec, dtype=torch.bfloat16), device="meta")
    report = load_dummy(build_model(spec, build), device="meta")
    count = by_formula(config)
    assert round(count / 1e9, 2) == billions
    assert by_transformers(config) == count
    moe = spec.moe
    wide = sum(moe.layers) * moe.num_experts if moe and moe.correction else 0  # kept in f32
    assert report.param_bytes == 2 * count + 2 * wide


@pytest.mark.parametrize("name", MODELS)
def test_a_token_takes_as_much_of_the_cache_as_the_config_says(name: str) -> None:
    config, _ = MODELS[name]
    spec = replace(read_spec(config), max_model_len=64)
    build = make_build(spec, dtype=torch.bfloat16)
    if "kv_lora_rank" in config:
        numbers = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        numbers = 2 * config["num_key_value_heads"] * size
    layout = build.attention.layout(build.need, 3)
    assert layout.layer_bytes == 3 * build.need.block_size * numbers * 2
