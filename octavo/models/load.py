"""From a spec, or from a checkpoint, to a Decoder that runs.

Not for: reading files, which is `weights/`. Next file: `decoder.py`.
"""

from __future__ import annotations

import torch

from octavo.attention.base import AttentionNeed
from octavo.checkpoint.records import Checkpoint
from octavo.layers.build import Build
from octavo.layers.linear import share_kv_heads
from octavo.models.decoder import Decoder
from octavo.models.registry import family_of
from octavo.models.spec import ModelSpec
from octavo.parallel.mesh import Mesh
from octavo.weights.loader import LoadReport, Progress, checkpoint_names, load


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
    )


def build_model(spec: ModelSpec, build: Build) -> Decoder:
    """A decoder whose parameters are still to be set."""
    return Decoder(spec, build)


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
    elsewhere = frozenset(
        name for stage in decoder.other_stages() for name in checkpoint_names(stage, family.names)
    )
    return load(
        decoder,
        checkpoint,
        family.names,
        ignored=family.ignored_names(decoder.spec),
        elsewhere=elsewhere,
        progress=progress,
        device=device,
    )
