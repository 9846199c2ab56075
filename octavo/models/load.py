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
from octavo.models.registry import family_of, read_spec
from octavo.models.spec import ModelSpec
from octavo.parallel.mesh import Mesh
from octavo.weights.loader import Progress, load


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
    return AttentionNeed(
        num_heads=mesh.tp.share(spec.num_heads)[1],
        num_kv_heads=share_kv_heads(spec.num_kv_heads, mesh.tp)[1],
        head_dim=spec.head_dim,
        scale=spec.head_dim**-0.5,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype or dtype,
        device=device,
        window=spec.window,
    )


def build_model(spec: ModelSpec, build: Build) -> Decoder:
    """A decoder whose parameters are still to be set."""
    return Decoder(spec, build)


def load_model(
    checkpoint: Checkpoint,
    build: Build,
    *,
    spec: ModelSpec | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """A decoder with the weights of `checkpoint`, ready to run.

    `spec` is for a caller who has changed what the checkpoint's config says (a shorter context).
    `progress` gets (bytes read, bytes in all). Raises ConfigError and CheckpointError.
    """
    spec = spec or read_spec(checkpoint.config)
    family = family_of(spec.architecture)
    decoder = build_model(spec, build)
    load(
        decoder,
        checkpoint,
        family.names,
        ignored=family.ignored_names(spec),
        progress=progress,
    )
    return decoder
