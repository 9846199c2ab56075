"""GLM-4, dense: half of a head turns, neighbours as pairs; from 0414 on norms stand around blocks.

Next file: `registry.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from octavo.models.llama import BLOCK_NAMES, base_spec, name_of
from octavo.models.reader import Reader, read_rope
from octavo.models.spec import ModelSpec, RopeSpec

# What a file without these keys means.
DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "rms_norm_eps": 1.5625e-7,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
    }
)
FIRST_NAMES: Mapping[str, str] = MappingProxyType(
    {**BLOCK_NAMES, "mlp.gate_up": "mlp.gate_up_proj"}
)
NAMES: Mapping[str, str] = MappingProxyType(
    {
        **FIRST_NAMES,
        "attention_after": "post_self_attn_layernorm",
        "mlp_after": "post_mlp_layernorm",
    }
)


def glm4_spec(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a Glm4ForCausalLM config. Raises ConfigError."""
    return replace(_spec(config, "Glm4ForCausalLM"), norms="around")


def glm_spec(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a GlmForCausalLM config, the first GLM-4. Raises ConfigError."""
    return _spec(config, "GlmForCausalLM")


def _spec(config: Mapping[str, object], architecture: str) -> ModelSpec:
    reader = Reader({**DEFAULTS, **config})
    bias = reader.boolean("attention_bias", True)
    spec = base_spec(reader, architecture, head_dim=128, qkv_bias=bias, rope_of=_rope)
    return replace(spec, fused_gate_up=True)


def first_names(dotted: str, part: str) -> str:
    """Ours -> those of the first GLM-4; see `llama.names`."""
    return name_of(dotted, part, FIRST_NAMES)


def names(dotted: str, part: str) -> str:
    """Ours -> theirs; see `llama.names`."""
    return name_of(dotted, part, NAMES)


def _rope(reader: Reader, head_dim: int, max_len: int) -> RopeSpec:
    return replace(read_rope(reader, head_dim, max_len, partial=0.5), neighbours=True)
