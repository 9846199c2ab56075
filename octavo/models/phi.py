"""Phi-3, 3.5, 4 and 4-mini: Llama with query, key and value in one tensor, gate and up in another.

The versions for long contexts have longrope, the smallest of the fourth turns three quarters of a
head. Next file: `gemma.py`.
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
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32000,
        "original_max_position_embeddings": 4096,
    }
)
NAMES: Mapping[str, str] = MappingProxyType(
    {
        **BLOCK_NAMES,
        "attention.qkv": "self_attn.qkv_proj",
        "mlp.gate_up": "mlp.gate_up_proj",
    }
)


def phi3_spec(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a Phi3ForCausalLM config. Raises ConfigError."""
    reader = Reader({**DEFAULTS, **config})
    reader.require("attention_bias", False)
    window = reader.integer("sliding_window") if reader.has("sliding_window") else 0
    spec = base_spec(reader, "Phi3ForCausalLM", window=window, rope_of=_rope)
    return replace(spec, fused_qkv=True, fused_gate_up=True)


def names(dotted: str, part: str) -> str:
    """Ours -> theirs; see `llama.names`."""
    return name_of(dotted, part, NAMES)


def _rope(reader: Reader, head_dim: int, max_len: int) -> RopeSpec:
    spec = read_rope(reader, head_dim, max_len, partial=1.0)
    if spec.kind not in ("default", "longrope"):
        section = "rope_scaling" if reader.has("rope_scaling") else "rope_parameters"
        raise reader.error(section, f"is {spec.kind}; this family has default and longrope")
    return spec
