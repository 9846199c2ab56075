"""A model built without memory: on the device `meta`, a rank at a time, by the engine's own code.

Not for: sizes of the cache (`forecast.py`). Next file: `forecast.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import NoReturn

import torch

from octavo.attention.base import AttentionBackend
from octavo.attention.mla_sdpa import LatentSdpaAttention
from octavo.attention.sdpa import SdpaAttention
from octavo.checkpoint.checkpoint import Checkpoint, open_checkpoint
from octavo.checkpoint.hub import HUB_ID
from octavo.config import WorkerConfig
from octavo.kernels.ops import Ops
from octavo.kernels.reference import reference_ops
from octavo.layers.build import Build
from octavo.layers.experts import Experts
from octavo.models.decoder import Decoder
from octavo.models.divide import check_sizes
from octavo.models.load import attention_need, build_model
from octavo.models.registry import read_spec
from octavo.models.spec import ModelSpec
from octavo.options import EngineArgs, cache_dir
from octavo.parallel.mesh import Axis, Mesh
from octavo.plan.gpus import Gpu
from octavo.plan.machine import Machine
from octavo.plan.shapes import SHAPES
from octavo.quant.none import Unquantized
from octavo.worker.assemble import Choices, build, cache_format, choose, plain_format, scheme_of

GPU_BLOCK = 64
TABLE_ROWS = 16  # of rotary tables, which are made on the host; `expect` counts them by itself


@dataclass(frozen=True, slots=True)
class Counts:
    """Parameters of a whole model, and those that one token meets."""

    total: int
    active: int
    experts: int  # of all routed experts


def open_for_plan(args: EngineArgs) -> tuple[Checkpoint, str]:
    """The checkpoint of which headers alone are read, and a note on where its sizes are from.

    A folder may hold nothing but config.json, and of a hub model no more is fetched. Raises
    CheckpointError.
    """
    path = Path(args.model).expanduser()
    if args.model in SHAPES and not path.exists():
        shape = _by_shape(args.model, dict(SHAPES[args.model]))
        return shape, "sizes: as published; name a folder to read its config.json instead"
    bare = path.is_dir() and not any(path.glob("*.safetensors"))
    of_hub = HUB_ID.fullmatch(args.model) is not None and not path.exists()
    headers_there = not bare and not of_hub and args.load_format != "dummy"
    checkpoint = open_checkpoint(
        args.model,
        revision=args.revision,
        download_dir=Path(args.download_dir) if args.download_dir else None,
        cache_dir=cache_dir(args),
        load_format=args.load_format if headers_there else "dummy",  # which fetches no weights
    )
    where = "headers of the weights" if checkpoint.tensors else "config.json alone"
    return checkpoint, f"sizes: {checkpoint.path}, {where}"


def _by_shape(name: str, config: dict[str, object]) -> Checkpoint:
    return Checkpoint(
        path=Path(name),
        kind="hf",
        name=name,
        config=config,
        generation={},
        chat_template=None,
        tensors={},
    )


def spec_of(checkpoint: Checkpoint, config: WorkerConfig) -> ModelSpec:
    """The model's spec, if it can be spread as the config says. Raises ConfigError."""
    spec = read_spec({**checkpoint.config, **dict(config.hf_overrides)})
    check_sizes(spec, config.parallel.tensor, config.parallel.pipeline)
    return spec


def choices_of(
    config: WorkerConfig, checkpoint: Checkpoint, spec: ModelSpec, machine: Machine
) -> Choices:
    """What an engine would choose on that machine; of rank 0. Raises ConfigError."""
    scheme = scheme_of(config, checkpoint)
    mesh = Mesh(tp=Axis(0, config.parallel.tensor))
    if machine.device is not None:
        return choose(config, spec, machine.device, scheme, mesh)
    dtype = torch.bfloat16 if config.dtype == "auto" else plain_format(config.dtype)
    need = attention_need(
        spec,
        mesh=mesh,
        device="cuda",
        block_size=config.block_size or GPU_BLOCK,
        dtype=dtype,
        cache_dtype=cache_format(config, dtype),
    )
    attention: AttentionBackend = SdpaAttention()
    if spec.latent is not None:
        attention = LatentSdpaAttention()
    return Choices(spec, dtype, gpu_ops(dtype, machine.gpu), attention, need, (), scheme)


def gpu_ops(dtype: torch.dtype, gpu: Gpu) -> Ops:
    """A table that says which weights a GPU's kernels keep packed, and computes nothing."""
    eight_bits = gpu.capability >= (8, 9)
    return replace(
        reference_ops(dtype),
        name="planned",
        pack_grouped=_never if dtype.itemsize == 2 else None,
        pack_fp8=_never if eight_bits and dtype.itemsize == 2 else None,
    )


def _never(_: object) -> NoReturn:
    raise AssertionError("a plan packs nothing")


def stages(config: WorkerConfig, choices: Choices, checkpoint: Checkpoint) -> Iterator[Decoder]:
    """The decoder of each stage, without weights; of its first rank, which holds the most."""
    parallel = config.parallel
    config = replace(config, max_model_len=TABLE_ROWS)
    for stage in range(parallel.pipeline):
        mesh = Mesh(Axis(0, parallel.tensor), Axis(stage, parallel.pipeline))
        yield build(config, choices, "meta", checkpoint, mesh)


def counts_of(choices: Choices) -> Counts:
    """Parameters, of the model in plain weights."""
    spec = replace(choices.spec, max_model_len=16)
    need = attention_need(
        spec, mesh=Mesh.single(), device="cpu", block_size=16, dtype=choices.dtype
    )
    latent = spec.latent is not None
    decoder = build_model(
        spec,
        Build(
            mesh=Mesh.single(),
            device="meta",
            dtype=choices.dtype,
            ops=reference_ops(choices.dtype),
            quant=Unquantized(reference_ops(choices.dtype), choices.dtype),
            attention=LatentSdpaAttention() if latent else SdpaAttention(),
            need=need,
        ),
    )
    total = experts = 0
    for _, layer in decoder.named_layers():
        count = sum(prod(param.shape) for param in layer.param_specs().values())
        total += count
        experts += count if isinstance(layer, Experts) else 0
    moe = spec.moe
    share = moe.top_k / moe.num_experts if moe else 1.0
    return Counts(total, total - experts + int(experts * share), experts)
