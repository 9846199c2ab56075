"""Rotary positions (Su et al. 2021, arXiv:2104.09864) as one table of cosines and sines.

The table is made once for all positions that the model may see; layers only look rows up. Ways
to stretch a model beyond its trained length change the frequencies, and here alone:

    default   frequencies theta^(-2i/d)
    linear    all divided by the factor (position interpolation, Chen et al. 2023,
              arXiv:2306.15595)
    dynamic   a larger theta once the table is longer than the trained length ("NTK-aware")
    llama3    long waves divided, short ones kept, a ramp between (Llama 3.1)
    yarn      the same idea with another ramp, and a gain on the attention (Peng et al. 2023,
              arXiv:2309.00071)
    longrope  each divided by a number of its own, which the checkpoint brings in two lists, for
              short and for long contexts, and a gain (Ding et al. 2024, arXiv:2402.13753)

Kernels turn all of a head, and pair dimension i with i + D/2. Where a model turns only some
dimensions, or pairs neighbours, the table has pairs that stand still and the rows of the query
and key projections are put into the order of `head_order`: scores do not depend on it.

Next file: `attention.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.kernels.ops import Ops
from octavo.layers.build import Build
from octavo.models.spec import RopeSpec, yarn_gain


class Rope:
    """Rotates queries and keys. `cos_sin` f32[max_len, D] holds the cos half, then the sin half."""

    __slots__ = ("_ops", "cos_sin")

    _ops: Ops

    def __init__(self, build: Build, spec: RopeSpec, max_len: int) -> None:
        self._ops = build.ops
        self.cos_sin = rope_table(spec, max_len).to(build.device)

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q [T, Q, D], k [T, K, D], positions i32[T] -> both rotated."""
        return self._ops.rope(q, k, positions, self.cos_sin)


def rope_table(spec: RopeSpec, max_len: int) -> Tensor:
    """f32[max_len, dim]: cos(p * f) for the dim/2 frequencies f, then sin(p * f).

    Frequencies are f32, as in the training code of these models; the angles need no more, since
    f32 holds every position exactly. `dynamic` and `longrope` depend on `max_len`, since keys once
    stored are not turned again: they are right for sequences of that length, and `max_len` up to
    the trained length gives the unstretched table. With a `width`, dim is that.
    """
    frequencies = rope_frequencies(spec, max_len)
    positions = torch.arange(max_len, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    if spec.width:  # pairs that stand still
        angles = torch.nn.functional.pad(angles, (0, (spec.width - spec.dim) // 2))
    cos, sin = angles.cos(), angles.sin()
    turning = slice(0, spec.dim // 2)
    gain = attention_gain(spec)
    cos[:, turning] *= gain
    sin[:, turning] *= gain
    return torch.cat((cos, sin), dim=1)


def length_note(spec: RopeSpec, max_len: int) -> str | None:
    """What to know of a table that is another one for short contexts; None if it is not."""
    if spec.kind not in ("dynamic", "longrope") or max_len <= spec.original_max_len:
        return None
    return (
        f"rope: {spec.kind} as for contexts of {max_len} tokens, in shorter ones too; with "
        f"--max-model-len {spec.original_max_len} or less it is that of the trained length"
    )


def rope_frequencies(spec: RopeSpec, max_len: int) -> Tensor:
    """f32[dim / 2], radians a position, falling."""
    match spec.kind:
        case "default":
            return _plain(spec.theta, spec.dim)
        case "linear":
            return _plain(spec.theta, spec.dim) / spec.factor
        case "dynamic":
            return _plain(_dynamic_theta(spec, max_len), spec.dim)
        case "llama3":
            return _llama3(spec)
        case "yarn":
            return _yarn(spec)
        case "longrope":
            long = max_len > spec.original_max_len
            factors = spec.long_factors if long else spec.short_factors
            return _plain(spec.theta, spec.dim) / torch.tensor(factors)


def attention_gain(spec: RopeSpec) -> float:
    """What cos and sin are multiplied by: 1, but for yarn and longrope."""
    if spec.kind not in ("yarn", "longrope"):
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.kind == "yarn":
        return yarn_gain(spec.factor)
    if spec.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_len))


def head_order(spec: RopeSpec) -> Tensor | None:
    """i64[D]: which dimension of a head in the checkpoint is which of ours; None if all stay.

    Ours are the first of each pair that turns, half of those that stand still, the second of each
    pair, and the rest.
    """
    width = spec.width or spec.dim
    if width == spec.dim and not spec.neighbours:
        return None
    turning, still = torch.arange(spec.dim), torch.arange(spec.dim, width)
    pairs = turning.view(-1, 2).t() if spec.neighbours else turning.view(2, -1)
    rest = still.view(2, -1)
    return torch.cat((pairs[0], rest[0], pairs[1], rest[1]))


def _plain(theta: float, dim: int) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / theta**exponents


def _dynamic_theta(spec: RopeSpec, max_len: int) -> float:
    """The base that makes the longest wave span `max_len` instead of the trained length."""
    length = max(max_len, spec.original_max_len)
    stretch = spec.factor * length / spec.original_max_len - (spec.factor - 1)
    return spec.theta * math.pow(stretch, spec.dim / (spec.dim - 2))


def _llama3(spec: RopeSpec) -> Tensor:
    """Blend by how often a wave fits into the trained length: few turns, divide; many, keep."""
    frequencies = _plain(spec.theta, spec.dim)
    turns = spec.original_max_len * frequencies / (2 * math.pi)
    span = spec.high_freq_factor - spec.low_freq_factor
    keep = ((turns - spec.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / spec.factor)


def _yarn(spec: RopeSpec) -> Tensor:
    """Blend by index: a ramp between the pairs that turn `beta_fast` and `beta_slow` times."""
    frequencies = _plain(spec.theta, spec.dim)

    def pair_turning(turns: float) -> float:
        wave = spec.original_max_len / (turns * 2 * math.pi)
        return spec.dim * math.log(wave) / (2 * math.log(spec.theta))

    first, last = pair_turning(spec.beta_fast), pair_turning(spec.beta_slow)
    if spec.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, spec.dim - 1)
    width = max(high - low, 0.001)  # a step instead of a ramp, without dividing by zero
    divide = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies * (1 - divide + divide / spec.factor)
