"""Puts a model together: number format, kernels, attention, decoder, weights, fusion.

Every choice leaves a line with its reason. Not for: the cache and steps (`worker.py`).
Next file: `models/load.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch

from octavo.attention.base import AttentionBackend, AttentionNeed
from octavo.attention.select import select as select_attention
from octavo.checkpoint.checkpoint import Checkpoint, open_checkpoint
from octavo.config import Place, WorkerConfig
from octavo.device.base import Device
from octavo.device.cpu import CpuDevice
from octavo.errors import ConfigError
from octavo.kernels.ops import Ops
from octavo.kernels.select import select as select_kernels
from octavo.layers.build import Build
from octavo.models.decoder import Block, Decoder
from octavo.models.divide import check_sizes
from octavo.models.fused import fuse
from octavo.models.load import attention_need, build_model, load_weights, set_cache_scales
from octavo.models.quantization import read_scheme
from octavo.models.registry import read_spec
from octavo.models.sparse import SparseBlock
from octavo.models.spec import ModelSpec
from octavo.parallel.mesh import Mesh
from octavo.quant.scheme import Kind, Scheme
from octavo.quant.select import methods_of, note_of
from octavo.weights.loader import LoadReport, load_dummy
from octavo.worker.memory import size_text
from octavo.worker.runner import Model

MAX_BLOCK_SIZE = 256
COPY_SHARE = 0.15  # of a GPU's memory, that plain copies of quantized weights may take

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FP8 = MappingProxyType(
    {
        "fp8": torch.float8_e4m3fn,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }
)
Bytes = Callable[[int, int], None]  # (bytes read, bytes in all)

# Made of the checkpoint's weights as they are loaded.
INT8: Kind = "int8"
INT4: Kind = "int4"
FP8: Kind = "fp8"
ONLINE: Mapping[str, Kind] = MappingProxyType({kind: kind for kind in (FP8, INT8, INT4)})


@dataclass(frozen=True, slots=True)
class Choices:
    """All that is decided before memory is taken."""

    spec: ModelSpec
    dtype: torch.dtype
    ops: Ops
    attention: AttentionBackend
    need: AttentionNeed
    notes: tuple[str, ...]
    scheme: Scheme | None = None  # of the weights


def open_device(config: WorkerConfig, place: Place | None = None) -> Device:
    """The device that the config names. Raises ConfigError if it cannot be used.

    Ranks of one machine share its cores, and take one GPU each, from the one named on.
    """
    place = place or Place()
    if config.device == "cpu":
        return CpuDevice(config.threads, sharers=place.local_size * config.parallel.replicas)
    name, _, index = config.device.partition(":")
    if name != "cuda" or not (index or "0").isdecimal():
        raise ConfigError(
            f"device {config.device!r} is not known; use cpu, cuda, or cuda:1 for another GPU than "
            "the first",
            "device",
        )
    from octavo.device.cuda_queue import CudaQueue

    return CudaQueue(int(index or "0") + place.local_rank, cache_dir=config.cache_dir)


def open_model(config: WorkerConfig) -> tuple[Checkpoint, ModelSpec]:
    """The checkpoint and its spec. Raises CheckpointError and ConfigError."""
    checkpoint = open_checkpoint(config.model, load_format=config.load_format)
    spec = read_spec({**checkpoint.config, **dict(config.hf_overrides)})
    check_sizes(spec, config.parallel.tensor, config.parallel.pipeline)
    return checkpoint, spec


def scheme_of(config: WorkerConfig, checkpoint: Checkpoint) -> Scheme | None:
    """How the model's weights are quantized, by the checkpoint or by the option.

    Raises ConfigError if the two contradict each other.
    """
    found = read_scheme({**checkpoint.config, **dict(config.hf_overrides)})
    asked = config.quantization
    if asked is None or (found is not None and asked == found.form):
        return found
    if asked not in ONLINE:
        has = f"is {found.form}" if found else "has plain weights"
        raise ConfigError(
            f"quantization is {asked!r}, but the checkpoint {has}; leave it out, or use "
            f"{', '.join(ONLINE)}",
            "quantization",
        )
    if found is None:
        return None if asked == INT8 else Scheme("online", ONLINE[asked])
    if asked == FP8 or (asked == INT4 and found.kind != "int4"):
        raise ConfigError(
            f"quantization is {asked!r}, but the checkpoint is quantized already ({found}); "
            "leave it out",
            "quantization",
        )
    return found


def choose(
    config: WorkerConfig,
    spec: ModelSpec,
    device: Device,
    scheme: Scheme | None = None,
    mesh: Mesh | None = None,
) -> Choices:
    """Decides number format, kernels and attention. Raises ConfigError."""
    dtype, dtype_note = _dtype(config, spec, device)
    copies = device.own_memory and copies_fit(spec, scheme, device.total_memory())
    ops, kernel_notes = select_kernels(
        dtype,
        config.kernels,
        cache=None if config.cache_dir is None else Path(config.cache_dir),
        threads=device.threads,
        device=device.name,
        int8=config.quantization == INT8,
        int4=config.quantization == INT4,
        copies=copies,
    )
    need = attention_need(
        spec,
        mesh=mesh or Mesh.single(),
        device=device.name,
        block_size=_block_size(config, device),
        dtype=dtype,
        cache_dtype=cache_format(config, dtype),
    )
    attention, attention_notes = select_attention(need, config.attention_backend)
    weights = [] if scheme is None else [note_of(scheme, ops, dtype)]
    if scheme is not None and spec.moe is not None:
        stay = "stay" if scheme.form == "online" else "are made"
        weights.append(f"weights: routed experts {stay} {_name(dtype)}")
    if copies:
        size = size_text(plain_bytes(spec))
        weights.append(f"weights: for products of many rows plain ones are kept too, {size}")
    notes = (dtype_note, *kernel_notes, *weights, *attention_notes)
    return Choices(spec, dtype, ops, attention, need, notes, scheme)


def copies_fit(spec: ModelSpec, scheme: Scheme | None, total_bytes: int) -> bool:
    """Whether weights of 4 bits are kept plain too, which more than a few rows are faster with."""
    if scheme is None or scheme.kind != "int4":
        return False
    return plain_bytes(spec) <= COPY_SHARE * total_bytes


def plain_bytes(spec: ModelSpec) -> int:
    """Bytes of a dense model's linear layers in 16 bits, without the head."""
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return 2 * spec.num_layers * spec.hidden_size * (heads + 3 * spec.intermediate_size)


