"""From a spec, or from a checkpoint, to a Decoder that runs.

Not for: reading files, which is `weights/`. Next file: `decoder.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from octavo.attention.base import AttentionNeed
from octavo.checkpoint.records import Checkpoint
from octavo.errors import CheckpointError, ConfigError
from octavo.layers.attention import Attention
from octavo.layers.build import Build
from octavo.layers.experts import ClampedExperts, Experts
from octavo.layers.latent import Absorbed
from octavo.layers.linear import Linear, share_kv_heads
from octavo.models.decoder import Decoder
from octavo.models.registry import family_of
from octavo.models.spec import ModelSpec
from octavo.parallel.mesh import Mesh
from octavo.quant.select import Methods, layer_method
from octavo.weights.loader import LoadReport, Names, Progress, checkpoint_names, load
from octavo.weights.spec import Part
from octavo.weights.tensors import read_tensor

# Parameters of quantized layers; all other names a family's own map has.
QUANTIZED = (
    *("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv"),
    *("weight_zero_point", "weight_g_idx", "input_scale"),
)
# What the config says already, and scales of the cache, which are read apart.
UNUSED = (r".*\.weight_shape", r".*\.[kv]_scale")


def attention_need(
    spec: ModelSpec,
    *,
    mesh: Mesh,
    device: str,
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
) -> AttentionNeed:
    """What `spec` asks of an attention backend on one rank; `cache_dtype` None is `dtype`."""
    latent = spec.latent
    if latent is not None:
        return AttentionNeed(
            num_heads=mesh.tp.share(spec.num_heads)[1],
            num_kv_heads=1,
            head_dim=latent.rank + latent.rope_dim,
            scale=latent.scale,
            block_size=block_size,
            dtype=dtype,
            cache_dtype=cache_dtype or dtype,
            device=device,
            latent=latent.rank,
        )
    return AttentionNeed(
        num_heads=mesh.tp.share(spec.num_heads)[1],
        num_kv_heads=share_kv_heads(spec.num_kv_heads, mesh.tp)[1],
        head_dim=spec.head_dim,
        scale=spec.attention_scale or spec.head_dim**-0.5,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype or dtype,
        device=device,
        window=spec.window,
        windows_only=spec.window > 0 and (not spec.window_layers or all(spec.window_layers)),
        soft_cap=spec.attention_soft_cap,
        sinks=spec.sinks,
    )


def build_model(spec: ModelSpec, build: Build, methods: Methods | None = None) -> Decoder:
    """A decoder whose parameters are still to be set; its weights are as `methods` say.

    Raises ConfigError where a layer cannot be quantized so.
    """
    decoder = Decoder(spec, build)
    if methods is None or methods.quantized is None:
        return decoder
    names = family_of(spec.architecture).names
    for dotted, layer in decoder.named_layers():
        if isinstance(layer, Linear):
            layer.use(layer_method(methods, layer, _modules(names, dotted, layer.parts)))
        elif isinstance(layer, Absorbed):
            _use_unpacked(methods, layer, _modules(names, dotted, layer.parts))
        elif isinstance(layer, Experts):
            weights = (names(f"{dotted}.{side}", part) for side, part in layer.modules())
            _use_unpacked(methods, layer, [name.removesuffix(".weight") for name in weights])
        elif isinstance(layer, ClampedExperts):
            refuse_experts(methods, dotted, names)
    return decoder


def set_cache_scales(decoder: Decoder, checkpoint: Checkpoint) -> int:
    """Gives the layers' needs the scales that the checkpoint has of keys and values.

    For a cache of 8-bit floats. The number of layers that got any. Raises CheckpointError if one is
    not a number above 0.
    """
    names = family_of(decoder.spec.architecture).names
    found = 0
    for index, block in zip(decoder.layers, decoder.blocks, strict=True):
        attention = block.attention
        if not isinstance(attention, Attention):
            continue
        weight = names(f"blocks.{index}.attention.qkv.weight", "k")
        module = weight.removesuffix(".k_proj.weight")
        scales = [_scale_of(checkpoint, module, side) for side in ("k", "v")]
        if scales != [None, None]:
            key, value = (1.0 if scale is None else scale for scale in scales)
            attention.need = replace(attention.need, key_scale=key, value_scale=value)
            found += 1
    return found


def _scale_of(checkpoint: Checkpoint, module: str, side: str) -> float | None:
    for name in (f"{module}.{side}_scale", f"{module}.{side}_proj.{side}_scale"):
        entry = checkpoint.tensors.get(name)
        if entry is None:
            continue
        value = read_tensor(entry, torch.float32).flatten().tolist()
        if len(value) != 1 or not 0 < value[0] < math.inf:
            raise CheckpointError(
                f"{entry.file}: {name} is {value}; a scale of the cache is one number above 0"
            )
        return float(value[0])
    return None


def _modules(names: Names, dotted: str, parts: Sequence[Part]) -> list[str]:
    """What the checkpoint calls the modules that a layer is made of."""
    weights = (names(f"{dotted}.weight", part.name) for part in parts)
    return [name.removesuffix(".weight") for name in weights]


def _use_unpacked(methods: Methods, layer: Absorbed | Experts, modules: Sequence[str]) -> None:
    """For layers without kernels for quantized weights: they are made plain at load."""
    if methods.of(modules) is methods.plain or methods.is_online:
        return
    assert methods.unpacked is not None
    layer.use(methods.unpacked)


def refuse_experts(methods: Methods, dotted: str, names: Names) -> None:
    """Experts in one tensor have no quantized form here. Raises ConfigError unless plain."""
    module = names(f"{dotted}.down", "").removesuffix(".weight")
    if methods.of([module]) is not methods.plain and not methods.is_online:
        raise ConfigError(
            f"routed experts ({module}) quantized as {methods.scheme} are not supported; use "
            "weights in bfloat16, float16 or float32",
            "quantization",
        )


def parameter_names(names: Names) -> Names:
    """The family's names for quantized parameters too: a weight's, with another suffix."""

    def named(dotted: str, part: str) -> str:
        layer, _, parameter = dotted.rpartition(".")
        experts = layer.endswith((".experts.gate_up", ".experts.down"))
        if parameter not in QUANTIZED and not experts:
            return names(dotted, part)
        weight = names(layer if experts else f"{layer}.weight", part)
        return f"{weight.removesuffix('.weight')}.{parameter}"

    return named


def load_weights(
    decoder: Decoder,
    checkpoint: Checkpoint,
    *,
    progress: Progress | None = None,
    device: str = "cpu",
) -> LoadReport:
    """Fills and finishes a built decoder with the weights of `checkpoint`, by its family's names.

    `progress` gets (bytes read, bytes in all). Raises CheckpointError.
    """
    family = family_of(decoder.spec.architecture)
    checkpoint = without_zero_biases(decoder, checkpoint)
    return load(
        decoder,
        checkpoint,
        parameter_names(family.names),
        ignored=(*family.ignored_names(decoder.spec), *UNUSED),
        elsewhere=frozenset(_of_other_stages(decoder, family.names)),
        progress=progress,
        device=device,
    )


def without_zero_biases(decoder: Decoder, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without biases of zeros that GPTQ's writer adds to every layer.

    Biases that are not zero stay, and are an error where the model has no place for them.
    """
    if not any(name.endswith(".qweight") for name in checkpoint.tensors):
        return checkpoint
    names = parameter_names(family_of(decoder.spec.architecture).names)
    used = {
        names(f"{dotted}.{name}", part.name)
        for dotted, layer in decoder.named_layers()
        for name, spec in layer.param_specs().items()
        for part in spec.parts
    }
    kept = {
        name: entry
        for name, entry in checkpoint.tensors.items()
        if name in used or not name.endswith(".bias") or bool(read_tensor(entry).any())
    }
    return replace(checkpoint, tensors=kept)


def _of_other_stages(decoder: Decoder, names: Names) -> Iterator[str]:
    """What the other stages of a pipeline may read, quantized or not."""
    for stage in decoder.other_stages():
        for name in checkpoint_names(stage, names):
            yield name
            yield from (f"{name.removesuffix('.weight')}.{suffix}" for suffix in QUANTIZED)
