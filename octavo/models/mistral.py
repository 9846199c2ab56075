"""Mistral: Llama with a sliding window in all layers, in the versions that have one.

Names are Llama's.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.models.llama import base_spec
from octavo.models.reader import Reader
from octavo.models.spec import ModelSpec


def spec_of(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a MistralForCausalLM config. Raises ConfigError."""
    reader = Reader(config)
    # Null is no window; a file without the key is of the first version, which had one.
    absent = "sliding_window" not in config
    windowed = absent or reader.has("sliding_window")
    window = reader.integer("sliding_window", 4096) if windowed else 0
    if reader.texts("layer_types") is not None:
        raise reader.error("layer_types", "is not supported for this family; remove it")
    return base_spec(reader, "MistralForCausalLM", window=window)
