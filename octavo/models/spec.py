"""ModelSpec: a decoder described by sizes and switches, read from a Hugging Face config.

Not for: weights (`weights/`) or names of tensors (a family's name map).
Next file: `models/decoder.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

RopeKind: TypeAlias = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Activation: TypeAlias = Literal["silu", "gelu_tanh"]
Norms: TypeAlias = Literal["before", "around"]  # where a block's norms stand


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions: base, rotated size, and how long contexts are scaled."""

    theta: float
    dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn's ramp begins and ends at whole pairs
    attention_factor: float | None = None  # None is the kind's default: `layers/rope.py`
    short_factors: tuple[float, ...] = ()  # of longrope, a divisor for each frequency
    long_factors: tuple[float, ...] = ()
    # Size of a head of which only the first `dim` dimensions turn; 0: all of it do.
    width: int = 0
    neighbours: bool = False  # the checkpoint pairs 0 with 1, not with dim / 2


def yarn_gain(factor: float, weight: float = 1.0) -> float:
    """Yarn's recommended gain on cos and sin for a stretch by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A layer of routed experts, and which layers are such."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    layers: tuple[bool, ...]
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False  # the chosen experts' weights sum to `scale`
    scale: float = 1.0
    groups: int = 1  # of experts, of which a token's come from `top_groups`
    top_groups: int = 1
    correction: bool = False  # a bias on the scores to choose by
    shared_size: int = 0  # width of the experts that all tokens go to; 0 is none
    shared_gate: bool = False
    # Experts and router have biases and the gate is bounded, see ClampedForm; 0: none of it.
    clamp: float = 0.0
    clamp_alpha: float = 0.0


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention: keys and values of all heads come from one vector a token."""

    rank: int  # of that vector, which is cached beside the rotated part of the keys
    plain_dim: int  # a head's query and key: this, not rotated, and `rope_dim` rotated
    rope_dim: int
    value_dim: int
    query_rank: int  # queries come through so many dimensions; 0: straight from the hidden state
    scale: float  # of the scores
    interleaved: bool = True  # neighbours are rotated together in the checkpoint, not halves


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and switches of one decoder-only model."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rms_eps: float
    rope: RopeSpec
    tied: bool  # output head is the embedding
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # of each head
    window: int = 0  # sliding window in tokens, 0 is none
    window_layers: tuple[bool, ...] = ()  # which layers have it; empty is all
    moe: MoeSpec | None = None
    latent: LatentSpec | None = None
    extra_layers: int = 0  # in the checkpoint after the model's own, for drafts; not loaded
    local_rope: RopeSpec | None = None  # of the layers with a window, if another than `rope`
    norms: Norms = "before"
    norm_offset: float = 0.0  # norms multiply by their weight plus this
    activation: Activation = "silu"
    attention_scale: float = 0.0  # 0 is head_dim ** -0.5
    attention_soft_cap: float = 0.0  # 0 is none
    sinks: bool = False  # each head may attend to nothing, by a learned score
    logit_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    fused_qkv: bool = False  # one tensor in the checkpoint: query, key, value rows
    fused_gate_up: bool = False
    dtype: str = "bfloat16"  # of the checkpoint
    eos_ids: tuple[int, ...] = ()
    quantization: str = ""
