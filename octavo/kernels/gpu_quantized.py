"""Products with quantized weights on a GPU: which kernel takes how many rows.

4 bits: one row on the CUDA cores, up to MAX_ROWS on the tensor cores by our own kernels. More rows
need more arithmetic than reading: the weight is made plain again, each time or, where there is
memory for copies, once, and multiplied as plain ones are. 8-bit floats: few rows by our own kernel,
the rest by the vendor's library. Next file: `triton/w4a16.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from octavo.errors import ConfigError
from octavo.kernels import gpu_products as products
from octavo.kernels.formats import BLOCK, Fp8, Grouped
from octavo.kernels.ops import PackedWeight
from octavo.kernels.triton import fp8, w4a16
from octavo.kernels.triton.activation import silu_mul

W4, FP8 = "w4", "fp8"
UNIT = 16  # what the library needs rows and columns of 8-bit floats to be multiples of
FEW_WITH_COPY = 16  # rows up to which 4 bits are faster than a plain copy
FEWEST_BLOCKS = 4  # rows of a product with scales of blocks, in the library


def pack_grouped(weight: Grouped, *, dtype: torch.dtype, copy: bool) -> PackedWeight:
    """Words for the kernels; `extra` is (scales and zeros, columns' order, plain copy)."""
    if not w4a16.unit_of(weight.group):
        raise ConfigError(
            f"groups of {weight.group} columns are no multiple of 32, which kernels for 4 bits "
            "need; use a checkpoint in another form",
            "quantization",
        )
    rows, columns = weight.codes.shape
    words = w4a16.pack_words(weight)
    none = words.words.new_empty(0)
    order = none if weight.order is None else weight.order
    # The copy's columns stay in the order of the words.
    plain = replace(weight, order=None).plain(dtype) if copy else none
    return PackedWeight(words.words, rows, columns, dtype, W4, (words.meta, order, plain))


def pack_fp8(weight: Fp8, *, dtype: torch.dtype) -> PackedWeight:
    """8-bit floats; `extra` is (scales, the activations' scale or nothing).

    Small matrices that the library cannot multiply are made plain.
    """
    rows, columns = weight.data.shape
    if rows % UNIT or columns % UNIT:
        return PackedWeight(weight.plain(dtype), rows, columns, dtype, "plain")
    scale = weight.scale.contiguous()
    static = scale.new_empty(0)
    if weight.input_scale is not None:
        static = scale.new_full((1,), weight.input_scale)
    library = scale.new_empty(0)
    if scale.dim() == 2:
        library = _whole_blocks(scale)
    elif static.numel() and bool((scale == scale[0]).all()):
        library = scale[:1].clone()  # one for the tensor: the library's fastest form
    return PackedWeight(weight.data, rows, columns, dtype, FP8, (scale, static, library))


def _whole_blocks(scale: Tensor) -> Tensor:
    """f32[N, K / BLOCK] -> one for each BLOCK rows, if they are alike; else empty."""
    rows = scale.shape[0]
    if rows % BLOCK:
        return scale.new_empty(0)
    first = scale[::BLOCK]
    alike = bool((first.repeat_interleave(BLOCK, 0) == scale).all())
    return first.contiguous() if alike else scale.new_empty(0)


def linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """x [T, K] -> [T, N] in `out_dtype` or x's dtype."""
    if weight.layout == FP8:
        return _fp8(x, weight, bias, out_dtype or x.dtype)
    x, words, plain = _words(x, weight)
    if plain is not None:
        return products.plain(x, plain, bias, out_dtype)
    if x.shape[0] == 1:
        return w4a16.w4_row(x, words, bias, out_dtype=out_dtype)  # type: ignore[no-any-return]
    return w4a16.w4_rows(x, words, bias, out_dtype=out_dtype)  # type: ignore[no-any-return]


def linear_silu(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """x [T, K], rows of gates and then of ups -> silu(gate x) * up x [T, I]."""
    if weight.layout == FP8:
        return silu_mul(_fp8(x, weight, bias, x.dtype))  # type: ignore[no-any-return]
    x, words, plain = _words(x, weight)
    if plain is not None:
        return products.plain_silu(x, plain, bias)
    if x.shape[0] == 1:
        return w4a16.w4_row(x, words, bias, silu=True)  # type: ignore[no-any-return]
    return silu_mul(w4a16.w4_rows(x, words, bias))  # type: ignore[no-any-return]


def _words(x: Tensor, weight: PackedWeight) -> tuple[Tensor, w4a16.Words, Tensor | None]:
    """(x in the columns' order, the weight, and it made plain where that is faster)."""
    meta, order, copy = weight.extra
    if order.numel():
        x = x.index_select(1, order)
    words = w4a16.Words(weight.data, meta, weight.columns // meta.shape[1])
    if x.shape[0] <= (FEW_WITH_COPY if copy.numel() else w4a16.MAX_ROWS):
        return x, words, None
    return x, words, copy if copy.numel() else w4a16.w4_plain(words, weight.dtype)


def _fp8(x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    scale, static, library = weight.extra
    blocked = scale.dim() == 2
    if static.numel() and x.shape[0] <= fp8.FEW:  # rounded by the product itself
        return fp8.fp8_rows(  # type: ignore[no-any-return]
            x, static, weight.data, scale, bias, out_dtype=out_dtype
        )
    if blocked:
        rounded, x_scale = fp8.quantize_blocks(x)
    else:
        rounded, x_scale = fp8.quantize(x, static if static.numel() else None)
    if x.shape[0] <= fp8.FEW:
        return fp8.fp8_rows(  # type: ignore[no-any-return]
            rounded, x_scale, weight.data, scale, bias, out_dtype=out_dtype
        )
    if blocked:
        return _blocks(rounded, x_scale, weight, bias, out_dtype)
    if library.numel():
        scales = (x_scale, library)
    else:
        scales = (x_scale.expand(len(x)).view(-1, 1).contiguous(), scale.view(1, -1))
    out = torch._scaled_mm(
        rounded, weight.data.t(), *scales, out_dtype=out_dtype, use_fast_accum=True
    )
    return out if bias is None else out + bias


def _blocks(
    rounded: Tensor,
    x_scale: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Scales of 1 x 128 by scales of 128 x 128; of rows where blocks were broken, plain ones."""
    scale, _, library = weight.extra
    count = rounded.shape[0]
    if not library.numel() or weight.columns % BLOCK:
        wide = rounded.float() * x_scale.t().repeat_interleave(BLOCK, 1)[:, : weight.columns]
        plain = Fp8(weight.data, scale).plain(weight.dtype)
        return products.plain(wide.to(weight.dtype), plain, bias, out_dtype)
    fill = -count % FEWEST_BLOCKS
    if fill:
        rounded = functional.pad(rounded.view(torch.uint8), (0, 0, 0, fill)).view(rounded.dtype)
        x_scale = functional.pad(x_scale, (0, fill), value=1.0)
    out = functional.scaled_mm(
        rounded,
        weight.data.t(),
        x_scale.t(),
        functional.ScalingType.BlockWise1x128,
        library.t(),
        functional.ScalingType.BlockWise128x128,
        output_dtype=out_dtype,
    )[:count]
    return out if bias is None else out + bias