def build(
    config: WorkerConfig,
    choices: Choices,
    device: str,
    checkpoint: Checkpoint,
    mesh: Mesh | None = None,
) -> Decoder:
    """The decoder without weights, on `device` by its name.

    Positions beyond the longest sequence get no rotary table.
    """
    longest = config.max_model_len or 0
    spec = choices.spec
    if 0 < longest < spec.max_model_len:
        spec = replace(spec, max_model_len=longest)
    methods = methods_of(choices.scheme, choices.ops, choices.dtype, checkpoint.tensors.keys())
    return build_model(
        spec,
        Build(
            mesh=mesh or Mesh.single(),
            device=device,
            dtype=choices.dtype,
            ops=choices.ops,
            quant=methods.plain,
            attention=choices.attention,
            need=choices.need,
        ),
        methods,
    )


def check_room(decoder: Decoder, free_bytes: int) -> None:
    """Refuses a model whose weights alone are more than the memory left. Raises ConfigError."""
    needed = weight_bytes(decoder)
    if needed > free_bytes:
        raise ConfigError(
            f"the model's weights need {size_text(needed)}, but only {size_text(free_bytes)} of "
            "memory is free; use a smaller model or a machine with more memory",
            "model",
        )


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of this rank's weights once they are finished; they need not be there yet."""
    return sum(
        prod(param.shape) * param.dtype.itemsize if param.kept_bytes is None else param.kept_bytes
        for _, layer in decoder.named_layers()
        for param in layer.param_specs().values()
    )


