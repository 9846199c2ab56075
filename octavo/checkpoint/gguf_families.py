"""How each GGUF architecture says what a Hugging Face config and checkpoint say.

An entry of ARCHITECTURES has names of tensors, what converters change in them, and a function that
adds to the config what only this family has. To add one, write an entry, and a case in
`tests/checkpoint/test_gguf_families.py`. Next file: `gguf_model.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from octavo.checkpoint.gguf_file import GgufFile
from octavo.checkpoint.gguf_metadata import Metadata
from octavo.errors import CheckpointError

ROPE_FREQS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
NOTHING: Mapping[str, str] = MappingProxyType({})


class Turned(NamedTuple):
    """Size of a head, and of its part with rotary positions."""

    head_dim: int
    size: int


More: TypeAlias = Callable[[Metadata, dict[str, Any], Turned], dict[str, Any]]

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one GGUF architecture is called by Hugging Face, and what is peculiar to it."""

    model_type: str
    class_name: str
    names: Mapping[str, str] = field(
        default_factory=lambda: NAMES
    )  # inside a block, without ".weight"
    # The same with it, where it changes too; tensors of all experts, "{}" is the number; and
    # matrices of one row.
    whole_names: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    experts: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    rows: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    more: More | None = None  # adds to the config
    interleaved: bool = False  # rows of q and k are rotary pairs
    partial: bool = False  # a part of a head may turn
    latent: bool = False  # heads have no one size
    windows: bool = False
    norms_plus_one: bool = False
    in_config: frozenset[str] = frozenset({ROPE_FREQS})  # tensors that tell of the config


def architecture_of(file: GgufFile) -> Architecture:
    """By the metadata. Raises CheckpointError if it is not known, with those that are."""
    name = file.metadata.get("general.architecture")
    if name == "llama" and (file.metadata.get("llama.expert_count") or 0):
        return MIXTRAL
    if not isinstance(name, str) or name not in ARCHITECTURES:
        near = difflib.get_close_matches(str(name), ARCHITECTURES, n=1, cutoff=0.0)
        raise CheckpointError(
            f"{file.path}: architecture {name!r} is not supported; known for GGUF files: "
            f"{', '.join(ARCHITECTURES)}; the nearest is {near[0]}"
        )
    return ARCHITECTURES[name]


def _gemma2(data: Metadata, config: dict[str, Any], turned: Turned) -> dict[str, Any]:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    found = {key: data.get(key) for key in caps if data.get(key) is not None}
    return {**found, **_gemma(config, turned, largest=46)}


def _gemma3(data: Metadata, config: dict[str, Any], turned: Turned) -> dict[str, Any]:
    cap = data.get("final_logit_softcapping")
    local = data.number("rope.freq_base_swa", 10000.0)
    more = {"rope_local_base_freq": local, "final_logit_softcapping": cap}
    return {**more, **_gemma(config, turned, largest=62)}


def _gemma(config: dict[str, Any], turned: Turned, *, largest: int) -> dict[str, Any]:
    """The scale of scores is not stored; the models of the most layers have another."""
    even = int(config["hidden_size"]) // int(config["num_attention_heads"])
    scalar = even if config["num_hidden_layers"] == largest else turned.head_dim
    return {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar}


