"""gpt-oss: experts with biases and a bounded gate, sinks, and a window in every second layer.

Published checkpoints hold experts in MXFP4, which is not read; those in bf16 are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from octavo.models.llama import BLOCK_NAMES, base_spec, name_of
from octavo.models.moe import read_top_k
from octavo.models.qwen import LAYER_TYPES
from octavo.models.reader import Reader
from octavo.models.spec import ModelSpec, MoeSpec

# What a file without these keys means.
DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "sliding_window": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    }
)
EXPERT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attention.sinks.scores": "self_attn.sinks",
        "mlp.router.weight": "mlp.router.weight",
        "mlp.router.bias": "mlp.router.bias",
        "mlp.experts.gate_up": "mlp.experts.gate_up_proj",
        "mlp.experts.gate_up_bias": "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down": "mlp.experts.down_proj",
        "mlp.experts.down_bias": "mlp.experts.down_proj_bias",
    }
)


def gpt_oss_spec(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a GptOssForCausalLM config. Raises ConfigError."""
    reader = Reader({**DEFAULTS, **config})
    bias = reader.boolean("attention_bias", True)
    layers = _windowed(reader)
    base = base_spec(
        reader,
        "GptOssForCausalLM",
        head_dim=64,
        qkv_bias=bias,
        output_bias=bias,
        window=reader.integer("sliding_window") if any(layers) else 0,
        window_layers=layers,
    )
    count = reader.integer("num_local_experts")
    moe = MoeSpec(
        num_experts=count,
        top_k=read_top_k(reader, count),
        intermediate_size=base.intermediate_size,
        layers=(True,) * base.num_layers,
        renormalise=True,  # the softmax of the chosen alone is that of all, made to sum to one
        clamp=reader.number("swiglu_limit"),
        clamp_alpha=reader.number("swiglu_alpha"),
    )
    return replace(base, moe=moe, sinks=True)


def names(dotted: str, part: str) -> str:
    """Ours -> theirs; see `llama.names`."""
    head, _, rest = dotted.partition(".")
    index, _, inner = rest.partition(".")
    if head == "blocks" and inner in EXPERT_NAMES:
        return f"model.layers.{index}.{EXPERT_NAMES[inner]}"
    return name_of(dotted, part, BLOCK_NAMES)


def _windowed(reader: Reader) -> tuple[bool, ...]:
    """Which layers have the window: from the first every second, unless `layer_types` says."""
    count = reader.integer("num_hidden_layers")
    types = reader.texts("layer_types")
    if types is None:
        return tuple(layer % 2 == 0 for layer in range(count))
    if len(types) != count or not set(types) <= set(LAYER_TYPES):
        raise reader.error("layer_types", f"must be {count} of {' or '.join(LAYER_TYPES)}")
    return tuple(one == "sliding_attention" for one in types)
