"""The middle path on CPUs without a compiler or AVX-512: torch's ops, linears prepacked for oneDNN.

The packing ops are private to torch, so a probe runs one small product and compares it before
they are trusted. Next file: `octavo/kernels/reference.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.ops import Ops, PackedWeight

LAYOUT = "onednn"


def onednn_ops(dtype: torch.dtype) -> Ops | str:
    """The table for activations of `dtype` (f32 or bf16), or the reason why it cannot be."""
    if dtype not in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        return f"oneDNN linears are for float32 and bfloat16, not {name}"
    reason = probe(dtype)
    if reason:
        return reason

    def pack(weight: Tensor) -> PackedWeight:
        rows, columns = weight.shape
        weight = weight.to(dtype).contiguous()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        # The plain matrix stays, as an embedding reads its rows.
        return PackedWeight(packed, rows, columns, dtype, LAYOUT, (weight,))

    return replace(
        reference.reference_ops(dtype),
        name="onednn",
        reason="prepacked oneDNN linears, the rest in plain torch",
        pack=pack,
        linear=linear,
        embed=embed,
    )


def probe(dtype: torch.dtype) -> str:
    """Why prepacked linears do not work in this build of torch; empty if they do."""
    weight = torch.arange(64, dtype=torch.float32).view(8, 8).sub_(32).to(dtype)
    x = torch.eye(8, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        y = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError) as error:
        return f"this torch has no prepacked linears: {str(error).splitlines()[0]}"
    if not torch.equal(y, weight.t()):
        return "this torch's prepacked linears give wrong results"
    return ""


def linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """x [T, K], bias [N] -> [T, N] in `out_dtype` or x's dtype."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.data, bias, "none", [], "")
    # Logits of bf16 models are rounded before they are widened, as in transformers: these ops
    # have no wide result, and widening the matrix instead costs more than the rest of the step.
    return result if out_dtype is None else result.to(out_dtype)


def embed(ids: Tensor, weight: PackedWeight) -> Tensor:
    """Ids i32[T] -> [T, K]."""
    return weight.extra[0].index_select(0, ids)
