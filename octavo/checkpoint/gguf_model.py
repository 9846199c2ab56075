"""Gives a GGUF file the face of a Hugging Face checkpoint: config, names of tensors, templates.

Two traps are handled here. Architecture llama stores the rows of attn_q and attn_k as interleaved
rotary pairs, so those entries carry `interleaved_heads`. Llama 3's rope scaling is stored as a
tensor of factors, rope_freqs, which is turned back into a config entry and checked against it.
What else differs between architectures is in `gguf_families.py`.
Not for: parsing (`gguf_file.py`) or the tokenizer (`gguf_tokenizer.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.checkpoint.gguf_families import (
    ROPE_FREQS,
    Architecture,
    Turned,
    architecture_of,
)
from octavo.checkpoint.gguf_file import GgufFile, GgufTensor, StringArray, read_gguf
from octavo.checkpoint.gguf_metadata import Metadata
from octavo.checkpoint.records import Checkpoint, TensorEntry
from octavo.errors import CheckpointError

TEMPLATE = "tokenizer.chat_template"


OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
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


def config_of(file: GgufFile) -> dict[str, Any]:
    """config.json's content, made from the metadata."""
    family = architecture_of(file)
    data = Metadata(file)
    if (data.get("expert_count") or 0) > 0 and not family.experts:
        raise CheckpointError(
            f"{file.path}: mixtures of experts of architecture {data.prefix!r} are not supported"
        )
    embedding = _tensor(file, "token_embd.weight")
    heads = data.integer("attention.head_count")
    hidden = data.integer("embedding_length")
    turned = _turned(family, data, max(1, hidden // heads))
    theta = data.number("rope.freq_base", 10000.0)
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": data.integer("feed_forward_length"),
        "num_hidden_layers": data.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": data.integer("attention.head_count_kv", heads),
        "head_dim": turned.head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": data.integer("context_length"),
        "rms_norm_eps": data.number("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(data, theta, turned.size),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "torch_dtype": _dtype(file),
    }
    window = data.get("attention.sliding_window")
    if window:
        _add_window(config, family, data, window)
    if family.partial:  # also where all of it turns, which need not be the family's default
        config["partial_rotary_factor"] = turned.size / turned.head_dim
    if family.more is not None:
        config |= family.more(data, config, turned)
    ids = _special_ids(file)
    config |= {f"{key}_token_id": ids[key] for key in ("bos", "eos", "pad") if key in ids}
    return config


def _turned(family: Architecture, data: Metadata, default: int) -> Turned:
    """Sizes of a head, and of its part that turns."""
    head_dim = data.integer("attention.key_length", default)
    size = data.integer("rope.dimension_count", head_dim)
    if family.latent:
        return Turned(head_dim, size)
    if data.integer("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{data.file.path}: key and value heads of different size")
    if size != head_dim and not family.partial:
        raise CheckpointError(f"{data.file.path}: rotary positions on a part of each head")
    return Turned(head_dim, size)


def _add_window(config: dict[str, Any], family: Architecture, data: Metadata, window: Any) -> None:
    """A window on every layer of a llama is Mistral; other families know which layers have it."""
    mistral = family.class_name == "LlamaForCausalLM"
    if not (mistral or family.windows) or type(window) is not int:
        raise CheckpointError(
            f"{data.file.path}: {data.prefix}.attention.sliding_window = {window!r} is not "
            "supported in GGUF files of this architecture"
        )
    config["sliding_window"] = window
    if mistral:
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
    found = Metadata(file).vector(ROPE_FREQS, head_dim // 2)
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
    family = architecture_of(file)
    heads = {
        "attn_q": int(config["num_attention_heads"]),
        "attn_k": int(config["num_key_value_heads"]),
    }
    entries: dict[str, TensorEntry] = {}
    unknown: list[str] = []
    for tensor in file.tensors.values():
        if tensor.name in family.in_config:
            continue
        known = False
        for entry in _named(tensor, family, heads if family.interleaved else {}, file.path):
            known = True
            entries[entry.name] = entry
        if not known:
            unknown.append(tensor.name)
    if unknown:
        raise CheckpointError(
            f"{file.path}: {len(unknown)} tensors have no known meaning for this architecture: "
            f"{', '.join(unknown[:20])}"
        )
    return entries


def _named(
    tensor: GgufTensor, family: Architecture, heads: dict[str, int], path: Path
) -> Iterator[TensorEntry]:
    """What one tensor of the file is: one tensor, one for each expert, or nothing that is known."""
    stem, _, suffix = tensor.name.rpartition(".")
    parts = stem.split(".")
    entry = TensorEntry("", path, tensor.offset, tensor.nbytes, tensor.shape, tensor.encoding)
    if suffix not in ("weight", "bias"):
        return
    if family.norms_plus_one and stem.endswith("norm"):
        entry = replace(entry, plus=-1.0)
    if stem in OUTER_NAMES:
        yield replace(entry, name=f"{OUTER_NAMES[stem]}.{suffix}")
    if len(parts) != 3 or parts[0] != "blk" or not parts[1].isdecimal():
        return
    prefix, inner = f"model.layers.{int(parts[1])}.", parts[2]
    if inner in family.experts and len(tensor.shape) == 3:
        yield from _apart(entry, f"{prefix}{family.experts[inner]}.{suffix}")
    elif inner in family.rows:  # a matrix of one row, stored as a vector
        yield replace(
            entry, name=f"{prefix}{family.rows[inner]}.{suffix}", shape=(1, tensor.nbytes // 4)
        )
    elif f"{inner}.{suffix}" in family.whole_names:
        yield replace(entry, name=prefix + family.whole_names[f"{inner}.{suffix}"])
    elif inner in family.names:
        count = heads.get(inner, 0)
        if count and tensor.shape[0] % (2 * count):
            raise CheckpointError(
                f"{path}: {tensor.name!r} has {tensor.shape[0]} rows for {count} heads"
            )
        name = f"{prefix}{family.names[inner]}.{suffix}"
        yield replace(entry, name=name, interleaved_heads=count)


def _apart(entry: TensorEntry, name: str) -> Iterator[TensorEntry]:
    """Experts lie one after the other in one tensor [E, rows, columns]."""
    count = entry.shape[0]
    size = entry.nbytes // count
    for expert in range(count):
        yield replace(
            entry,
            name=name.format(expert),
            offset=entry.offset + expert * size,
            nbytes=size,
            shape=entry.shape[1:],
        )
