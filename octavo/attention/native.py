"""Paged attention in native code: keys laid out for dot products, values for sums of pairs.

Heads that share a key head are rows of one product. A row's result is the same bits in decode, in
any prefill chunk and with any number of threads (`octavo/kernels/cpu/attention.h` says how).
Not for: other devices. Next file: `octavo/models/fused.py`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from octavo.attention.base import AttentionNeed
from octavo.errors import ConfigError
from octavo.forward import CacheLayout, ForwardBatch
from octavo.kernels.cpu.binding import CACHES, DTYPES, Heads, Library, load

MAX_BLOCK = 256
MAX_HEAD = 256


class NativeAttention:
    """An AttentionBackend over pages [N, K, P * D] of a private inner order."""

    __slots__ = ("_library",)

    name = "native"

    def __init__(
        self,
        library: Library | None = None,
        *,
        cache: Path | None = None,
        threads: int | None = None,
    ) -> None:
        """`library` None loads one, see `load`. Raises ConfigError if there is none."""
        loaded = library or load(cache, threads)
        if isinstance(loaded, str):
            raise ConfigError(f"native kernels cannot be used: {loaded}", "attention_backend")
        self._library = loaded

    def supports(self, need: AttentionNeed) -> str | None:
        """Heads of 16 to 256 in steps of 16, blocks up to 256; the cache may be in 8-bit floats."""
        reason = self._library.refuse(need.dtype)
        if reason:
            return reason
        if need.device != "cpu":
            return f"it runs on the CPU, not on {need.device}"
        if need.cache_dtype not in (need.dtype, *CACHES):
            return f"a cache of {need.cache_dtype} under activations of {need.dtype}"
        if need.sinks:
            return "no attention sinks"
        if need.cache_dtype == need.dtype and (need.key_scale, need.value_scale) != (1.0, 1.0):
            return f"scales of keys and values over a cache of {need.cache_dtype}, only over FP8"
        if need.head_dim % 16 or not 16 <= need.head_dim <= MAX_HEAD:
            return f"heads of {need.head_dim}: only multiples of 16 up to {MAX_HEAD}"
        if not 1 <= need.block_size <= MAX_BLOCK:
            return f"blocks of {need.block_size} tokens: only 1 to {MAX_BLOCK}"
        if need.num_heads % need.num_kv_heads:
            return f"{need.num_heads} heads do not divide over {need.num_kv_heads} key/value heads"
        return None

    def layout(self, need: AttentionNeed, num_blocks: int) -> CacheLayout:
        """Keys and values alike: [N, K, P * D]."""
        shape = (num_blocks, need.num_kv_heads, need.block_size * need.head_dim)
        return CacheLayout(shape, shape, need.cache_dtype)

    def plan(self, batch: ForwardBatch) -> object:
        """Nothing: the kernels plan for themselves, in microseconds."""
        return None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        need: AttentionNeed,
        batch: ForwardBatch,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, Q, D], k and v [T, K, D] already rotated -> [T, Q * D]. Causal."""
        assert sinks is None, "refused by `supports`"
        for tensor in (q, k, v):
            assert tensor.dtype == need.dtype, f"{tensor.dtype}, not {need.dtype}"
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        keys, values = batch.kv.keys[layer], batch.kv.values[layer]
        heads = Heads(
            need.num_heads,
            need.num_kv_heads,
            need.head_dim,
            need.block_size,
            need.scale,
            need.soft_cap,
            need.window,
            CACHES.get(need.cache_dtype, 0),
            need.key_scale,
            need.value_scale,
        )
        out = torch.empty(q.shape[0], need.num_heads * need.head_dim, dtype=q.dtype)
        self._library.call.oct_attention(
            self._library.pool,
            DTYPES[q.dtype],
            ctypes.byref(heads),
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            q.shape[0],
            _i32(batch.slot_map).data_ptr(),
            batch.num_rows,
            _i32(batch.q_indptr).data_ptr(),
            _i32(batch.kv_lens).data_ptr(),
            _i32(batch.block_table).data_ptr(),
            batch.block_table.shape[1],
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
        )
        return out


def _i32(tensor: Tensor) -> Tensor:
    assert tensor.dtype == torch.int32, f"{tensor.dtype} where i32 is wanted"
    assert tensor.is_contiguous(), "an index array is not contiguous"
    return tensor