def _phi3(data: Metadata, config: dict[str, Any], turned: Turned) -> dict[str, Any]:
    original = data.integer("rope.scaling.original_context_length", 4096)
    more: dict[str, Any] = {"original_max_position_embeddings": original, "attention_bias": False}
    if LONG not in data.file.tensors and SHORT not in data.file.tensors:
        return more
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": list(data.vector(LONG, turned.size // 2)),
        "short_factor": list(data.vector(SHORT, turned.size // 2)),
    }
    gain = data.get("rope.scaling.attn_factor")
    if gain is not None:
        scaling["attention_factor"] = data.number("rope.scaling.attn_factor", 1.0)
    return {**more, "rope_scaling": scaling}


def _experts(data: Metadata) -> dict[str, Any]:
    count = data.integer("expert_count")
    return {
        "num_experts": count,
        "num_local_experts": count,
        "num_experts_per_tok": data.integer("expert_used_count"),
    }


def _mixtral(data: Metadata, config: dict[str, Any], turned: Turned) -> dict[str, Any]:
    return _experts(data)


def _qwen2_moe(data: Metadata, config: dict[str, Any], turned: Turned) -> dict[str, Any]:
    return {
        **_experts(data),
        "moe_intermediate_size": data.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": data.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    }


def _qwen3_moe(data: Metadata, config: dict[str, Any], turned: Turned) -> dict[str, Any]:
    return {
        **_experts(data),
        "moe_intermediate_size": data.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _deepseek2(data: Metadata, config: dict[str, Any], turned: Turned) -> dict[str, Any]:
    """Versions 2 and 3, told apart by how experts are scored."""
    path, layer = data.file.path, int(data.get("leading_dense_block_count") or 0)
    if f"blk.{layer}.attn_k_b.weight" in data.file.tensors:
        raise CheckpointError(
            f"{path}: keys' and values' projections are stored apart (attn_k_b, attn_v_b), which "
            "is not supported; use a file with attn_kv_b, or the model's own folder"
        )
    sigmoid = data.get("expert_gating_func") == 2
    more: dict[str, Any] = {
        "architectures": [f"DeepseekV{3 if sigmoid else 2}ForCausalLM"],
        "attention_bias": False,
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": data.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned.size,
        "qk_nope_head_dim": turned.head_dim - turned.size,
        "v_head_dim": data.integer("attention.value_length"),
        "first_k_dense_replace": layer,
        "n_routed_experts": data.integer("expert_count"),
        "n_shared_experts": data.get("expert_shared_count") or 0,
        "num_experts_per_tok": data.integer("expert_used_count"),
        "moe_intermediate_size": data.integer("expert_feed_forward_length"),
        "routed_scaling_factor": data.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(data.get("expert_weights_norm")),
    }
    if data.get("attention.q_lora_rank"):
        more["q_lora_rank"] = data.integer("attention.q_lora_rank")
    more |= _groups(data, sigmoid=sigmoid, large="q_lora_rank" in more)
    scaling = config["rope_scaling"]
    if scaling is not None and scaling["rope_type"] == "yarn":
        weight = data.number("rope.scaling.yarn_log_multiplier", 0.1) * 10  # the two are alike
        more["rope_scaling"] = {**scaling, "mscale": weight, "mscale_all_dim": weight}
    return more


def _groups(data: Metadata, *, sigmoid: bool, large: bool) -> dict[str, Any]:
    """Groups that experts are chosen by; older files of large models leave them out."""
    if data.get("expert_group_count"):
        groups = {
            "n_group": data.integer("expert_group_count"),
            "topk_group": data.integer("expert_group_used_count"),
        }
        return {**groups, "topk_method": "noaux_tc" if sigmoid else "group_limited_greedy"}
    if large:
        raise CheckpointError(
            f"{data.file.path}: the metadata key {data.prefix}.expert_group_count is missing, "
            "without which the wrong experts would be chosen; use a file by a newer converter"
        )
    more: dict[str, Any] = {"topk_method": "noaux_tc" if sigmoid else "greedy"}
    return {**more, "n_group": 1, "topk_group": 1} if sigmoid else more


def _all(inner: str, gate: str, up: str, down: str) -> Mapping[str, str]:
    """Names of tensors that hold all experts."""
    return MappingProxyType(
        {
            "ffn_gate_exps": f"{inner}.{{}}.{gate}",
            "ffn_up_exps": f"{inner}.{{}}.{up}",
            "ffn_down_exps": f"{inner}.{{}}.{down}",
        }
    )


def _named(**more: str) -> Mapping[str, str]:
    return MappingProxyType({**NAMES, **more})


EXPERTS = _all("mlp.experts", "gate_proj", "up_proj", "down_proj")
GEMMA = Architecture(
    "gemma2",
    "Gemma2ForCausalLM",
    _named(
        post_attention_norm="post_attention_layernorm",
        ffn_norm="pre_feedforward_layernorm",
        post_ffw_norm="post_feedforward_layernorm",
    ),
    more=_gemma2,
    windows=True,
    norms_plus_one=True,
)
MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    _named(ffn_gate_inp="block_sparse_moe.gate"),
    experts=_all("block_sparse_moe.experts", "w1", "w3", "w2"),
    more=_mixtral,
    interleaved=True,
    windows=True,
)
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture("llama", "LlamaForCausalLM", interleaved=True),
        "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
        "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
        "qwen2moe": Architecture(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            _named(
                ffn_gate_inp="mlp.gate",
                ffn_gate_shexp="mlp.shared_expert.gate_proj",
                ffn_up_shexp="mlp.shared_expert.up_proj",
                ffn_down_shexp="mlp.shared_expert.down_proj",
            ),
            experts=EXPERTS,
            rows=MappingProxyType({"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}),
            more=_qwen2_moe,
        ),
        "qwen3moe": Architecture(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            _named(ffn_gate_inp="mlp.gate"),
            experts=EXPERTS,
            more=_qwen3_moe,
        ),
        "gemma2": GEMMA,
        "gemma3": replace(
            GEMMA, model_type="gemma3_text", class_name="Gemma3ForCausalLM", more=_gemma3
        ),
        "phi3": Architecture(
            "phi3",
            "Phi3ForCausalLM",
            _named(attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj"),
            more=_phi3,
            partial=True,
            windows=True,
            in_config=frozenset({LONG, SHORT}),
        ),
        "glm4": Architecture(
            "glm4",
            "Glm4ForCausalLM",
            _named(
                post_attention_norm="post_self_attn_layernorm",
                ffn_up="mlp.gate_up_proj",
                post_ffw_norm="post_mlp_layernorm",
            ),
            partial=True,
        ),
        "deepseek2": Architecture(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            _named(
                attn_q_a="self_attn.q_a_proj",
                attn_q_a_norm="self_attn.q_a_layernorm",
                attn_q_b="self_attn.q_b_proj",
                attn_kv_a_mqa="self_attn.kv_a_proj_with_mqa",
                attn_kv_a_norm="self_attn.kv_a_layernorm",
                attn_kv_b="self_attn.kv_b_proj",
                ffn_gate_inp="mlp.gate",
                ffn_gate_shexp="mlp.shared_experts.gate_proj",
                ffn_up_shexp="mlp.shared_experts.up_proj",
                ffn_down_shexp="mlp.shared_experts.down_proj",
            ),
            whole_names=MappingProxyType({"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}),
            experts=EXPERTS,
            more=_deepseek2,
            latent=True,
        ),
    }
)
