"""Writes an opened checkpoint as a Hugging Face folder of one safetensors file.

For comparing with other engines, for tests, and for `octavo quantize`. Not for: what tensors become
(`octavo/worker/quantize.py`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

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
    _write_texts(checkpoint, out, {"torch_dtype": DTYPE_NAMES[dtype]})
    _write_safetensors(checkpoint, out / "model.safetensors", dtype)
    return out


def write_tensors(
    checkpoint: Checkpoint,
    out: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    quantization: dict[str, Any],
) -> int:
    """As `write_folder`, with other tensors and a `quantization_config`; the weights' bytes.

    One tensor is in memory at a time; what they are is known last, so the header is put before
    them afterwards.
    """
    more = {"torch_dtype": DTYPE_NAMES[dtype], "quantization_config": quantization}
    _write_texts(checkpoint, out, more)
    encodings = {kind: name for name, kind in PLAIN.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    file, body = out / "model.safetensors", out / "model.body"
    position = 0
    with body.open("wb") as stream:
        for name, tensor in tensors:
            raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            offsets = [position, position + len(raw)]
            shape = list(tensor.shape)
            header[name] = {
                "dtype": encodings[tensor.dtype],
                "shape": shape,
                "data_offsets": offsets,
            }
            position += len(raw)
            stream.write(raw)
    part = file.with_suffix(".part")
    with part.open("wb") as stream, body.open("rb") as source:
        _write_header(stream, header)
        shutil.copyfileobj(source, stream, 1 << 24)
    body.unlink()
    part.replace(file)
    return position


def _write_texts(checkpoint: Checkpoint, out: Path, more: dict[str, Any]) -> None:
    """Config, with `more` in it, tokenizer and template."""
    out.mkdir(parents=True, exist_ok=True)
    config = {**checkpoint.config, **more}
    config.pop("dtype", None)
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", checkpoint.generation)
    tokenizer_config = {**checkpoint.tokenizer_config}
    tokenizer_config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    tokenizer_config.pop("chat_template", None)
    _write_json(out / "tokenizer_config.json", tokenizer_config)
    checkpoint.load_tokenizer().save(str(out / "tokenizer.json"))
    _write_templates(checkpoint.chat_templates, out)


def _write_header(stream: BinaryIO, header: dict[str, Any]) -> None:
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    stream.write(len(raw).to_bytes(8, "little") + raw)


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
    part = file.with_suffix(".part")
    with part.open("wb") as stream:
        _write_header(stream, header)
        for entry in checkpoint.tensors.values():
            values = read_tensor(entry, dtype).reshape(-1)
            stream.write(values.view(torch.uint8).numpy().tobytes())
    part.replace(file)
