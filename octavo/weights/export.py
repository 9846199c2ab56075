"""Writes an opened checkpoint as a Hugging Face folder of one safetensors file.

For comparing with other engines and for tests. Not for: quantized output.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch

from octavo.checkpoint.records import Checkpoint
from octavo.errors import CheckpointError
from octavo.weights.tensors import PLAIN, read_tensor

DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def write_folder(checkpoint: Checkpoint, out: Path, dtype: torch.dtype) -> Path:
    """Writes config, tokenizer, template and all weights as `dtype` into `out`, and returns it.

    The folder is made if needed; model.safetensors appears last and whole. Raises
    CheckpointError if `dtype` is not one of bfloat16, float16, float32.
    """
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"{dtype} cannot be written; use one of {', '.join(DTYPE_NAMES.values())}"
        )
    out.mkdir(parents=True, exist_ok=True)
    config = {**checkpoint.config, "torch_dtype": DTYPE_NAMES[dtype]}
    config.pop("dtype", None)
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", checkpoint.generation)
    tokenizer_config = {**checkpoint.tokenizer_config}
    tokenizer_config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    tokenizer_config.pop("chat_template", None)
    _write_json(out / "tokenizer_config.json", tokenizer_config)
    checkpoint.load_tokenizer().save(str(out / "tokenizer.json"))
    _write_templates(checkpoint.chat_templates, out)
    _write_safetensors(checkpoint, out / "model.safetensors", dtype)
    return out


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_templates(templates: dict[str, str], out: Path) -> None:
    for name, text in templates.items():
        if name == "default":
            file = out / "chat_template.jinja"
        else:
            file = out / "additional_chat_templates" / f"{Path(name).name}.jinja"
            file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")


def _write_safetensors(checkpoint: Checkpoint, file: Path, dtype: torch.dtype) -> None:
    """One tensor in memory at a time."""
    encoding = next(name for name, kind in PLAIN.items() if kind == dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, entry in checkpoint.tensors.items():
        end = position + prod(entry.shape) * dtype.itemsize
        offsets = [position, end]
        header[name] = {"dtype": encoding, "shape": list(entry.shape), "data_offsets": offsets}
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    part = file.with_suffix(".part")
    with part.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for entry in checkpoint.tensors.values():
            values = read_tensor(entry, dtype).reshape(-1)
            stream.write(values.view(torch.uint8).numpy().tobytes())
    part.replace(file)
