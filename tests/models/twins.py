"""Tiny random models of transformers, one for each feature of each family: what we must equal."""

from __future__ import annotations

import copy
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


LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
YARN = rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=64,
    mscale=0.8,
    mscale_all_dim=0.6,
    beta_fast=32.0,
    beta_slow=1.0,
)


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
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 9}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "head_dim": 32,
            "decoder_sparse_step": 2,
        },
    ),
    "deepseek-v2-lite": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **LATENT,
            **YARN,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {**LATENT, **YARN, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
    "deepseek-v3-halves": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
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
    "gpt-oss": (
        "GptOss",
        {
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                truncate=False,
                beta_fast=32.0,
                beta_slow=1.0,
            ),
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
            "swiglu_limit": 1.5,
        },
    ),
    "gpt-oss-wide": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 4}),
    "glm": ("Glm", {"head_dim": 32, "pad_token_id": 0, "attention_bias": False}),
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


def make_twin(
    case: str,
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
    *,
    every_expert: bool = False,
    sizes: dict[str, Any] | None = None,
    spread: float = 0.2,
) -> Twin:
    """The model of a case with fresh weights; biases and norms are random too.

    With `every_expert` routed tokens go to all experts, so that nothing is chosen. `spread` is the
    weights' deviation: 0.2 is large for these sizes, so that scores are sharp and errors show.
    """
    seed = secrets.randbits(31) if seed is None else seed
    print(f"case {case}, seed {seed}")  # shown by pytest on failure
    torch.manual_seed(seed)
    family, changes = CASES[case]
    if every_expert:
        changes = {**changes, **all_chosen(changes)}
    # A copy, since transformers writes defaults into the objects that it is given.
    settings = copy.deepcopy({**SIZES, **changes, **(sizes or {})})
    config_name = f"{TEXT_CONFIGS.get(family, family)}Config"
    config = getattr(transformers, config_name)(**settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    norm = 0.0 if family.startswith("Gemma") else 1.0  # those hold their distance from one
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(norm if "norm" in name else 0.0, spread)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    model = model.to(dtype)
    state = model.state_dict() if family == "GptOss" else in_file(model.state_dict())
    if family == "Mixtral":
        state = {mixtral_name(name): tensor for name, tensor in state.items()}
    as_file = {**config.to_dict(), "architectures": [f"{family}ForCausalLM"]}
    return Twin(model, as_file, state, seed)


def in_file(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as checkpoints hold them: transformers fuses experts, in files they lie apart."""
    out = {}
    for name, tensor in state.items():
        tensor = tensor.detach()
        prefix, _, fused = name.rpartition(".experts.")
        if fused not in ("gate_up_proj", "down_proj"):
            out[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            parts = [weight] if fused == "down_proj" else weight.chunk(2)
            sides = ["down"] if fused == "down_proj" else ["gate", "up"]
            for side, part in zip(sides, parts, strict=True):
                out[f"{prefix}.experts.{expert}.{side}_proj.weight"] = part
    return out


def mixtral_name(name: str) -> str:
    """transformers' name -> the file's."""
    for ours, theirs in (
        ("mlp", "block_sparse_moe"),
        ("gate_proj", "w1"),
        ("up_proj", "w3"),
        ("down_proj", "w2"),
    ):
        name = name.replace(f".{ours}.", f".{theirs}.")
    return name


def all_chosen(changes: dict[str, Any]) -> dict[str, Any]:
    """What makes a case's tokens go to all its experts; nothing if it has none."""
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    counts = [changes[key] for key in keys if key in changes]
    found: dict[str, Any] = {"num_experts_per_tok": counts[0]} if counts else {}
    if "n_group" in changes:
        found["topk_group"] = changes["n_group"]
    return found
