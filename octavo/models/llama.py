"""Llama: versions 1 to 3, and all that ship as LlamaForCausalLM (TinyLlama, SmolLM2, ...).

Two functions make a family: `spec_of` reads the config, `names` says what a parameter is called
in the checkpoint. Qwen and Mistral share most of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from octavo.errors import ConfigError
from octavo.models.reader import Reader, read_dtype, read_quantization, read_rope
from octavo.models.spec import Activation, ModelSpec, RopeSpec

# Ours -> theirs, inside one block and without the parameter.
# "{}" takes the part: q_proj, gate_proj.
BLOCK_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attention_norm": "input_layernorm",
        "attention.qkv": "self_attn.{}_proj",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "attention.output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate_up": "mlp.{}_proj",
        "mlp.down": "mlp.down_proj",
    }
)
OUTER_NAMES: Mapping[str, str] = MappingProxyType(
    {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
)


def spec_of(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a LlamaForCausalLM config. Raises ConfigError."""
    reader = Reader(config)
    bias = reader.boolean("attention_bias", False)
    return base_spec(
        reader,
        "LlamaForCausalLM",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=reader.boolean("mlp_bias", False),
    )


def base_spec(
    reader: Reader,
    architecture: str,
    *,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    window: int = 0,
    window_layers: tuple[bool, ...] = (),
    activation: Activation = "silu",
    rope_of: Callable[[Reader, int, int], RopeSpec] = read_rope,
) -> ModelSpec:
    """What all families here read alike. `head_dim` is the default where the config has none.

    A family with another `activation` checks its key itself. `rope_of` gets the config, the head
    size and max_position_embeddings. What else a family has it adds by `dataclasses.replace`.
    """
    if activation == "silu":
        reader.require("hidden_act", "silu", "swish")
    hidden = reader.integer("hidden_size")
    heads = reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.error("num_key_value_heads", f"must divide num_attention_heads, {heads}")
    if head_dim is None and not reader.has("head_dim") and hidden % heads:
        raise reader.error("num_attention_heads", f"must divide hidden_size, {hidden}")
    head_dim = reader.integer("head_dim", head_dim or hidden // heads)
    if head_dim % 2:
        raise reader.error("head_dim", "must be even")
    positions = reader.integer("max_position_embeddings")
    rope = rope_of(reader, head_dim, positions)
    length = max_length(rope, positions)
    if window >= length:  # reaches every position there is
        window = 0
    return ModelSpec(
        architecture=architecture,
        num_layers=reader.integer("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=reader.integer("vocab_size"),
        max_model_len=length,
        rms_eps=reader.number("rms_norm_eps", 1e-6),
        rope=rope,
        tied=reader.boolean("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        window=window,
        window_layers=window_layers if window else (),
        activation=activation,
        dtype=read_dtype(reader),
        eos_ids=reader.ids("eos_token_id"),
        quantization=read_quantization(reader),
    )


def max_length(rope: RopeSpec, positions: int) -> int:
    """The longest context: yarn's files may name the trained length and leave the rest to us."""
    if rope.kind != "yarn":
        return positions
    return max(positions, int(rope.factor * rope.original_max_len))


def names(dotted: str, part: str) -> str:
    """Ours ("blocks.3.attention.qkv.weight", part "q") -> theirs.

    Raises ConfigError for a layer that these families do not have.
    """
    return name_of(dotted, part, BLOCK_NAMES)


def name_of(dotted: str, part: str, block: Mapping[str, str], prefix: str = "") -> str:
    """As `names`, for a family whose blocks have the names of `block`, all after `prefix`."""
    layer, _, parameter = dotted.rpartition(".")
    if layer in OUTER_NAMES:
        return f"{prefix}{OUTER_NAMES[layer]}.{parameter}"
    head, _, rest = layer.partition(".")
    index, _, inner = rest.partition(".")
    if head != "blocks" or inner not in block:
        raise ConfigError(f"no checkpoint name is known for the layer {layer!r}")
    return f"{prefix}model.layers.{index}.{block[inner].format(part)}.{parameter}"
