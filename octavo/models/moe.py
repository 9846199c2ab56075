"""Families whose feed-forward is routed experts: Mixtral, Qwen2-MoE and Qwen3-MoE.

Attention and all other names are Llama's. Experts' tensors lie apart in the checkpoint, one for
each expert and projection. Not for: DeepSeek, whose attention differs too (`deepseek.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from octavo.models import llama
from octavo.models.qwen import read_window
from octavo.models.reader import Reader
from octavo.models.spec import ModelSpec, MoeSpec

# Ours -> theirs, inside one block and with the parameter. "{expert}" is a number, "{}" takes the
# side: gate or up.
MIXTRAL_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "mlp.router.weight": "block_sparse_moe.gate.weight",
        "mlp.experts.gate_up.gate": "block_sparse_moe.experts.{expert}.w1.weight",
        "mlp.experts.gate_up.up": "block_sparse_moe.experts.{expert}.w3.weight",
        "mlp.experts.down": "block_sparse_moe.experts.{expert}.w2.weight",
    }
)
QWEN_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.experts.gate_up.gate": "mlp.experts.{expert}.gate_proj.weight",
        "mlp.experts.gate_up.up": "mlp.experts.{expert}.up_proj.weight",
        "mlp.experts.down": "mlp.experts.{expert}.down_proj.weight",
        "mlp.shared.gate_up.weight": "mlp.shared_expert.{}_proj.weight",
        "mlp.shared.down.weight": "mlp.shared_expert.down_proj.weight",
        "mlp.shared.gate.weight": "mlp.shared_expert_gate.weight",
    }
)
# What a Mixtral file without these keys means.
MIXTRAL: Mapping[str, object] = MappingProxyType({"rms_norm_eps": 1e-5, "rope_theta": 1e6})


def mixtral_spec(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a MixtralForCausalLM config. Raises ConfigError."""
    reader = Reader({**MIXTRAL, **config})
    window = reader.integer("sliding_window") if reader.has("sliding_window") else 0
    base = llama.base_spec(reader, "MixtralForCausalLM", window=window)
    count = reader.integer("num_local_experts")
    moe = MoeSpec(
        num_experts=count,
        top_k=read_top_k(reader, count),
        intermediate_size=base.intermediate_size,
        layers=(True,) * base.num_layers,
        renormalise=True,
    )
    return replace(base, moe=moe)


def qwen2_spec(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a Qwen2MoeForCausalLM config. Raises ConfigError."""
    reader = Reader(config)
    refuse_window(reader)
    base = llama.base_spec(reader, "Qwen2MoeForCausalLM", qkv_bias=reader.boolean("qkv_bias", True))
    moe = read_qwen(reader, base.num_layers)
    shared = reader.integer("shared_expert_intermediate_size")
    return replace(base, moe=replace(moe, shared_size=shared, shared_gate=True))


def qwen3_spec(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a Qwen3MoeForCausalLM config. Raises ConfigError."""
    reader = Reader(config)
    refuse_window(reader)
    bias = reader.boolean("attention_bias", False)
    base = llama.base_spec(
        reader, "Qwen3MoeForCausalLM", qkv_bias=bias, output_bias=bias, qk_norm=True
    )
    return replace(base, moe=read_qwen(reader, base.num_layers))


def refuse_window(reader: Reader) -> None:
    """These families have no published model with a window; one would be read by guess."""
    reader.require("use_sliding_window", False)
    read_window(reader)


def read_qwen(reader: Reader, num_layers: int) -> MoeSpec:
    """Experts as both Qwen families tell of them; every nth layer has them, but for those named."""
    # Newer files of Qwen3-MoE have Mixtral's key.
    count = reader.integer("num_experts" if reader.has("num_experts") else "num_local_experts")
    step = reader.integer("decoder_sparse_step", 1)
    plain = reader.integers("mlp_only_layers")
    return MoeSpec(
        num_experts=count,
        top_k=read_top_k(reader, count),
        intermediate_size=reader.integer("moe_intermediate_size"),
        layers=tuple((layer + 1) % step == 0 and layer not in plain for layer in range(num_layers)),
        renormalise=reader.boolean("norm_topk_prob", False),
    )


def read_top_k(reader: Reader, count: int) -> int:
    """How many of `count` experts a token goes to."""
    top_k = reader.integer("num_experts_per_tok")
    if top_k > count:
        raise reader.error(
            "num_experts_per_tok", f"must not be above the number of experts, {count}"
        )
    return top_k


def mixtral_names(dotted: str, part: str) -> str:
    """Ours -> Mixtral's; see `llama.names`."""
    return block_name(dotted, part, MIXTRAL_NAMES) or llama.names(dotted, part)


def qwen_names(dotted: str, part: str) -> str:
    """Ours -> Qwen's; see `llama.names`."""
    return block_name(dotted, part, QWEN_NAMES) or llama.names(dotted, part)


def block_name(dotted: str, part: str, table: Mapping[str, str]) -> str:
    """Ours, inside a block -> theirs by `table`; "" if it says nothing.

    The part of an experts' parameter is the expert's number, and "3.gate" where there are sides.
    """
    head, _, rest = dotted.partition(".")
    index, _, inner = rest.partition(".")
    expert, _, side = part.partition(".")
    found = table.get(f"{inner}.{side}" if side else inner) if head == "blocks" else None
    return f"model.layers.{index}.{found.format(part, expert=expert)}" if found else ""
