"""Configs: what is read, in old and new spelling, and what is refused by name."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.models.registry import FAMILIES, family_of, read_spec
from octavo.models.spec import ModelSpec, RopeSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 256,
}
TWO = {**LLAMA, "head_dim": 2}
MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
GPT_OSS = {**MIXTRAL, "architectures": ["GptOssForCausalLM"]}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"]}
GEMMA2 = {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "num_key_value_heads": 2}
GEMMA3 = {**GEMMA2, "architectures": ["Gemma3ForCausalLM"]}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_defaults_of_a_bare_config() -> None:
    assert read_spec(LLAMA) == ModelSpec(
        architecture="LlamaForCausalLM",
        num_layers=4,
        hidden_size=64,
        intermediate_size=80,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        vocab_size=97,
        max_model_len=256,
        rms_eps=1e-6,
        rope=RopeSpec(10000.0, 16),
        tied=False,
        dtype="float32",
    )


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "beta_fast": 16},
    ],
)
def test_old_and_new_rope_spellings_read_alike(scaling: dict[str, Any]) -> None:
    new = {**LLAMA, "rope_parameters": {"rope_theta": 500.0, **scaling}}
    older = {**LLAMA, "rope_theta": 500.0, "rope_scaling": dict(scaling)}
    oldest_scaling = {**scaling, "type": scaling["rope_type"]}
    del oldest_scaling["rope_type"]
    oldest = {**LLAMA, "rope_theta": 500.0, "rope_scaling": oldest_scaling}
    spec = read_spec(new)
    assert spec.rope.theta == 500.0
    assert spec.rope.kind == scaling["rope_type"]
    assert read_spec(older) == spec
    assert read_spec(oldest) == spec


def test_yarn_stretches_the_context_from_the_trained_length() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert read_spec({**LLAMA, "rope_scaling": scaling}).max_model_len == 1024
    scaling["original_max_position_embeddings"] = 64
    assert read_spec({**LLAMA, "rope_scaling": scaling}).max_model_len == 256


def test_null_is_absent() -> None:
    nulls = {"rope_scaling": None, "head_dim": None, "quantization_config": None}
    assert read_spec({**LLAMA, **nulls, "eos_token_id": None}) == read_spec(LLAMA)


def test_biases_norms_and_end_tokens() -> None:
    spec = read_spec({**LLAMA, "attention_bias": True, "mlp_bias": True, "eos_token_id": [3, 5]})
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (True, True, True)
    assert spec.eos_ids == (3, 5)
    spec = read_spec({**QWEN2, "eos_token_id": 7, "torch_dtype": "bfloat16"})
    assert (spec.qkv_bias, spec.output_bias, spec.qk_norm) == (True, False, False)
    assert (spec.eos_ids, spec.dtype) == ((7,), "bfloat16")
    spec = read_spec(QWEN3)
    assert (spec.qkv_bias, spec.qk_norm, spec.head_dim) == (False, True, 128)
    assert (
        read_spec({**LLAMA, "quantization_config": {"quant_method": "awq"}}).quantization == "awq"
    )


def test_a_family_has_defaults_of_its_own() -> None:
    spec = read_spec(MIXTRAL)
    assert (spec.rms_eps, spec.rope.theta) == (1e-5, 1e6)
    assert read_spec({**MIXTRAL, "rope_parameters": {"rope_theta": 500.0}}).rope.theta == 500.0
    spec = read_spec(GPT_OSS)
    assert (spec.rope.kind, spec.rope.factor, spec.rope.theta) == ("yarn", 32.0, 150000.0)
    assert (spec.rope.original_max_len, spec.rope.truncate) == (4096, False)
    plain = read_spec({**GPT_OSS, "rope_parameters": {"rope_type": "default"}})
    assert plain.rope == RopeSpec(150000.0, 64)


def test_windows() -> None:
    on = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}
    spec = read_spec({**QWEN2, **on})
    assert (spec.window, spec.window_layers) == (32, (False, False, False, True))
    assert read_spec({**QWEN2, **on, "use_sliding_window": False}).window == 0
    assert read_spec({**QWEN2, **on, "max_window_layers": 4}).window == 0
    types = ["sliding_attention", "full_attention"] * 2
    assert read_spec({**QWEN3, **on, "layer_types": types}).window_layers == (True, False) * 2
    assert read_spec({**MISTRAL, "sliding_window": 32}).window == 32
    assert read_spec({**MISTRAL, "sliding_window": None}).window == 0
    # Absent means 4096 there, which reaches beyond this context; longer contexts do have it.
    assert read_spec(MISTRAL).window == 0
    assert read_spec({**MISTRAL, "max_position_embeddings": 8192}).window == 4096


def test_a_vision_model_gives_its_text_side() -> None:
    text = {key: GEMMA3[key] for key in GEMMA3 if key != "architectures"}
    text |= {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 32,
        "num_hidden_layers": 7,
    }
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    spec = read_spec({**outer, "eos_token_id": [1, 106], "vision_config": {}})
    assert spec == replace(
        read_spec({**GEMMA3, **text, "eos_token_id": [1, 106]}),
        architecture="Gemma3ForConditionalGeneration",
    )
    assert spec.window_layers == (True,) * 5 + (False, True)
    assert (spec.rope.theta, spec.rope.factor, spec.head_dim) == (1e6, 8.0, 256)
    assert spec.local_rope == RopeSpec(10000.0, 256)
    family = family_of(spec.architecture)
    assert family.names("blocks.2.mlp_after.weight", "") == (
        "language_model.model.layers.2.post_feedforward_layernorm.weight"
    )
    assert family.names("embedding.weight", "") == "language_model.model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (LLAMA, "hidden_act", "gelu"),
        (LLAMA, "partial_rotary_factor", 0.5),
        (LLAMA, "hidden_size", None),
        (LLAMA, "hidden_size", "64"),
        (LLAMA, "hidden_size", 66),
        (LLAMA, "vocab_size", 0),
        (LLAMA, "num_hidden_layers", True),
        (LLAMA, "num_hidden_layers", 2.5),
        (LLAMA, "num_key_value_heads", 3),
        (LLAMA, "head_dim", 15),
        (LLAMA, "rms_norm_eps", 0),
        (LLAMA, "rms_norm_eps", float("nan")),
        (LLAMA, "rms_norm_eps", float("inf")),
        (LLAMA, "rms_norm_eps", 10**400),
        (LLAMA, "rope_theta", float("inf")),
        (LLAMA, "rope_scaling.factor", {"type": "linear", "factor": float("inf")}),
        (
            LLAMA,
            "rope_scaling.long_factor",
            {
                "type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [1.0] * 7 + [float("inf")],
            },
        ),
        (LLAMA, "rope_scaling.rope_theta", {"type": "yarn", "factor": 2.0, "rope_theta": 1.0}),
        (TWO, "rope_scaling.type", {"type": "dynamic", "factor": 2.0}),
        (LLAMA, "tie_word_embeddings", "yes"),
        (LLAMA, "attention_bias", 1),
        (LLAMA, "eos_token_id", "2"),
        (LLAMA, "torch_dtype", "float8"),
        (LLAMA, "rope_scaling", "linear"),
        (LLAMA, "rope_scaling.rope_type", {"rope_type": "proportional"}),
        (LLAMA, "rope_scaling.type", {"type": "mrope"}),
        (LLAMA, "rope_scaling.factor", {"type": "linear"}),
        (LLAMA, "rope_scaling.factor", {"type": "linear", "factor": -1}),
        (
            LLAMA,
            "rope_scaling.high_freq_factor",
            {"type": "llama3", **LLAMA3, "high_freq_factor": 1},
        ),
        (
            LLAMA,
            "rope_scaling.low_freq_factor",
            {"type": "llama3", **LLAMA3, "low_freq_factor": None},
        ),
        (LLAMA, "rope_scaling.truncate", {"type": "yarn", "factor": 2.0, "truncate": "no"}),
        (LLAMA, "rope_parameters.full_attention", {"full_attention": {"rope_type": "yarn"}}),
        (QWEN2, "layer_types", ["sliding_attention"] * 4),
        (MISTRAL, "sliding_window", 0),
        (MISTRAL, "layer_types", ["full_attention"] * 4),
        (LLAMA, "rope_scaling.short_factor", {"type": "longrope", "long_factor": [1.0] * 8}),
        (PHI3, "attention_bias", True),
        (PHI3, "partial_rotary_factor", 0.45),
        (PHI3, "rope_scaling", {"type": "linear", "factor": 2.0}),
        (GEMMA2, "hidden_activation", "gelu"),
        (GEMMA2, "use_bidirectional_attention", True),
        (GEMMA2, "attn_logit_softcapping", -1.0),
        (GEMMA2, "layer_types", ["chunked_attention"] * 4),
        (GEMMA3, "attn_logit_softcapping", 50.0),
        (GEMMA3, "rope_parameters", {"rope_type": "default"}),
        (GEMMA3, "rope_scaling.factor", {"rope_type": "linear"}),
    ],
)
def test_refused_by_name(config: dict[str, Any], key: str, value: object) -> None:
    top = key.partition(".")[0]
    with pytest.raises(ConfigError) as caught:
        read_spec({**config, top: value})
    named = "num_attention_heads" if value == 66 else key
    assert caught.value.option == named
    assert named in caught.value.message


def test_unknown_architecture_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        family_of("Qwen2XForCausalLM")
    for name in FAMILIES:
        assert name in caught.value.message
    assert caught.value.message.endswith("the nearest is Qwen2ForCausalLM")
    for bad in (None, [], "LlamaForCausalLM", ["a", "b"]):
        with pytest.raises(ConfigError, match="architectures"):
            read_spec({**LLAMA, "architectures": bad})


def test_names() -> None:
    names = family_of("LlamaForCausalLM").names
    assert names("embedding.weight", "") == "model.embed_tokens.weight"
    assert names("blocks.12.attention.qkv.bias", "k") == "model.layers.12.self_attn.k_proj.bias"
    assert names("blocks.0.mlp.gate_up.weight", "up") == "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ConfigError, match=r"blocks\.0\.router"):
        names("blocks.0.router.weight", "")


def test_a_tied_heads_copy_may_be_left_over() -> None:
    family = family_of("LlamaForCausalLM")
    spec = read_spec(LLAMA)
    assert family.ignored_names(spec) == ()
    assert family.ignored_names(replace(spec, tied=True)) == (r"lm_head\.weight",)


def test_reading_configs_needs_no_torch() -> None:
    code = "import sys, octavo.models.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
