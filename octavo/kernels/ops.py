"""Ops: the table of named kernels that layers, sampler and worker call, chosen once per device.

`reference.py` fills it with plain torch (the oracle and the path of last resort); `cpu/` with
native code. Which was taken and why is in `Ops.reason`, printed at start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from octavo.kernels.formats import Fp8, Grouped


class ExpertProduct(Protocol):
    """The weighted sum of the gated MLPs of each token's experts.

    Weights of experts that no token chose are not read.
    """

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, /) -> Tensor:
        """x [T, H], experts i64 or i32 [T, k], their weights f32[T, k] -> [T, H]."""


HeadProduct = Callable[[Tensor], Tensor]  # x [T, Q, K] -> [T, Q, N], each head by its own matrix


@dataclass(frozen=True, slots=True)
class ClampedForm:
    """Experts with biases and a bounded gate: (up + 1) * gate * sigmoid(alpha * gate).

    Gate is held to at most `limit`, up to at most as much on either side.
    """

    gate_up_bias: Tensor  # [E, 2 * I]
    down_bias: Tensor  # [E, H]
    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight matrix as a kernel wants it. `data` is owned; its layout is the kernel's secret."""

    data: Tensor
    rows: int  # N, output features
    columns: int  # K, input features
    dtype: torch.dtype  # of the activations that it multiplies
    layout: str  # "plain" [N, K], or the name of a packed layout
    extra: tuple[Tensor, ...] = ()  # scales and the like


@runtime_checkable
class JoiningExperts(Protocol):
    """An ExpertProduct that takes the experts that all tokens go to into its own launches."""

    def joins(self, tokens: int, gate_up: PackedWeight, down: PackedWeight) -> bool:
        """Whether it can and should for so many tokens: gate_up [2 * n * I, H], down [H, n * I]."""

    def joined(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        gate_up: PackedWeight,
        down: PackedWeight,
    ) -> Tensor:
        """As the product, plus what the shared MLP of these weights gives."""


@dataclass(frozen=True, slots=True)
class RouteRules:
    """How experts are chosen from a router's logits; `layers/experts.py` has it in plain torch."""

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False  # the chosen experts' weights sum to `scale`
    scale: float = 1.0
    groups: int = 1  # of experts, of which a token's come from `top_groups`
    top_groups: int = 1


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Sampling settings of S rows, as tensors; a step's view of the slot table."""

    temperature: Tensor  # f32[S], 0 is greedy
    top_k: Tensor  # i32[S], 0 is off
    top_p: Tensor  # f32[S]
    min_p: Tensor  # f32[S]
    seed: Tensor  # i64[S], the bits of an unsigned 64-bit seed
    position: Tensor  # i64[S], absolute position of the token to be sampled
    filtered: bool = True  # False: the host knows that no row has top_k, top_p or min_p set


@dataclass(frozen=True, slots=True)
class Ops:
    """Kernels by name. Shapes as in `forward.py`; x is bf16 or f32 and rows are contiguous."""

    name: str
    reason: str
    # [N, K] -> PackedWeight
    pack: Callable[[Tensor], PackedWeight]
    # x [T, K], weight, bias [N] or None, out dtype or None (= x's) -> [T, N]
    linear: Callable[[Tensor, PackedWeight, Tensor | None, torch.dtype | None], Tensor]
    # ids i32[T], weight -> [T, K], the rows of a (packed) embedding
    embed: Callable[[Tensor, PackedWeight], Tensor]
    # x [T, H], weight [H] of x's dtype or f32, eps -> [T, H]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    # x [T, H], residual [T, H], weight [H], eps -> (norm(x + residual), x + residual)
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    # q [T, Q, D], k [T, K, D], positions i32[T], cos_sin f32[max_len, D] (cos half, sin half)
    # -> rotated q, k; rotation of halves, not of interleaved pairs
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    # x [T, 2 * I] (gate half, up half) -> silu(gate) * up [T, I]
    silu_mul: Callable[[Tensor], Tensor]
    # The same with GELU in its tanh form for silu
    gelu_mul: Callable[[Tensor], Tensor]
    # logits f32[S, V], settings -> i32[S]; rows with temperature 0 are greedy.
    # The draw is a function of (logits, settings, seed, position) alone.
    sample: Callable[[Tensor, SampleRows], Tensor]
    # As `sample`; also sets i32[S] to 1 where a row has a logit that is not finite. None: such rows
    # are looked for apart.
    sample_checked: Callable[[Tensor, SampleRows, Tensor], Tensor] | None = None
    # Weights of 4 bits, and of 8-bit floats, for `linear` and `linear_silu` to multiply; None:
    # there are no such kernels, and weights are made plain.
    pack_grouped: Callable[[Grouped], PackedWeight] | None = None
    pack_fp8: Callable[[Fp8], PackedWeight] | None = None
    # linear and silu_mul in one: x [T, K], weight [2 * I, K], bias -> [T, I]; None: use the two.
    linear_silu: Callable[[Tensor, PackedWeight, Tensor | None], Tensor] | None = None
    # A whole stack of decoder blocks in one native call, or None: see `models/fused.py`.
    stack: Callable[..., Any] | None = None
    # Weights of a layer's experts, gate_up [E, 2 * I, H] and down [E, H, I] -> their product, in
    # the layout that it wants; None: made of the others, see `experts.py`.
    experts: Callable[[Tensor, Tensor], ExpertProduct] | None = None
    # logits f32[T, E], rules, correction f32[E] or None -> (experts [T, k], weights f32[T, k]);
    # None: plain torch.
    route: Callable[[Tensor, RouteRules, Tensor | None], tuple[Tensor, Tensor]] | None = None
    # The same for experts of that form; None: `kernels/experts.py`.
    clamped_experts: Callable[[Tensor, Tensor, ClampedForm], ExpertProduct] | None = None
    # Matrices of heads [Q, N, K] -> their product, in the layout that it wants; None: torch.bmm.
    apart: Callable[[Tensor], HeadProduct] | None = None
