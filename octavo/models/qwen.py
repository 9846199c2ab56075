"""Qwen2 (biases on query, key and value) and Qwen3 (norms on query and key heads, none of those).

Both may give the upper layers a sliding window. Names are Llama's.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.models.llama import base_spec
from octavo.models.reader import Reader
from octavo.models.spec import ModelSpec

LAYER_TYPES = ("full_attention", "sliding_attention")


def qwen2_spec(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a Qwen2ForCausalLM config. Raises ConfigError."""
    reader = Reader(config)
    window, layers = read_window(reader)
    return base_spec(reader, "Qwen2ForCausalLM", qkv_bias=True, window=window, window_layers=layers)


def qwen3_spec(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a Qwen3ForCausalLM config. Raises ConfigError."""
    reader = Reader(config)
    bias = reader.boolean("attention_bias", False)
    window, layers = read_window(reader)
    return base_spec(
        reader,
        "Qwen3ForCausalLM",
        head_dim=128,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        window=window,
        window_layers=layers,
    )


def read_window(reader: Reader) -> tuple[int, tuple[bool, ...]]:
    """(window, which layers have it) from three keys that speak of it, and `layer_types`."""
    if not reader.boolean("use_sliding_window", False):
        _refuse_stray_window(reader)
        return 0, ()
    count = reader.integer("num_hidden_layers")
    types = reader.texts("layer_types")
    if types is None:
        first = reader.integer("max_window_layers", 28, least=0)
        layers = tuple(index >= first for index in range(count))
    else:
        if len(types) != count or not set(types) <= set(LAYER_TYPES):
            raise reader.error("layer_types", f"must be {count} of {' or '.join(LAYER_TYPES)}")
        layers = tuple(one == "sliding_attention" for one in types)
    if not any(layers):
        return 0, ()
    return reader.integer("sliding_window", 4096), layers


def _refuse_stray_window(reader: Reader) -> None:
    if "sliding_attention" in (reader.texts("layer_types") or ()):
        raise reader.error("layer_types", "has sliding layers while use_sliding_window is false")
