"""Tiny random models of transformers, one for each feature of each family: what we must equal."""

from __future__ import annotations

import functools
import secrets
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1000.0, "rope_type": kind, **more}}


def longrope(pairs: int, trained: int, **more: Any) -> dict[str, Any]:
    short = [1.0 + 0.1 * pair for pair in range(pairs)]
    long = [1.5 + 0.7 * pair for pair in range(pairs)]
    lists = {"short_factor": short, "long_factor": long}
    return rope("longrope", original_max_position_embeddings=trained, **lists, **more)


# name -> (architecture, what differs from SIZES)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "rms_norm_eps": 1e-3},
    ),
    "llama-odd-heads": ("Llama", {"head_dim": 20, "intermediate_size": 75}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-all-kv-heads": ("Llama", {"num_key_value_heads": 4}),
    "llama-linear": ("Llama", rope("linear", factor=3.0)),
    "llama-dynamic": ("Llama", rope("dynamic", factor=2.0)),
    "llama-3": (
        "Llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama-yarn": (
        "Llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-yarn-gain": (
        "Llama",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            mscale=0.7,
            mscale_all_dim=1.3,
            beta_fast=20.0,
            beta_slow=2.0,
        ),
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-biases-window": (
        "Qwen3",
        {
            "head_dim": 48,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 9}),
    # A trained length of 1 makes every context a long one, whatever its length.
    "llama-longrope": ("Llama", longrope(8, 1, attention_factor=1.2)),
    "phi3": ("Phi3", {"pad_token_id": 0, "sliding_window": 9}),
    "phi3-long": (
        "Phi3",
        {
            **longrope(8, 1, attention_factor=1.2),
            "pad_token_id": 0,
            "original_max_position_embeddings": 1,
        },
    ),
    "phi3-short-partial": (
        "Phi3",
        {
            **longrope(6, 256, partial_rotary_factor=0.75),
            "pad_token_id": 0,
            "original_max_position_embeddings": 256,
            "tie_word_embeddings": True,
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 7,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 48,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 24,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "final_logit_softcapping": 15.0,
        },
    ),
    # The window reaches everything, the other rotary base stays.
    "gemma3-wide": ("Gemma3", {"head_dim": 16, "sliding_window": 999, "rope_parameters": None}),
    "glm4": ("Glm4", {"head_dim": 32, "pad_token_id": 0}),
}


TEXT_CONFIGS = {"Gemma3": "Gemma3Text"}  # families whose plain config has a vision side


@dataclass
class Twin:
    """A random model, its config as a file would hold it, and its tensors."""

    model: Any
    config: dict[str, Any]
    state: dict[str, Tensor]
    seed: int

    def logits(self, tokens: list[int]) -> Tensor:
        """[n, V] in f32."""
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0].float()

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """The next `count` tokens, each the likeliest."""
        prompt = torch.tensor([tokens])
        with torch.no_grad():
            out = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[0, len(tokens) :].tolist()

    def prompt(self, length: int) -> list[int]:
        """Random tokens, new ones each time."""
        return torch.randint(0, self.config["vocab_size"], (length,)).tolist()


@functools.cache
def _shared(case: str) -> Twin:
    return make_twin(case)


def shared_twin(case: str) -> Twin:
    """One f32 twin a case and run, for tests that leave it as it is."""
    twin = _shared(case)
    print(f"case {case}, seed {twin.seed}")
    return twin


def make_twin(case: str, dtype: torch.dtype = torch.float32, seed: int | None = None) -> Twin:
    """The model of a case with fresh weights; biases and norms are random too."""
    seed = secrets.randbits(31) if seed is None else seed
    print(f"case {case}, seed {seed}")  # shown by pytest on failure
    torch.manual_seed(seed)
    family, changes = CASES[case]
    config_name = f"{TEXT_CONFIGS.get(family, family)}Config"
    config = getattr(transformers, config_name)(**{**SIZES, **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            parameter.normal_(1.0 if is_norm else 0.0, 0.2)
    model = model.to(dtype)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    as_file = {**config.to_dict(), "architectures": [f"{family}ForCausalLM"]}
    return Twin(model, as_file, state, seed)
