"""A family as `docs/howto/model.md` adds one: Helium, Llama whose rotary pairs are neighbours.

Nothing here but what such a file in `octavo/models` has; `test_new_family.py` puts it to use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from octavo.models.llama import base_spec
from octavo.models.reader import Reader, read_rope
from octavo.models.spec import ModelSpec, RopeSpec

# What a file without these keys means.
DEFAULTS: Mapping[str, object] = {"rms_norm_eps": 1e-8, "rope_theta": 100000.0}


def toy_spec(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a HeliumForCausalLM config. Raises ConfigError."""
    reader = Reader({**DEFAULTS, **config})
    return base_spec(
        reader,
        "HeliumForCausalLM",
        head_dim=128,
        qkv_bias=reader.boolean("attention_bias", False),
        mlp_bias=reader.boolean("mlp_bias", False),
        rope_of=_rope,
    )


def _rope(reader: Reader, head_dim: int, max_len: int) -> RopeSpec:
    return replace(read_rope(reader, head_dim, max_len), neighbours=True)
