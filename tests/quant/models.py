"""Tiny quantized models: a checkpoint folder, and the same weights as a float model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.attention.mla_sdpa import LatentSdpaAttention
from octavo.attention.sdpa import SdpaAttention
from octavo.checkpoint.checkpoint import open_checkpoint
from octavo.kernels.ops import Ops
from octavo.kernels.reference import reference_ops
from octavo.layers.build import Build
from octavo.models.decoder import Decoder
from octavo.models.load import attention_need, build_model, load_weights
from octavo.models.quantization import read_scheme
from octavo.models.registry import read_spec
from octavo.parallel.mesh import Mesh
from octavo.quant.select import methods_of
from tests.models.driver import Driver
from tests.models.twins import Twin, make_twin
from tests.quant.packers import Form

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
}


@dataclass
class Quantized:
    """A folder, and the float model that it means."""

    folder: Path
    twin: Twin


def quantized(
    form: Form,
    folder: Path,
    case: str = "llama",
    *,
    seed: int | None = None,
    keep: tuple[str, ...] = (),
    sizes: dict[str, Any] | None = None,
) -> Quantized:
    """Writes a random model in that form; modules that end with one of `keep` stay plain."""
    twin = make_twin(case, seed=seed, sizes={**SIZES, **(sizes or {})})
    random = np.random.default_rng(twin.seed)
    file: dict[str, Tensor] = {}
    for name, tensor in twin.state.items():
        module = name.removesuffix(".weight")
        if not is_quantized(name, tensor) or module.endswith(keep or ("-",)):
            file[name] = tensor.clone()
            continue
        tensors, weight = form.pack(tensor.double().numpy(), random)
        for suffix, packed in tensors.items():
            file[f"{module}.{suffix}"] = packed.contiguous()
        tensor.copy_(torch.from_numpy(weight))
    twin.model.load_state_dict(twin.state, strict=False)
    folder.mkdir(exist_ok=True)
    config = {**twin.config, "quantization_config": form.config}
    if keep:
        key = "ignore" if "config_groups" in form.config else "modules_to_not_convert"
        names = [*form.config.get(key, ()), *keep]
        config["quantization_config"] = {**form.config, key: names}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(file, str(folder / "model.safetensors"))
    return Quantized(folder, twin)


def is_quantized(name: str, tensor: Tensor) -> bool:
    inner = ("_proj.weight", "_proj_with_mqa.weight", "w1.weight", "w2.weight", "w3.weight")
    return name.endswith(inner) and tensor.dim() == 2


def load(folder: Path, ops: Ops | None = None, mesh: Mesh | None = None) -> tuple[Decoder, Build]:
    """The folder's model on one rank, read as the worker reads it."""
    checkpoint = open_checkpoint(str(folder))
    spec, scheme = read_spec(checkpoint.config), read_scheme(checkpoint.config)
    ops, mesh = ops or reference_ops(torch.float32), mesh or Mesh.single()
    need = attention_need(spec, mesh=mesh, device="cpu", block_size=16, dtype=torch.float32)
    methods = methods_of(scheme, ops, torch.float32, checkpoint.tensors.keys())
    build = Build(
        mesh=mesh,
        device="cpu",
        dtype=torch.float32,
        ops=ops,
        quant=methods.plain,
        attention=LatentSdpaAttention() if need.latent else SdpaAttention(),
        need=need,
    )
    decoder = build_model(spec, build, methods)
    load_weights(decoder, checkpoint)
    return decoder, build


def driver(folder: Path, ops: Ops | None = None) -> Driver:
    decoder, build = load(folder, ops)
    return Driver(decoder, build, num_blocks=50, seed=1)
