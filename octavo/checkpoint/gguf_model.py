"""Gives a GGUF file the face of a Hugging Face checkpoint: config, names of tensors, templates.

Architectures: llama (also Mistral), qwen2, qwen3. Two traps are handled here. Architecture llama
stores the rows of attn_q and attn_k as interleaved rotary pairs, so those entries carry
`interleaved_heads`. Llama 3's rope scaling is stored as a tensor of factors, rope_freqs, which is
turned back into a config entry and checked against it.
Not for: parsing (`gguf_file.py`) or the tokenizer (`gguf_tokenizer.py`).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.checkpoint.gguf_file import GgufFile, GgufTensor, StringArray, read_gguf
from octavo.checkpoint.records import Checkpoint, TensorEntry
from octavo.errors import CheckpointError

ROPE_FREQS = "rope_freqs.weight"
TEMPLATE = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one GGUF architecture is called by Hugging Face."""

    model_type: str
    class_name: str
    interleaved: bool  # rows of q and k are rotary pairs


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", False),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", False),
}
OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BLOCK_NAMES = {
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


def open_gguf(path: Path, name: str) -> Checkpoint:
    """Opens one GGUF file. Raises CheckpointError naming what is missing or not supported."""
    file = read_gguf(path)
    config = config_of(file)
    tokenizer_config = _tokenizer_config(file)
    templates = _templates(file)
    return Checkpoint(
        path=path,
        kind="gguf",
        name=name,
        config=config,
        generation=_generation(file),
        chat_template=templates.get("default"),
        chat_templates=templates,
        tokenizer_config=tokenizer_config,
        tensors=_entries(file, config),
    )


class Metadata:
    """Reads keys of one architecture and says which one is missing or wrong."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        name = file.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            raise CheckpointError(
                f"{file.path}: architecture {name!r} is not supported; known for GGUF files: "
                f"{', '.join(ARCHITECTURES)}"
            )
        self.prefix = str(name)
        self.architecture = ARCHITECTURES[self.prefix]

    def get(self, key: str) -> Any:
        """A key of this architecture, or None."""
        return self.file.metadata.get(f"{self.prefix}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; CheckpointError if missing without default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # one number a layer, all equal
        if type(value) is not int or value <= 0:
            raise CheckpointError(
                f"{self.file.path}: metadata key {self.prefix}.{key} must be a positive integer "
                f"and is {value!r}"
            )
        return value

    def number(self, key: str, default: float) -> float:
        """A finite positive number."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise CheckpointError(
                f"{self.file.path}: metadata key {self.prefix}.{key} must be a positive number "
                f"and is {value!r}"
            )
        return float(value)