def fill(
    decoder: Decoder, checkpoint: Checkpoint, config: WorkerConfig, device: Device, progress: Bytes
) -> LoadReport:
    """Loads the weights onto the device, or makes some up there for the load format "dummy"."""
    if config.load_format == "dummy":
        return load_dummy(decoder, seed=config.seed, device=device.name)
    return load_weights(decoder, checkpoint, progress=progress, device=device.name)


def scale_cache(decoder: Decoder, checkpoint: Checkpoint, choices: Choices) -> str:
    """Takes the checkpoint's scales for a cache of 8-bit floats; a note, "" for other caches."""
    if choices.need.cache_dtype.itemsize > 1:
        return ""
    count = set_cache_scales(decoder, checkpoint)
    how = f"scales of {count} layers from the checkpoint" if count else "unscaled"
    return f"kv cache: {_name(choices.need.cache_dtype)}, {how}"


def shortened(decoder: Decoder) -> Decoder:
    """The same with one block of each kind, and the last: it launches all kernels of the whole one.

    The last block is not like others: it may work for the tokens alone that are sampled.
    """
    short = copy(decoder)
    kinds = {_kind_of(block): block for block in reversed(decoder.blocks)}
    short.blocks = (*kinds.values(), *decoder.blocks[-1:])
    return short


def _kind_of(block: Block | SparseBlock) -> tuple[AttentionNeed, type]:
    """What its kernels are compiled for; scales are given to them as they run."""
    return replace(block.attention.need, key_scale=1.0, value_scale=1.0), type(block.mlp)


def finish(decoder: Decoder, ops: Ops) -> tuple[Model, str]:
    """The model to run, fused if it can be, and a note that says so."""
    fused = fuse(decoder, ops)
    if isinstance(fused, str):
        return decoder, f"layers: one call a kernel: {fused}"
    return fused, "layers: fused into native calls"


def _dtype(config: WorkerConfig, spec: ModelSpec, device: Device) -> tuple[torch.dtype, str]:
    """The activations' number format and why."""
    if config.dtype == "auto":
        dtype, reason = device.default_dtype(), device.default_dtype_reason()
    else:
        dtype, reason = _dtype_named(config.dtype, "dtype"), "as set"
    return dtype, f"dtype: {_name(dtype)}, {reason} (the checkpoint has {spec.dtype})"


def cache_format(config: WorkerConfig, dtype: torch.dtype) -> torch.dtype:
    """The number format of keys and values, under activations of `dtype`. Raises ConfigError."""
    if config.kv_cache_dtype == "auto":
        return dtype
    if config.kv_cache_dtype in _FP8:
        return _FP8[config.kv_cache_dtype]
    wanted = _dtype_named(config.kv_cache_dtype, "kv_cache_dtype")
    if wanted != dtype:
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype}, but the model runs in {_name(dtype)} and "
            "keys and values are kept in its format; use auto",
            "kv_cache_dtype",
        )
    return wanted


def plain_format(name: str) -> torch.dtype:
    """The number format of activations by its name. Raises ConfigError."""
    return _dtype_named(name, "dtype")


def _dtype_named(name: str, option: str) -> torch.dtype:
    for dtype in _DTYPES:
        if _name(dtype) == name:
            return dtype
    known = ", ".join(map(_name, _DTYPES))
    raise ConfigError(f"{option} {name!r} is not known; use auto, {known}", option)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _block_size(config: WorkerConfig, device: Device) -> int:
    size = device.block_size if config.block_size is None else config.block_size
    if not 1 <= size <= MAX_BLOCK_SIZE:
        raise ConfigError(
            f"block_size is {size}: use 1 to {MAX_BLOCK_SIZE} tokens a block", "block_size"
        )
    return size
