"""Block formats of GGUF files to floats, vectorised.

A block holds 32 or 256 weights of one row: packed small integers, and a scale (and offset) for
the block or for its sub-blocks. Layouts follow ggml's `ggml-common.h`. Every function takes blocks
u8[N, bytes] and gives f32[N, weights] with the same roundings as ggml's reference.
Not for: where blocks lie (`checkpoint/`) or rows of a tensor (`tensors.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.checkpoint.records import ENCODINGS

# Blocks at a time: the temporaries of one chunk (about 1 MiB each in float) stay in the cache.
CHUNK_WEIGHTS = 1 << 18


def dequantize(blocks: Tensor, encoding: str, dtype: torch.dtype) -> Tensor:
    """Blocks u8[N, bytes] -> dtype[N, weights]."""
    decode = DECODERS[encoding]
    size = ENCODINGS[encoding].block
    result = torch.empty(blocks.shape[0], size, dtype=dtype)
    step = CHUNK_WEIGHTS // size
    for start in range(0, blocks.shape[0], step):
        result[start : start + step] = decode(blocks[start : start + step])
    return result


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, as f32[N, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """u8[..., B] -> f32[..., 2 B]: all low halves, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1).float()


def _bits(packed: Tensor, width: int) -> Tensor:
    """u8[..., B] -> u8[..., 8 / width, B]: field i of every byte, lowest first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    return (packed.unsqueeze(-2) >> shifts.unsqueeze(-1)) & ((1 << width) - 1)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """32 bits at byte `start`, one a weight -> f32[N, 32] of 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (blocks[:, start : start + 4].unsqueeze(-1) >> shifts) & 1
    return bits.reshape(-1, 32).float() * 16


def _q4_0(blocks: Tensor) -> Tensor:
    """d f16, then 16 bytes of nibbles: d * (q - 8)."""
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    """d f16, m f16, 16 bytes of nibbles: d * q + m."""
    return _nibbles(blocks[:, 4:]).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    """d f16, 32 fifth bits, 16 bytes of nibbles: d * (q - 16)."""
    weights = _nibbles(blocks[:, 6:]).add_(_fifth_bits(blocks, 2))
    return weights.sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    """d f16, m f16, 32 fifth bits, 16 bytes of nibbles: d * q + m."""
    weights = _nibbles(blocks[:, 8:]).add_(_fifth_bits(blocks, 4))
    return weights.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    """d f16, 32 signed bytes: d * q."""
    return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(_half(blocks, 0))


def _q2_k(blocks: Tensor) -> Tensor:
    """16 bytes of (scale, minimum) nibbles, 64 bytes of 2-bit weights, d f16, dmin f16."""
    scales = blocks[:, :16]
    scale = (scales & 15).float() * _half(blocks, 80)  # [N, 16]
    minimum = (scales >> 4).float() * _half(blocks, 82)
    weights = _bits(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16).float()
    return (weights * scale.unsqueeze(2) - minimum.unsqueeze(2)).reshape(-1, 256)


def _q3_k(blocks: Tensor) -> Tensor:
    """32 bytes of third bits, 64 bytes of 2-bit weights, 12 bytes of 6-bit scales, d f16."""
    high = _bits(blocks[:, :32], 1).reshape(-1, 256)  # 1 here means: do not subtract 4
    low = _bits(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 256)
    packed = blocks[:, 96:108]
    scale_low = torch.cat((packed[:, :8] & 15, packed[:, :8] >> 4), dim=1)
    scale_high = _bits(packed[:, 8:], 2).reshape(-1, 16)
    scales = (scale_low | (scale_high << 4)).float() - 32
    scale = scales * _half(blocks, 108)  # [N, 16]
    weights = (low.float() + high.float() * 4 - 4).reshape(-1, 16, 16)
    return (weights * scale.unsqueeze(2)).reshape(-1, 256)


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes -> scales and minimums, f32[N, 8] each, of Q4_K and Q5_K."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minimum = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scale.float(), minimum.float()


def _q4_k(blocks: Tensor) -> Tensor:
    """d f16, dmin f16, 12 bytes of 6-bit scales, 128 bytes of nibbles: 8 sub-blocks of 32."""
    scale, minimum = _six_bit_scales(blocks[:, 4:16])
    scale, minimum = scale * _half(blocks, 0), minimum * _half(blocks, 2)
    weights = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return weights.mul_(scale.unsqueeze(2)).sub_(minimum.unsqueeze(2)).reshape(-1, 256)


def _q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit i belongs to sub-block i."""
    scale, minimum = _six_bit_scales(blocks[:, 4:16])
    scale, minimum = scale * _half(blocks, 0), minimum * _half(blocks, 2)
    weights = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    weights.add_(_bits(blocks[:, 16:48], 1).float().mul_(16))
    return weights.mul_(scale.unsqueeze(2)).sub_(minimum.unsqueeze(2)).reshape(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, d f16."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    high = _bits(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 256)
    scale = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    weights = low.add_(high.float().mul_(16)).sub_(32).reshape(-1, 16, 16)
    return weights.mul_(scale.unsqueeze(2)).reshape(-1, 256)


DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
