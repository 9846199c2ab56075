"""Makes quantized tensors of plain weights, in the forms that `fp8.py` and `int4.py` read.

For `octavo quantize`. Scales that know of activations are in `aware.py`. Not for: writing files
(`octavo/weights/export.py`).
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from octavo.kernels.formats import Grouped, quantize_fp8
from octavo.quant.online import quantize_groups
from octavo.quant.words import PER_WORD, pack_awq

Method: TypeAlias = Literal["awq", "fp8", "int8"]
Tensors: TypeAlias = dict[str, Tensor]  # by the suffix of a module's name
GROUPS = (128, 64, 32)


def fp8_tensors(weight: Tensor) -> Tensors:
    """[N, K] -> 8-bit floats with a scale a row."""
    made = quantize_fp8(weight)
    return {"weight": made.data, "weight_scale": made.scale.unsqueeze(1)}


def int8_tensors(weight: Tensor) -> Tensors:
    """[N, K] -> whole numbers of 8 bits with a scale a row."""
    wide = weight.float()
    top = wide.abs().amax(dim=1, keepdim=True)
    scale = torch.where(top > 0, top / 127, torch.ones_like(top))
    codes = (wide / scale).round().clamp(-127, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}


def awq_grouped(weight: Tensor, group: int) -> Grouped:
    """[N, K] -> 4 bits with whole zero points, its scales as float16 holds them."""
    made = quantize_groups(weight, group, whole_zero=True)
    scale = made.scale.half().float()
    wide = weight.float().view(len(weight), -1, group)
    codes = (wide / scale.unsqueeze(-1) + made.zero.unsqueeze(-1)).round().clamp(0, 15)
    return Grouped(codes.to(torch.uint8).view(weight.shape), scale, made.zero, group)


def awq_tensors(weight: Tensor, group: int) -> Tensors:
    """[N, K] -> AutoAWQ's tensors; N is a multiple of 8."""
    made = awq_grouped(weight, group)
    return {
        "qweight": pack_awq(made.codes.t().contiguous()),
        "qzeros": pack_awq(made.zero.t().to(torch.uint8).contiguous()),
        "scales": made.scale.t().half().contiguous(),
    }


def common_group(shapes: list[tuple[int, ...]], most: int = 128) -> int:
    """The largest group, up to `most`, that divides all weights' columns; 0 if there is none."""
    if any(shape[0] % PER_WORD for shape in shapes):
        return 0
    fitting = (g for g in GROUPS if g <= most and all(shape[1] % g == 0 for shape in shapes))
    return next(fitting, 0)


def config_of(method: Method, group: int, kept: list[str]) -> dict[str, Any]:
    """The `quantization_config` that says how the tensors are to be read."""
    if method == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": kept,
        }
    token = {
        "num_bits": 8,
        "type": "float",
        "strategy": "token",
        "dynamic": True,
        "symmetric": True,
    }
    floats = method == "fp8"
    weights = {
        "num_bits": 8,
        "type": "float" if floats else "int",
        "strategy": "channel",
        "dynamic": False,
        "symmetric": True,
    }
    groups = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": token if floats else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if floats else "int-quantized",
        "quantization_status": "compressed",
        "ignore": kept,
        "config_groups": {"group_0": groups},
    }
