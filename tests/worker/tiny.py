"""A small random Llama checkpoint on disk, with sharper logits than a new model has."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB = 96
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


def tiny_tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    tensors = {
        "model.embed_tokens.weight": noise(VOCAB, 64) * 8,
        "lm_head.weight": noise(VOCAB, 64) * 3,
        "model.norm.weight": torch.ones(64),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": torch.ones(64),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(64),
            f"{prefix}.self_attn.q_proj.weight": noise(64, 64) * 2,
            f"{prefix}.self_attn.k_proj.weight": noise(32, 64) * 2,
            f"{prefix}.self_attn.v_proj.weight": noise(32, 64) * 2,
            f"{prefix}.self_attn.o_proj.weight": noise(64, 64) * 2,
            f"{prefix}.mlp.gate_proj.weight": noise(128, 64),
            f"{prefix}.mlp.up_proj.weight": noise(128, 64),
            f"{prefix}.mlp.down_proj.weight": noise(64, 128),
        }
    return tensors


def write_tiny(folder: Path, seed: int, *, poison: int | None = None) -> Path:
    """The folder. The embedding of token `poison` is NaN."""
    tensors = tiny_tensors(seed)
    if poison is not None:
        tensors["model.embed_tokens.weight"][poison] = torch.nan
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
