"""What a model is given: one frozen batch of device tensors, and the paged cache.

Shape legend, used all over the tensor rooms:
    T tokens of a step      R rows (sequences) of a step   S sampled rows
    H hidden size           Q query heads                  K key/value heads
    D head size             V vocabulary                   I intermediate size
    N blocks in the cache   B block table width            P block size (tokens a page)

Next file: `worker/slots.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How one layer's pages lie in memory; the attention backend decides it."""

    key: tuple[int, ...]  # shape of the key pages of one layer
    value: tuple[int, ...]
    dtype: torch.dtype

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's keys and values."""
        count = 1
        for size in self.key:
            count *= size
        values = 1
        for size in self.value:
            values *= size
        return (count + values) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVCache:
    """Key and value pages of every layer of this stage."""

    keys: tuple[Tensor, ...]  # a layer: CacheLayout.key
    values: tuple[Tensor, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's rows. Decode rows (one token each) stand first, then prefill rows.

    Row r owns tokens q_indptr[r]..q_indptr[r+1]; its last token attends to kv_lens[r] positions,
    itself included. KV of all tokens of the batch is stored before any row attends, so rows of one
    batch may share pages that are filled in this very step.
    """

    num_rows: int
    num_tokens: int
    num_decodes: int
    positions: Tensor  # i32[T]
    slot_map: Tensor  # i32[T] page * P + offset: where a token's KV goes
    q_indptr: Tensor  # i32[R+1]
    kv_lens: Tensor  # i32[R]
    block_table: Tensor  # i32[R, B], rows may be wider than needed
    sample_rows: Tensor  # i32[S] index into T of the tokens whose logits are wanted
    max_q: int
    max_kv: int
    kv: KVCache
    attn: object = field(default=None)  # the attention backend's own plan of this step
    kv_lens_host: NDArray[np.int32] | None = None  # kv_lens as the host knows them, if it does
