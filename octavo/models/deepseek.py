"""DeepSeek-V2 (and Lite, V2.5) and V3: latent attention, and experts after a few dense layers.

V2 scores experts by softmax, V3 by sigmoid with a bias for the choice. V3's checkpoints carry
layers that draft further tokens, after the model's own; they are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from octavo.models import llama
from octavo.models.moe import QWEN_NAMES, block_name, read_top_k
from octavo.models.reader import Reader, read_dtype, read_quantization, read_rope
from octavo.models.spec import LatentSpec, ModelSpec, MoeSpec, yarn_gain

# As in `moe.py`; attention's first projection is two tensors of the checkpoint.
NAMES: Mapping[str, str] = MappingProxyType(
    {
        **QWEN_NAMES,
        "mlp.router.correction": "mlp.gate.e_score_correction_bias",
        "mlp.shared.gate_up.weight": "mlp.shared_experts.{}_proj.weight",
        "mlp.shared.down.weight": "mlp.shared_experts.down_proj.weight",
        "attention.query_norm.weight": "self_attn.q_a_layernorm.weight",
        "attention.query.weight": "self_attn.q_b_proj.weight",
        "attention.latent_norm.weight": "self_attn.kv_a_layernorm.weight",
        "attention.absorbed.weight": "self_attn.kv_b_proj.weight",
    }
)
INPUT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "query": "self_attn.q_proj.weight",
        "query_low": "self_attn.q_a_proj.weight",
        "latent": "self_attn.kv_a_proj_with_mqa.weight",
    }
)


def v2_spec(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a DeepseekV2ForCausalLM config. Raises ConfigError."""
    reader = Reader(config)
    reader.require("scoring_func", "softmax")
    reader.require("norm_topk_prob", False)  # its own code and others' disagree on the scale then
    reader.require("mlp_bias", False)
    reader.require("topk_method", "greedy", "group_limited_greedy")
    grouped = reader.text("topk_method", "greedy") == "group_limited_greedy"
    moe = read_experts(reader, grouped=grouped, scoring="softmax")
    return base_spec(reader, "DeepseekV2ForCausalLM", moe)


def v3_spec(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a DeepseekV3ForCausalLM config. Raises ConfigError."""
    reader = Reader(config)
    reader.require("scoring_func", "sigmoid")
    reader.require("topk_method", "noaux_tc")
    moe = read_experts(reader, grouped=True, scoring="sigmoid")
    return base_spec(
        reader,
        "DeepseekV3ForCausalLM",
        moe,
        interleaved=reader.boolean("rope_interleave", True),
        extra_layers=reader.integer("num_nextn_predict_layers", 0, least=0),
    )


def base_spec(
    reader: Reader,
    architecture: str,
    moe: MoeSpec,
    *,
    interleaved: bool = True,
    extra_layers: int = 0,
) -> ModelSpec:
    """What both versions read alike."""
    reader.require("hidden_act", "silu", "swish")
    reader.require("attention_bias", False)
    heads = reader.integer("num_attention_heads")
    if reader.integer("num_key_value_heads", heads) != heads:
        raise reader.error("num_key_value_heads", f"must be num_attention_heads, {heads}")
    latent = read_latent(reader, interleaved)
    positions = reader.integer("max_position_embeddings")
    rope = read_rope(reader, latent.rope_dim, positions)
    return ModelSpec(
        architecture=architecture,
        num_layers=reader.integer("num_hidden_layers"),
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=1,
        head_dim=latent.plain_dim + latent.rope_dim,
        vocab_size=reader.integer("vocab_size"),
        max_model_len=llama.max_length(rope, positions),
        rms_eps=reader.number("rms_norm_eps", 1e-6),
        rope=rope,
        tied=reader.boolean("tie_word_embeddings", False),
        moe=moe,
        latent=latent,
        extra_layers=extra_layers,
        dtype=read_dtype(reader),
        eos_ids=reader.ids("eos_token_id"),
        quantization=read_quantization(reader),
    )


def read_latent(reader: Reader, interleaved: bool) -> LatentSpec:
    """Sizes of the attention. Under yarn its scores grow by the square of a gain of their own."""
    plain = reader.integer("qk_nope_head_dim")
    rotated = reader.integer("qk_rope_head_dim")
    if rotated % 2:
        raise reader.error("qk_rope_head_dim", "must be even")
    scale = (plain + rotated) ** -0.5
    scaling = reader.child("rope_scaling") or reader.child("rope_parameters")
    if scaling is not None and scaling.has("mscale_all_dim"):
        kind = scaling.text("rope_type", scaling.text("type", "default"))
        weight = scaling.number("mscale_all_dim", above=-1e-9)
        if kind != "default" and weight:
            scale *= yarn_gain(scaling.number("factor"), weight) ** 2
    return LatentSpec(
        rank=reader.integer("kv_lora_rank"),
        plain_dim=plain,
        rope_dim=rotated,
        value_dim=reader.integer("v_head_dim"),
        query_rank=reader.integer("q_lora_rank") if reader.has("q_lora_rank") else 0,
        scale=scale,
        interleaved=interleaved,
    )


def read_experts(
    reader: Reader, *, grouped: bool, scoring: Literal["softmax", "sigmoid"]
) -> MoeSpec:
    """The experts of all layers but the first few."""
    reader.require("moe_layer_freq", 1)
    count = reader.integer("n_routed_experts")
    top_k = read_top_k(reader, count)
    layers = reader.integer("num_hidden_layers")
    dense = reader.integer("first_k_dense_replace", 0, least=0)
    width = reader.integer("moe_intermediate_size")
    shared = reader.integer("n_shared_experts", 0, least=0)
    sigmoid = scoring == "sigmoid"
    groups, top_groups = _groups(reader, count, top_k, corrected=sigmoid) if grouped else (1, 1)
    return MoeSpec(
        num_experts=count,
        top_k=top_k,
        intermediate_size=width,
        layers=tuple(layer >= dense for layer in range(layers)),
        scoring=scoring,
        renormalise=sigmoid and reader.boolean("norm_topk_prob", True),
        scale=reader.number("routed_scaling_factor", 2.5 if sigmoid else 1.0),
        groups=groups,
        top_groups=top_groups,
        correction=sigmoid,
        shared_size=shared * width,
    )


def _groups(reader: Reader, count: int, top_k: int, *, corrected: bool) -> tuple[int, int]:
    """(groups, how many of them a token's experts come from)."""
    groups = reader.integer("n_group")
    if count % groups:
        raise reader.error("n_group", f"must divide the number of experts, {count}")
    if corrected and count // groups < 2:
        raise reader.error("n_group", f"leaves groups of one of {count} experts; two are scored")
    chosen = reader.integer("topk_group")
    if chosen > groups or chosen * (count // groups) < top_k:
        raise reader.error("topk_group", f"of {groups} groups must hold {top_k} experts or more")
    return groups, chosen


def names(dotted: str, part: str) -> str:
    """Ours -> theirs; see `llama.names`."""
    if dotted.endswith(".attention.input.weight"):
        return f"model.layers.{dotted.split('.')[1]}.{INPUT_NAMES[part]}"
    return block_name(dotted, part, NAMES) or llama.names(dotted, part)
