"""Checkpoints with weights of 8 bits: 8-bit floats in the fp8 and compressed-tensors forms, and
whole numbers with a scale a row.

8-bit floats become an `Fp8` once, at load. Scales of whole tensors and of blocks become scales of
rows, since tensors that are fused have scales of their own; the weights' bits stay as they are.
Next file: `online.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.formats import BLOCK, FP8, Fp8
from octavo.kernels.ops import Ops, PackedWeight
from octavo.quant.none import matrix
from octavo.quant.scheme import Scheme
from octavo.weights.spec import ParamSpec, Part

DUMMY_SCALE = 0.02 / 80  # made-up 8-bit floats are normal, 80 wide
DUMMY_INPUT_SCALE = 0.02


class Fp8Checkpoint:
    """A QuantMethod: "weight" in 8-bit floats, its scale, and one of the activations if static."""

    __slots__ = ("_dtype", "_ops", "_scale", "_scheme", "by_rows", "name")

    def __init__(self, scheme: Scheme, ops: Ops, dtype: torch.dtype) -> None:
        self.name: str = scheme.form
        self.by_rows = scheme.activations != "static"
        self._scheme = scheme
        self._ops = ops
        self._dtype = dtype
        blocks = scheme.scales == "block" and scheme.form == "fp8"
        self._scale = "weight_scale_inv" if blocks else "weight_scale"

    def params(
        self, in_features: int, parts: tuple[Part, ...], in_start: int, in_full: int
    ) -> dict[str, ParamSpec]:
        """The matrix and its scales. Raises ConfigError where a cut breaks a block."""
        rows = sum(part.size for part in parts)
        kept = None if self._keeps else rows * in_features * self._dtype.itemsize
        specs = {"weight": matrix(FP8, in_features, parts, in_start, in_full, kept_bytes=kept)}
        match self._scheme.scales:
            case "block":
                specs[self._scale] = _block_scales(in_features, parts, in_start, in_full)
            case "channel":
                specs[self._scale] = ParamSpec(
                    (rows, 1), torch.float32, parts, 0, dummy=DUMMY_SCALE
                )
            case _:
                specs[self._scale] = ParamSpec(
                    (rows,), torch.float32, parts, 0, repeat=0, dummy=DUMMY_SCALE
                )
        if self._scheme.activations == "static":
            ones = tuple(Part(part.name, 1, 1, 0) for part in parts)
            specs["input_scale"] = ParamSpec(
                (len(parts),), torch.float32, ones, 0, dummy=DUMMY_INPUT_SCALE
            )
        return specs

    @property
    def _keeps(self) -> bool:
        """Whether the kernels multiply 8-bit floats: those round activations too."""
        return self._ops.pack_fp8 is not None and self._scheme.activations != "plain"

    def finish(self, params: dict[str, Tensor]) -> PackedWeight:
        """Hands an `Fp8` to the kernels, or plain weights."""
        scale = params.pop(self._scale)
        static = params.pop("input_scale", None)
        # Fused tensors have the same input, so that their scales differ by chance only.
        largest = None if static is None else float(static.max())
        if self._scheme.scales == "channel":
            scale = scale.squeeze(1)
        weight = Fp8(params.pop("weight"), scale, largest)
        if self._ops.pack_fp8 is None or not self._keeps:
            return self._ops.pack(weight.plain(self._dtype))
        return self._ops.pack_fp8(weight)

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]."""
        return self._ops.linear(x, weight, bias, None)


def _block_scales(
    in_features: int, parts: tuple[Part, ...], in_start: int, in_full: int
) -> ParamSpec:
    """[rows, K / BLOCK], of a tensor that has a row for BLOCK of ours."""
    end = in_start + in_features
    if in_start % BLOCK or (end % BLOCK and end != in_full):
        raise ConfigError(
            f"fp8 weights have blocks of {BLOCK} columns, and this rank's columns {in_start} to "
            f"{end} of {in_full} begin or end within one; use another tensor_parallel_size",
            "tensor_parallel_size",
        )
    first, last, full = in_start // BLOCK, -(-end // BLOCK), -(-in_full // BLOCK)
    shape = (sum(part.size for part in parts), last - first)
    return ParamSpec(
        shape, torch.float32, parts, 0, 1, first, full, repeat=BLOCK, dummy=DUMMY_SCALE
    )


class Int8Checkpoint:
    """A QuantMethod: "weight" of 8-bit whole numbers with a scale a row, made plain at load."""

    __slots__ = ("_dtype", "_ops", "name")

    by_rows = True

    def __init__(self, scheme: Scheme, ops: Ops, dtype: torch.dtype) -> None:
        self.name: str = scheme.form
        self._ops = ops
        self._dtype = dtype

    def params(
        self, in_features: int, parts: tuple[Part, ...], in_start: int, in_full: int
    ) -> dict[str, ParamSpec]:
        """The matrix and its scales, cut in either dimension."""
        rows = sum(part.size for part in parts)
        kept = rows * in_features * self._dtype.itemsize
        return {
            "weight": matrix(torch.int8, in_features, parts, in_start, in_full, kept_bytes=kept),
            "weight_scale": ParamSpec((rows, 1), torch.float32, parts, 0, dummy=DUMMY_SCALE),
        }

    def finish(self, params: dict[str, Tensor]) -> PackedWeight:
        """Plain weights."""
        weight = params.pop("weight").float() * params.pop("weight_scale")
        return self._ops.pack(weight.to(self._dtype))

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]."""
        return self._ops.linear(x, weight, bias, None)
