"""Quantizes a checkpoint: which tensors become what, and activation-aware scales for 4 bits.

Only linear layers of the blocks are quantized; embeddings, norms and the head stay. Not for:
texts and files (`cli/quantize.py`, `weights/export.py`), or arithmetic (`quant/produce.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.checkpoint.records import Checkpoint
from octavo.errors import ConfigError
from octavo.kernels.formats import FP8_MAX
from octavo.layers.linear import Linear
from octavo.models.decoder import Block, Decoder
from octavo.models.registry import family_of
from octavo.quant import produce
from octavo.quant.aware import search
from octavo.quant.produce import Method, Tensors
from octavo.weights.tensors import read_tensor
from octavo.worker.observe import Recorder

Report = Callable[[str], None]
LEAST = 1e-3  # size of a layer's largest key or value, for scales


@dataclass
class Changes:
    """What becomes of a checkpoint's tensors; those not named stay as they are."""

    quantized: set[str]  # modules
    group: int
    plain: dict[str, Tensor] = field(default_factory=dict)  # new values, before any rounding


def plan(
    checkpoint: Checkpoint, decoder: Decoder, method: Method, most_group: int = 128
) -> Changes:
    """Which modules are quantized, 4 bits in groups of up to `most_group` columns.

    Raises ConfigError if the model cannot be.
    """
    spec = decoder.spec
    names = family_of(spec.architecture).names
    modules: set[str] = set()
    for dotted, layer in decoder.named_layers():
        if isinstance(layer, Linear):
            for part in layer.parts:
                modules.add(names(f"{dotted}.weight", part.name).removesuffix(".weight"))
    shapes = [checkpoint.tensors[f"{module}.weight"].shape for module in modules]
    group = produce.common_group(shapes, most_group) if method == "awq" else 0
    if method == "awq" and not group:
        raise ConfigError(
            "4 bits need weights whose rows are a multiple of 8 and whose columns one of 32; use "
            "--method int8 or fp8",
            "method",
        )
    return Changes(modules, group)


def scale_aware(
    decoder: Decoder, recorder: Recorder, changes: Changes, checkpoint: Checkpoint, report: Report
) -> None:
    """Puts activation-aware scales into the plain weights of every block. Raises ConfigError."""
    spec = decoder.spec
    plain = all(isinstance(block, Block) for block in decoder.blocks)
    if not plain or spec.norms != "before" or spec.norm_offset or spec.fused_gate_up:
        raise ConfigError(
            f"--method awq does not know how to scale the blocks of {spec.architecture}; use int8 "
            "or fp8",
            "method",
        )
    names = family_of(spec.architecture).names

    def rounded(weight: Tensor) -> Tensor:
        return produce.awq_grouped(weight, changes.group).plain(torch.float32)

    def value(name: str) -> Tensor:
        if name not in changes.plain:
            changes.plain[name] = read_tensor(checkpoint.tensors[name], torch.float32)
        return changes.plain[name]

    for index, block in enumerate(decoder.blocks):
        assert isinstance(block, Block)
        inside = f"blocks.{index}"
        down = names(f"{inside}.mlp.down.weight", "")
        up = names(f"{inside}.mlp.gate_up.weight", "up")
        gate = names(f"{inside}.mlp.gate_up.weight", "gate")
        s, after, before = search(recorder.inputs(block.mlp.down), [value(down)], rounded)
        changes.plain[down] = value(down) * s
        changes.plain[up] = value(up) / s.unsqueeze(1)
        bias = up.removesuffix("weight") + "bias"
        if bias in checkpoint.tensors:
            changes.plain[bias] = value(bias) / s
        errors = [(after, before)]
        attention = [names(f"{inside}.attention.qkv.weight", part) for part in ("q", "k", "v")]
        for norm, layer, weights in (
            ("mlp_norm", block.mlp.gate_up, [gate, up]),
            ("attention_norm", block.attention.qkv, attention),
        ):
            found = search(recorder.inputs(layer), [value(name) for name in weights], rounded)
            for name in weights:
                changes.plain[name] = value(name) * found[0]
            norm_name = names(f"{inside}.{norm}.weight", "")
            changes.plain[norm_name] = value(norm_name) / found[0]
            errors.append(found[1:])
        gains = ", ".join(
            f"{1 - after / before:.0%}" if before else "0%" for after, before in errors
        )
        report(
            f"layer {index + 1} of {spec.num_layers}: error less by {gains} (down, gate/up, qkv)"
        )


def cache_scales(decoder: Decoder, recorder: Recorder) -> dict[str, Tensor]:
    """A scale of keys and one of values for each layer, by which the largest seen is 448 in e4m3.

    By the names that checkpoints use. Raises ConfigError for latent attention, which has neither.
    """
    if decoder.spec.latent is not None:
        raise ConfigError("--kv-scales: latent attention has no keys and values to scale", "scales")
    names = family_of(decoder.spec.architecture).names
    found: dict[str, Tensor] = {}
    for index, sizes in zip(decoder.layers, recorder.largest, strict=True):
        module = names(f"blocks.{index}.attention.output.weight", "").rpartition(".o_proj")[0]
        for side, size in zip("kv", sizes, strict=True):
            found[f"{module}.{side}_scale"] = torch.tensor([max(size, LEAST) / FP8_MAX])
    return found


def tensors_of(
    checkpoint: Checkpoint, changes: Changes, method: Method, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """All tensors to write, by name, one module at a time; what stays plain is in `dtype`."""
    make: dict[str, Callable[[Tensor], Tensors]] = {
        "awq": lambda weight: produce.awq_tensors(weight, changes.group),
        "fp8": produce.fp8_tensors,
        "int8": produce.int8_tensors,
    }
    for name, entry in checkpoint.tensors.items():
        module = name.removesuffix(".weight")
        value = changes.plain.get(name)
        if module in changes.quantized:
            weight = read_tensor(entry, torch.float32) if value is None else value
            for suffix, tensor in make[method](weight).items():
                yield f"{module}.{suffix}", tensor
        else:
            yield name, read_tensor(entry, dtype) if value is None else value.to(dtype)
