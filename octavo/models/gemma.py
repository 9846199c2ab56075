"""Gemma 2 and the text side of Gemma 3: norms around attention and MLP, windows in most layers.

Both scale embeddings and store norms as their distance from one. Gemma 2 bends scores and logits
by tanh; Gemma 3 has norms on heads and another rotary base in layers with a window. Images are not
read: of the checkpoints that have a vision side, the text side is served.
Next file: `glm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from octavo.models.llama import BLOCK_NAMES, base_spec, name_of
from octavo.models.qwen import LAYER_TYPES
from octavo.models.reader import Reader, read_rope, rope_of
from octavo.models.spec import ModelSpec, RopeSpec

# What a file without these keys means; the files of Gemma 3 leave most of them out.
GEMMA2: Mapping[str, object] = MappingProxyType(
    {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
)
GEMMA3: Mapping[str, object] = MappingProxyType(
    {
        **GEMMA2,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
)
NAMES: Mapping[str, str] = MappingProxyType(
    {
        **BLOCK_NAMES,
        "attention_after": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_after": "post_feedforward_layernorm",
    }
)
FULL, SLIDING = LAYER_TYPES


def gemma2_spec(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a Gemma2ForCausalLM config. Raises ConfigError."""
    reader = Reader({**GEMMA2, **config})
    spec = _spec(reader, "Gemma2ForCausalLM", read_window(reader, period=2))
    return replace(spec, attention_soft_cap=_cap(reader, "attn_logit_softcapping"))


def gemma3_spec(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a Gemma3ForCausalLM config. Raises ConfigError."""
    reader = Reader({**GEMMA3, **config})
    reader.require("attn_logit_softcapping", None)
    window, layers = read_window(reader, period=reader.integer("sliding_window_pattern", 6))
    spec = _spec(reader, "Gemma3ForCausalLM", (window, layers), qk_norm=True)
    local = _local_rope(reader, spec.head_dim, spec.max_model_len)
    # Layers keep their rotary base also where the window reaches everything.
    return replace(spec, window_layers=layers, local_rope=local)


def gemma3_text_spec(config: Mapping[str, object]) -> ModelSpec:
    """The text side of a Gemma3ForConditionalGeneration config. Raises ConfigError."""
    reader = Reader(config)
    if reader.child("text_config") is None:
        raise reader.error("text_config", "must be there: it describes the text side")
    text = config["text_config"]
    assert isinstance(text, dict)
    # These stand outside in such files, where they stand at all.
    keys = ("eos_token_id", "dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
    outer = {key: config[key] for key in keys if config.get(key) is not None}
    spec = gemma3_spec({**text, **outer})
    return replace(spec, architecture="Gemma3ForConditionalGeneration")


def names(dotted: str, part: str) -> str:
    """Ours -> theirs; see `llama.names`."""
    return name_of(dotted, part, NAMES)


def text_names(dotted: str, part: str) -> str:
    """The same in checkpoints that have a vision side."""
    return name_of(dotted, part, NAMES, "language_model.")


def read_window(reader: Reader, *, period: int) -> tuple[int, tuple[bool, ...]]:
    """(window, which layers have it): all but each `period`-th, unless `layer_types` says."""
    count = reader.integer("num_hidden_layers")
    types = reader.texts("layer_types")
    if types is None:
        layers = tuple((index + 1) % period != 0 for index in range(count))
    elif len(types) != count or not set(types) <= set(LAYER_TYPES):
        raise reader.error("layer_types", f"must be {count} of {' or '.join(LAYER_TYPES)}")
    else:
        layers = tuple(one == SLIDING for one in types)
    windowed = any(layers) and reader.has("sliding_window")
    return (reader.integer("sliding_window") if windowed else 0), layers


def _spec(
    reader: Reader,
    architecture: str,
    windows: tuple[int, tuple[bool, ...]],
    *,
    qk_norm: bool = False,
) -> ModelSpec:
    """What the two generations have in common."""
    reader.require("hidden_activation", "gelu_pytorch_tanh")
    reader.require("use_bidirectional_attention", False)
    bias = reader.boolean("attention_bias", False)
    spec = base_spec(
        reader,
        architecture,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=qk_norm,
        window=windows[0],
        window_layers=windows[1],
        activation="gelu_tanh",
        rope_of=_global_rope if qk_norm else read_rope,
    )
    return replace(
        spec,
        norms="around",
        norm_offset=1.0,
        attention_scale=reader.number("query_pre_attn_scalar") ** -0.5,
        logit_soft_cap=_cap(reader, "final_logit_softcapping"),
        embedding_scale=spec.hidden_size**0.5,
    )


def _cap(reader: Reader, key: str) -> float:
    return reader.number(key) if reader.has(key) else 0.0


def _global_rope(reader: Reader, head_dim: int, max_len: int) -> RopeSpec:
    """Of layers without a window: newer files have a section for each kind of layer."""
    section = reader.child("rope_scaling") or _section(reader, FULL)
    theta = section.number("rope_theta", reader.number("rope_theta", 1_000_000.0))
    section.require("partial_rotary_factor", 1.0)
    return rope_of(reader, section, head_dim, max_len=max_len, theta=theta)


def _local_rope(reader: Reader, head_dim: int, max_len: int) -> RopeSpec:
    """Of layers with a window."""
    section = _section(reader, SLIDING)
    theta = section.number("rope_theta", reader.number("rope_local_base_freq", 10_000.0))
    section.require("partial_rotary_factor", 1.0)
    return rope_of(reader, section, head_dim, max_len=max_len, theta=theta)


def _section(reader: Reader, kind: str) -> Reader:
    both = reader.child("rope_parameters") or Reader({})
    if both.has("rope_type") or both.has("rope_theta"):
        raise reader.error(
            "rope_parameters", f"must have a section for {' and '.join(LAYER_TYPES)}"
        )
    return both.child(kind) or Reader({}, f"rope_parameters.{kind}")
