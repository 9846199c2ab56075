"""Small checkpoints with random weights, written by other libraries than the one under test."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, VOCAB = 64, 4, 2, 16, 96, 2, 300


def fresh_seed() -> int:
    """Seen in pytest's output if the test fails."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    return seed


def llama_shapes() -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of a tiny tied Llama."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        start = f"model.layers.{layer}."
        shapes[start + "input_layernorm.weight"] = (HIDDEN,)
        shapes[start + "self_attn.q_proj.weight"] = (HEADS * HEAD_DIM, HIDDEN)
        shapes[start + "self_attn.k_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[start + "self_attn.v_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[start + "self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes[start + "post_attention_layernorm.weight"] = (HIDDEN,)
        shapes[start + "mlp.gate_proj.weight"] = (INNER, HIDDEN)
        shapes[start + "mlp.up_proj.weight"] = (INNER, HIDDEN)
        shapes[start + "mlp.down_proj.weight"] = (HIDDEN, INNER)
    shapes["model.norm.weight"] = (HIDDEN,)
    return shapes


def random_llama(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in llama_shapes().items()
    }


def llama_config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": 2,
        "bos_token_id": 1,
    }


def write_hf(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A Hugging Face folder with one safetensors file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(llama_config()))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    tokenizer = Tokenizer(models.BPE({"<unk>": 0, "<s>": 1, "</s>": 2, "<end>": 3, "a": 4}, []))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens(["<end>"])  # found in text, but not special
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    save_file(tensors, folder / "model.safetensors")
    return folder


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        number, _, inner = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{GGUF_NAMES[inner]}.{suffix}"
    return f"{GGUF_NAMES[stem]}.{suffix}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """As converters store rotary rows: row 2i of a head is its row i, 2i + 1 its row half + i."""
    height = weight.shape[0] // heads
    order = [
        head * height + half * height // 2 + index
        for head in range(heads)
        for index in range(height // 2)
        for half in (0, 1)
    ]
    return weight[order]


@dataclass
class ToyGguf:
    """Options of a GGUF file; `extra` are more keys as (adder's name, arguments)."""

    architecture: str = "llama"
    vocabulary: tuple[str, ...] = ()
    types: tuple[int, ...] = ()
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    model: str = "gpt2"
    pre: str | None = "smollm"
    bos: int | None = 1
    eos: int | None = 2
    extra: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    interleaved: bool = True

    def write(self, path: Path, tensors: dict[str, torch.Tensor], kind: str = "F32") -> Path:
        """Matrices are stored as `kind`, vectors as F32."""
        writer = gguf.GGUFWriter(path, self.architecture)
        self._sizes(writer)
        self._tokenizer(writer)
        for adder, arguments in self.extra:
            getattr(writer, adder)(*arguments)
        for name, tensor in tensors.items():
            values = tensor.float().numpy()
            if self.interleaved and "q_proj" in name:
                values = interleave(values, HEADS)
            if self.interleaved and "k_proj" in name:
                values = interleave(values, KV_HEADS)
            self._add(writer, name if "rope_freqs" in name else gguf_name(name), values, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _sizes(self, writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(LAYERS)
        writer.add_context_length(512)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)

    def _tokenizer(self, writer: gguf.GGUFWriter) -> None:
        vocabulary = list(self.vocabulary) or [
            "t",
            "0",
            *(f"t{index}" for index in range(VOCAB - 2)),
        ]
        writer.add_tokenizer_model(self.model)
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(vocabulary)
        writer.add_token_types(list(self.types) or [1] * len(vocabulary))
        if self.model == "gpt2":
            writer.add_token_merges(list(self.merges) or ["t 0"])
        if self.scores:
            writer.add_token_scores(list(self.scores))
        if self.bos is not None:
            writer.add_bos_token_id(self.bos)
        if self.eos is not None:
            writer.add_eos_token_id(self.eos)

    @staticmethod
    def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
        if kind == "F32" or values.ndim == 1:
            writer.add_tensor(name, values)
            return
        raw_kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(values, raw_kind), raw_dtype=raw_kind)


def expect_error(message: pytest.ExceptionInfo[Exception], *parts: str) -> None:
    """Each part is in the error's text."""
    for part in parts:
        assert part in str(message.value), f"{part!r} is not in: {message.value}"
