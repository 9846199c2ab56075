"""Small integers packed in 32-bit words, as AutoAWQ, GPTQ and compressed-tensors lay them.

All three put eight of 4 bits into a word, the first in the lowest bits. They differ in the
dimension that is packed and, for AutoAWQ, in the order of the eight. Next file: `int4.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

PER_WORD = 8
# AutoAWQ's word holds columns 0, 2, 4, 6, 1, 3, 5, 7 of its eight, from the lowest bits on.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack(words: Tensor) -> Tensor:
    """i32[..., W] -> u8[..., 8 W], each word's lowest bits first."""
    # As bytes, so that no temporary is eight times as large; words lie little-endian.
    halves = words.contiguous().view(torch.uint8)
    return torch.stack((halves & 15, halves >> 4), dim=-1).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """u8[..., 8 W] of 0 to 15 -> i32[..., W]; the inverse of `unpack`."""
    pairs = codes.view(*codes.shape[:-1], -1, 2)
    halves = (pairs[..., 0] | (pairs[..., 1] << 4)).contiguous()
    return halves.view(torch.int32)


def unpack_awq(words: Tensor) -> Tensor:
    """AutoAWQ's i32[R, W] -> u8[R, 8 W] in natural order."""
    codes = unpack(words)
    back = torch.tensor(AWQ_ORDER, device=words.device).argsort()
    eights = codes.view(*codes.shape[:-1], -1, PER_WORD)
    return eights.index_select(-1, back).flatten(-2)


def pack_awq(codes: Tensor) -> Tensor:
    """u8[R, 8 W] in natural order -> AutoAWQ's i32[R, W]."""
    order = torch.tensor(AWQ_ORDER, device=codes.device)
    eights = codes.view(*codes.shape[:-1], -1, PER_WORD)
    return pack(eights.index_select(-1, order).flatten(-2))
