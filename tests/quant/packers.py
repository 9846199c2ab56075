"""Quantized checkpoints written from the formats' descriptions, in numpy, word by word.

Every packer takes a weight [N, K] and gives the tensors of its module and the weight that they
mean, both made without the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Tensors = dict[str, Tensor]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Form:
    """A form of checkpoint: its quantization_config, and how a weight is packed."""

    config: dict[str, Any]
    pack: Any  # (weight f64[N, K], generator) -> (tensors by suffix, weight f64[N, K])


def words_along_first(codes: Ints, order: list[int] | None = None) -> Tensor:
    """[8 W, C] -> i32[W, C]: the first of eight in the lowest bits."""
    order = order or list(range(8))
    out = np.zeros((codes.shape[0] // 8, codes.shape[1]), np.uint32)
    for word in range(out.shape[0]):
        for place in range(8):
            out[word] |= codes[word * 8 + order[place]].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(out.view(np.int32))


def words_along_last(codes: Ints, order: list[int] | None = None) -> Tensor:
    """[R, 8 W] -> i32[R, W]."""
    return words_along_first(np.ascontiguousarray(codes.T), order).t().contiguous()


def groups_of(weight: Floats, table: Ints, *, symmetric: bool) -> tuple[Ints, Floats, Ints]:
    """Codes [N, K] of 0 to 15, scales [N, G] that f16 holds, zeros [N, G]."""
    rows, columns = weight.shape
    count = int(table.max()) + 1
    codes = np.zeros((rows, columns), np.int64)
    scales, zeros = np.zeros((rows, count)), np.zeros((rows, count), np.int64)
    for group in range(count):
        mine = np.flatnonzero(table == group)
        part = weight[:, mine]
        if symmetric:
            scale = np.abs(part).max(1) / 7.5
            zero = np.full(rows, 8)
        else:
            least, most = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (most - least) / 15
            zero = np.clip(np.rint(-least / scale), 1, 15)
        scale = scale.astype(np.float16).astype(np.float64)
        codes[:, mine] = np.clip(np.rint(part / scale[:, None] + zero[:, None]), 0, 15)
        scales[:, group], zeros[:, group] = scale, zero
    return codes, scales, zeros


def meant(codes: Ints, scales: Floats, zeros: Ints, table: Ints) -> Floats:
    return (codes - zeros[:, table]) * scales[:, table]


def half(values: Floats) -> Tensor:
    return torch.from_numpy(values.astype(np.float16))


def awq(group: int) -> Form:
    def pack(weight: Floats, _: np.random.Generator) -> tuple[Tensors, Floats]:
        size = group if group > 0 else weight.shape[1]
        table = np.arange(weight.shape[1]) // size
        codes, scales, zeros = groups_of(weight, table, symmetric=False)
        tensors = {
            "qweight": words_along_last(np.ascontiguousarray(codes.T), AWQ_COLUMNS),
            "qzeros": words_along_last(np.ascontiguousarray(zeros.T), AWQ_COLUMNS),
            "scales": half(np.ascontiguousarray(scales.T)),
        }
        return tensors, meant(codes, scales, zeros, table)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return Form({**config, "version": "gemm", "modules_to_not_convert": ["lm_head"]}, pack)


def gptq(group: int, *, act_order: bool, symmetric: bool, version: str = "gptq") -> Form:
    def pack(weight: Floats, random: np.random.Generator) -> tuple[Tensors, Floats]:
        columns = weight.shape[1]
        size = group if group > 0 else columns
        table = np.arange(columns) // size
        if act_order:  # the same for all that share an input, as their Hessian is
            table = table[np.random.default_rng(columns).permutation(columns)]
        codes, scales, zeros = groups_of(weight, table, symmetric=symmetric)
        stored = zeros - (version == "gptq")
        tensors = {
            "qweight": words_along_first(np.ascontiguousarray(codes.T)),
            "qzeros": words_along_last(np.ascontiguousarray(stored.T)),
            "scales": half(np.ascontiguousarray(scales.T)),
            "g_idx": torch.from_numpy(table.astype(np.int32)),
        }
        return tensors, meant(codes, scales, zeros, table)

    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": act_order}
    return Form({**config, "sym": symmetric, "checkpoint_format": version}, pack)


def compressed_int4(group: int, *, symmetric: bool, act_order: bool = False) -> Form:
    def pack(weight: Floats, random: np.random.Generator) -> tuple[Tensors, Floats]:
        columns = weight.shape[1]
        table = np.arange(columns) // group
        if act_order:
            table = table[np.random.default_rng(columns).permutation(columns)]
        codes, scales, zeros = groups_of(weight, table, symmetric=symmetric)
        tensors = {
            "weight_packed": words_along_last(codes),
            "weight_scale": half(scales).to(torch.bfloat16),
            "weight_shape": torch.tensor(weight.shape),
        }
        scales = tensors["weight_scale"].double().numpy()
        if not symmetric:
            tensors["weight_zero_point"] = words_along_first(zeros)
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(table.astype(np.int32))
        return tensors, meant(codes, scales, zeros, table)

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    order = {"actorder": "group"} if act_order else {}
    return compressed({**weights, "symmetric": symmetric, **order}, None, pack, "pack-quantized")


def compressed(weights: dict, activations: dict | None, pack: Any, name: str) -> Form:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {"quant_method": "compressed-tensors", "format": name, "ignore": ["lm_head"]}
    return Form({**config, "config_groups": {"group_0": group}}, pack)


def e4m3(values: Floats) -> Tensor:
    return torch.from_numpy(values).clamp(-448, 448).to(torch.float32).to(torch.float8_e4m3fn)


def fp8_tensor(pack_scale: Any, *, static: bool, form: str) -> Form:
    def pack(weight: Floats, _: np.random.Generator) -> tuple[Tensors, Floats]:
        scale = np.float32(np.abs(weight).max() / 448)
        data = e4m3(weight / scale)
        tensors = {"weight": data, "weight_scale": pack_scale(scale)}
        if static:
            tensors["input_scale"] = pack_scale(np.float32(0.02))
        return tensors, data.double().numpy() * np.float64(scale)

    if form == "fp8":
        how = "static" if static else "dynamic"
        return Form({"quant_method": "fp8", "activation_scheme": how}, pack)
    dynamic = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    fixed = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    return compressed(weights, fixed if static else dynamic, pack, "float-quantized")


def fp8_channel() -> Form:
    def pack(weight: Floats, _: np.random.Generator) -> tuple[Tensors, Floats]:
        scale = (np.abs(weight).max(1, keepdims=True) / 448).astype(np.float32)
        data = e4m3(weight / scale)
        return (
            {"weight": data, "weight_scale": torch.from_numpy(scale)},
            data.double().numpy() * scale,
        )

    dynamic = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    return compressed(weights, dynamic, pack, "float-quantized")


def fp8_block() -> Form:
    def pack(weight: Floats, _: np.random.Generator) -> tuple[Tensors, Floats]:
        rows, columns = weight.shape
        scale = np.zeros((-(-rows // 128), -(-columns // 128)), np.float32)
        out, data = np.zeros_like(weight), np.zeros_like(weight)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                box = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
                scale[i, j] = np.abs(weight[box]).max() / 448
                data[box] = e4m3(weight[box] / scale[i, j]).double().numpy()
                out[box] = data[box] * np.float64(scale[i, j])
        return {"weight": e4m3(data), "weight_scale_inv": torch.from_numpy(scale)}, out

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return Form({**config, "weight_block_size": [128, 128]}, pack)


def int8_channel() -> Form:
    def pack(weight: Floats, _: np.random.Generator) -> tuple[Tensors, Floats]:
        scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
        data = np.rint(weight / scale).astype(np.int8)
        tensors = {"weight": torch.from_numpy(data), "weight_scale": torch.from_numpy(scale)}
        return tensors, data * scale.astype(np.float64)

    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    return compressed(weights, None, pack, "int-quantized")


FORMS: dict[str, Form] = {
    "awq-32": awq(32),
    "awq-64": awq(64),
    "awq-128": awq(128),
    "awq-rows": awq(-1),
    "gptq-128": gptq(128, act_order=False, symmetric=True),
    "gptq-32-zeros": gptq(32, act_order=False, symmetric=False),
    "gptq-64-act-order": gptq(64, act_order=True, symmetric=False),
    "gptq-v2": gptq(64, act_order=True, symmetric=True, version="gptq_v2"),
    "compressed-int4": compressed_int4(64, symmetric=True),
    "compressed-int4-zeros": compressed_int4(32, symmetric=False),
    "compressed-int4-act-order": compressed_int4(32, symmetric=True, act_order=True),
    "compressed-int8": int8_channel(),
    "fp8-dynamic": fp8_tensor(torch.tensor, static=False, form="fp8"),
    "fp8-static": fp8_tensor(torch.tensor, static=True, form="fp8"),
    "fp8-block": fp8_block(),
    "compressed-fp8-tensor": fp8_tensor(lambda x: torch.tensor([x]), static=True, form="ct"),
    "compressed-fp8-token": fp8_tensor(lambda x: torch.tensor([x]), static=False, form="ct"),
    "compressed-fp8-channel": fp8_channel(),
}