def config_of(file: GgufFile) -> dict[str, Any]:
    """config.json's content, made from the metadata."""
    data = Metadata(file)
    if (data.get("expert_count") or 0) > 0:
        raise CheckpointError(f"{file.path}: mixtures of experts in GGUF files are not supported")
    embedding = _tensor(file, "token_embd.weight")
    heads = data.integer("attention.head_count")
    hidden = data.integer("embedding_length")
    head_dim = data.integer("attention.key_length", max(1, hidden // heads))
    if data.integer("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{file.path}: key and value heads of different size")
    if data.integer("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{file.path}: rotary positions on a part of each head")
    theta = data.number("rope.freq_base", 10000.0)
    config: dict[str, Any] = {
        "architectures": [data.architecture.class_name],
        "model_type": data.architecture.model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": data.integer("feed_forward_length"),
        "num_hidden_layers": data.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": data.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": data.integer("context_length"),
        "rms_norm_eps": data.number("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(data, theta, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "torch_dtype": _dtype(file),
    }
    window = data.get("attention.sliding_window")
    if window:
        _add_window(config, data, window)
    ids = _special_ids(file)
    config |= {f"{key}_token_id": ids[key] for key in ("bos", "eos", "pad") if key in ids}
    return config


def _add_window(config: dict[str, Any], data: Metadata, window: object) -> None:
    """A window on every layer is Mistral; patterns of windows are not known for these files."""
    if data.prefix != "llama" or type(window) is not int:
        raise CheckpointError(
            f"{data.file.path}: {data.prefix}.attention.sliding_window = {window!r} is not "
            "supported in GGUF files of this architecture"
        )
    config["sliding_window"] = window
    config["architectures"] = ["MistralForCausalLM"]
    config["model_type"] = "mistral"


def _tensor(file: GgufFile, name: str) -> GgufTensor:
    if name not in file.tensors:
        raise CheckpointError(f"{file.path}: the tensor {name!r} is missing")
    return file.tensors[name]


def _dtype(file: GgufFile) -> str:
    """The type most weights have; block formats are computed in bfloat16."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.encoding] = sizes.get(tensor.encoding, 0) + tensor.nbytes
    largest = max(sizes, key=lambda name: sizes[name])
    return {"F16": "float16", "F32": "float32", "F64": "float32"}.get(largest, "bfloat16")


def _rope_scaling(data: Metadata, theta: float, head_dim: int) -> dict[str, Any] | None:
    kind = data.get("rope.scaling.type")
    if ROPE_FREQS in data.file.tensors:
        if kind not in (None, "none", "linear") or data.number("rope.scaling.factor", 1.0) != 1.0:
            raise CheckpointError(f"{data.file.path}: has rope_freqs and rope scaling {kind!r}")
        return _llama3_scaling(data.file, theta, head_dim)
    # An old key; its meaning is linear scaling.
    factor = data.number("rope.scaling.factor", data.number("rope.scale_linear", 1.0))
    if kind in (None, "none") and factor == 1.0:
        return None
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind == "yarn":
        original = data.integer("rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise CheckpointError(f"{data.file.path}: rope scaling {kind!r} is not supported")


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Reads the factors and finds the config that makes them; refuses any others."""
    tensor = file.tensors[ROPE_FREQS]
    if tensor.encoding != "F32" or tensor.shape != (head_dim // 2,):
        raise CheckpointError(f"{file.path}: {ROPE_FREQS} is {tensor.encoding} {tensor.shape}")
    with file.path.open("rb") as stream:
        stream.seek(tensor.offset)
        found = struct.unpack(f"<{head_dim // 2}f", stream.read(tensor.nbytes))
    factor, original, low, high = max(found), 8192, 1.0, 4.0
    for index, value in enumerate(found):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        # 1 below original/high, the factor above original/low, smooth between.
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        expected = 1.0 / ((1 - smooth) / factor + smooth)
        if not math.isclose(value, expected, rel_tol=1e-3):
            raise CheckpointError(
                f"{file.path}: {ROPE_FREQS}[{index}] is {value}, where Llama 3's scaling by "
                f"{factor} has {expected}: this scaling is not known"
            )
    return {
        "rope_type": "llama3",
        "factor": float(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _special_ids(file: GgufFile) -> dict[str, int]:
    """Ids by short name: bos, eos, eot, pad, unk."""
    keys = {"bos": "bos", "eos": "eos", "eot": "eot", "pad": "padding", "unk": "unknown"}
    ids: dict[str, int] = {}
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    count = tokens.count if isinstance(tokens, StringArray) else 0
    for name, key in keys.items():
        value = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < count:
            raise CheckpointError(
                f"{file.path}: tokenizer.ggml.{key}_token_id is {value!r}, the vocabulary has "
                f"{count} tokens"
            )
        ids[name] = value
    return ids


def _generation(file: GgufFile) -> dict[str, Any]:
    """generation_config.json's content: which tokens begin and end."""
    ids = _special_ids(file)
    ends = list(dict.fromkeys(ids[key] for key in ("eos", "eot") if key in ids))
    generation: dict[str, Any] = {
        f"{key}_token_id": ids[key] for key in ("bos", "pad") if key in ids
    }
    if ends:
        generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return generation


def _tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """tokenizer_config.json's content: the special tokens by name, as text."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray):
        return {}
    texts = tokens.decode_bytes()
    ids = _special_ids(file)
    config: dict[str, Any] = {
        f"{key}_token": texts[ids[key]].decode("utf-8", errors="replace")
        for key in ("bos", "eos", "pad", "unk")
        if key in ids
    }
    config["model_max_length"] = file.metadata.get(
        f"{file.metadata.get('general.architecture')}.context_length"
    )
    return config


def _templates(file: GgufFile) -> dict[str, str]:
    """Chat templates by name; the main one is "default"."""
    templates: dict[str, str] = {}
    for key, value in file.metadata.items():
        if key == TEMPLATE and isinstance(value, str):
            templates["default"] = value
        elif key.startswith(TEMPLATE + ".") and isinstance(value, str):
            templates[key.removeprefix(TEMPLATE + ".")] = value
    return templates


def _entries(file: GgufFile, config: dict[str, Any]) -> dict[str, TensorEntry]:
    """Tensors under Hugging Face names. A name that is not known is refused."""
    interleaved = Metadata(file).architecture.interleaved
    heads = {
        "attn_q": int(config["num_attention_heads"]),
        "attn_k": int(config["num_key_value_heads"]),
    }
    entries: dict[str, TensorEntry] = {}
    unknown: list[str] = []
    for tensor in file.tensors.values():
        if tensor.name == ROPE_FREQS:
            continue  # in the config now
        stem, _, suffix = tensor.name.rpartition(".")
        parts = stem.split(".")
        name = OUTER_NAMES.get(stem)
        count = 0
        if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal():
            inner = BLOCK_NAMES.get(parts[2])
            name = inner and f"model.layers.{int(parts[1])}.{inner}"
            count = heads.get(parts[2], 0) if interleaved else 0
        if not name or suffix not in ("weight", "bias"):
            unknown.append(tensor.name)
            continue
        name = f"{name}.{suffix}"
        if count and tensor.shape[0] % (2 * count):
            raise CheckpointError(
                f"{file.path}: {tensor.name!r} has {tensor.shape[0]} rows for {count} heads"
            )
        entries[name] = TensorEntry(
            name, file.path, tensor.offset, tensor.nbytes, tensor.shape, tensor.encoding, count
        )
    if unknown:
        raise CheckpointError(
            f"{file.path}: {len(unknown)} tensors have no known meaning for this architecture: "
            f"{', '.join(unknown[:20])}"
        )
    return entries
