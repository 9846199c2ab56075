"""Applies masks of a bit a token, as grammars give them, to logits.

Not for: making masks (`grammar/matcher.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ROWS = 16  # that are spread out at once: a bound on memory


def apply_masks(logits: Tensor, rows: Sequence[int], words: Tensor) -> None:
    """Changes logits f32[S, V] in place: row `rows[i]` keeps what i32[n, ceil(V / 32)] allows.

    Bit b of word w of a mask is that of token 32 w + b. `words` lie where the logits lie.
    """
    if logits.device.type == "cpu":
        _on_host(logits, rows, words)
    else:
        _on_device(logits, rows, words)


def _on_device(logits: Tensor, rows: Sequence[int], words: Tensor) -> None:
    vocab = logits.shape[1]
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    at = torch.tensor(rows, device=logits.device)
    for part, some in zip(torch.split(at, _ROWS), torch.split(words, _ROWS), strict=True):
        bits = (some.unsqueeze(2) >> shifts) & 1
        blocked = (bits == 0).view(len(part), -1)[:, :vocab]
        logits.index_copy_(0, part, logits[part].masked_fill_(blocked, -torch.inf))


def _on_host(logits: Tensor, rows: Sequence[int], words: Tensor) -> None:
    vocab = logits.shape[1]
    for row, some in zip(rows, words.numpy(), strict=True):
        bits = np.unpackbits(some.view(np.uint8), bitorder="little")[:vocab]
        logits[row].masked_fill_(torch.from_numpy(bits == 0), -torch.inf)


def allows_only(mask: NDArray[np.int32], ids: Sequence[int]) -> bool:
    """True if a mask i32[words] allows no token but `ids`."""
    rest = mask.copy()
    bits = rest.view(np.uint32)
    for token in ids:
        bits[token // 32] &= ~np.uint32(1 << (token % 32))
    return not rest.any()
