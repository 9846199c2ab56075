"""GGUF files of each family: the same logits as the model whose tensors a converter put there.

Names are the gguf package's own; what converters change in tensors is done here by hand.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from octavo.checkpoint.checkpoint import open_checkpoint
from octavo.checkpoint.gguf_families import ARCHITECTURES
from octavo.errors import CheckpointError
from octavo.models.load import build_model, load_weights
from octavo.models.registry import read_spec
from tests.checkpoint.toys import expect_error, interleave
from tests.models.driver import Driver, Row, make_build
from tests.models.twins import YARN, Twin, make_twin

SWITCHES: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 9.0},
    "gemma3": {"final_logit_softcapping": 15.0, "rope.freq_base_swa": 100.0},
}
# The two gains of published models are alike, and files hold one.
EVEN_GAINS = {"rope_parameters": {**YARN["rope_parameters"], "mscale": 0.6}}
# twin -> (architecture, sizes that GGUF files of it always have)
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-odd-heads": ("llama", {}),
    "mixtral": ("llama", {}),
    "mixtral-window": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen2-moe": ("qwen2moe", {"mlp_only_layers": []}),
    "qwen3-moe": ("qwen3moe", {"decoder_sparse_step": 1}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "gemma3": (
        "gemma3",
        {
            "query_pre_attn_scalar": 48,
            "tie_word_embeddings": True,
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-long": ("phi3", {}),
    "phi3-short-partial": ("phi3", {}),
    "glm4": ("glm4", {}),
    "deepseek-v2-lite": ("deepseek2", {}),
    "deepseek-v2": ("deepseek2", EVEN_GAINS),
    "deepseek-v3": ("deepseek2", EVEN_GAINS),
}
RENAMED = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def keys_of(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """Metadata as converters write it, without those of tokens."""
    heads = config["num_attention_heads"]
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        **rope_keys(config),
    }
    size = config.get("head_dim") or config["hidden_size"] // heads
    if "kv_lora_rank" in config:
        size = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        keys |= latent_keys(config)
    keys |= {"attention.key_length": size}
    keys.setdefault("attention.value_length", size)
    if architecture in ("glm4", "phi3"):
        share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
        keys["rope.dimension_count"] = int(size * share)
    if config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
    return keys | expert_keys(config)


def rope_keys(config: dict[str, Any]) -> dict[str, Any]:
    section = config["rope_parameters"]
    section = section.get("full_attention", section)
    kind = section["rope_type"]
    keys = {"rope.freq_base": section["rope_theta"]}
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": section["factor"]}
    if kind == "yarn":
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * section["mscale_all_dim"]
    if kind in ("yarn", "longrope"):
        original = section["original_max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = original
    if kind == "longrope" and section.get("attention_factor"):
        keys["rope.scaling.attn_factor"] = section["attention_factor"]
    return keys


def latent_keys(config: dict[str, Any]) -> dict[str, Any]:
    keys = {
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.value_length": config["v_head_dim"],
        "rope.dimension_count": config["qk_rope_head_dim"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1,
    }
    if config.get("q_lora_rank"):
        keys["attention.q_lora_rank"] = config["q_lora_rank"]
    if config.get("topk_method") != "greedy":
        keys |= {
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
        }
    return keys


def expert_keys(config: dict[str, Any]) -> dict[str, Any]:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    counts = [config[name] for name in names if config.get(name)]
    if not counts:
        return {}
    keys = {"expert_count": counts[0], "expert_used_count": config["num_experts_per_tok"]}
    for ours, theirs in (
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ):
        if theirs in config:
            keys[ours] = config[theirs]
    return keys


def stored(architecture: str, twin: Twin) -> dict[str, Tensor]:
    """Tensors under GGUF names, changed as converters change them."""
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    layers = twin.config["num_hidden_layers"]
    table = gguf.get_tensor_name_map(numbers[architecture], layers)
    together: dict[str, list[Tensor]] = {}
    out: dict[str, Tensor] = {}
    for name, tensor in twin.state.items():
        if name == "lm_head.weight" and twin.config["tie_word_embeddings"]:
            continue
        words = [RENAMED.get(word, word) for word in name.split(".")]
        if "experts" in words:  # in the order of their numbers, as the state has them
            del words[words.index("experts") + 1]
        theirs = ".".join(words).replace("e_score_correction_bias", "e_score_correction.bias")
        found = table.get_name(theirs, (".weight", ".bias"))
        assert found, name
        if "experts" in words:
            together.setdefault(found, []).append(tensor)
        else:
            out[found] = changed(architecture, twin.config, name, tensor)
    return out | {name: torch.stack(tensors) for name, tensors in together.items()}


def changed(architecture: str, config: dict[str, Any], name: str, tensor: Tensor) -> Tensor:
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    if name.endswith("shared_expert_gate.weight"):
        return tensor.squeeze(0)
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if architecture == "llama" and part in name:
            return torch.from_numpy(interleave(tensor.numpy(), config[heads]))
    return tensor


def write(path: Path, architecture: str, twin: Twin, **keys: Any) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    values = keys_of(architecture, twin.config) | SWITCHES.get(architecture, {}) | keys
    for key, value in values.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        if value is not None:
            add.get(type(value), writer.add_string)(f"{architecture}.{key}", value)
    tensors = stored(architecture, twin)
    section = twin.config["rope_parameters"]
    for length in ("long", "short"):
        if f"{length}_factor" in section:
            factors = torch.tensor(section[f"{length}_factor"])
            tensors[f"rope_factors_{length}.weight"] = factors
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def twin_of(case: str) -> tuple[str, Twin]:
    architecture, sizes = FILES[case]
    return architecture, make_twin(case, sizes=sizes)


@pytest.mark.parametrize("case", FILES)
def test_the_same_logits(case: str, tmp_path: Path) -> None:
    architecture, twin = twin_of(case)
    opened = open_checkpoint(str(write(tmp_path / "a.gguf", architecture, twin)))
    spec = read_spec(opened.config)
    build = make_build(spec)
    decoder = build_model(spec, build)
    load_weights(decoder, opened)
    driver = Driver(decoder, build, num_blocks=20, seed=twin.seed)
    prompt = twin.prompt(40)
    found, expected = driver.run(Row(list(prompt)), chunk=9), twin.logits(prompt)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_every_architecture_has_a_case() -> None:
    assert {architecture for architecture, _ in FILES.values()} == ARCHITECTURES.keys()


def test_what_would_be_read_wrongly_is_named(tmp_path: Path) -> None:
    architecture, twin = twin_of("deepseek-v2")
    file = write(tmp_path / "a.gguf", architecture, twin, expert_group_count=None)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(file))
    expect_error(caught, "deepseek2.expert_group_count", "newer converter")
    state = {name.replace("kv_b_proj", "k_b_proj"): value for name, value in twin.state.items()}
    file = write(tmp_path / "b.gguf", architecture, replace(twin, state=state))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(file))
    expect_error(caught, "attn_k_b")
    architecture, twin = twin_of("phi3-long")
    twin.config["rope_parameters"].pop("short_factor")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(write(tmp_path / "c.gguf", architecture, twin)))
    expect_error(caught, "rope_factors_short")
