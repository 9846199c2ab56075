"""Prefill by FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), where a build of it is found.

Sources, in this order: the package `flash_attn_interface` of FlashAttention's own repository, and
the extension that an installed vllm package carries, which is loaded without importing vllm. A
third build, FlashInfer's, has another interface (`flashinfer.py`). Next file: `flashinfer.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.attention.base import AttentionNeed
from octavo.attention.prefill import trial
from octavo.errors import ConfigError
from octavo.forward import ForwardBatch
from octavo.kernels.triton.attention_decode import Heads
from octavo.kernels.triton.launch import gpu_of

INTERFACE = "flash_attn_interface"
EXTENSION = "_vllm_fa3_C"
ARGUMENTS = 37  # of the extension's `fwd`, as this file calls it
MAX_HEAD = 256


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's rows, the first query first."""

    first: int  # token in the batch
    indptr: Tensor  # i32[R+1] from 0
    lens: Tensor  # i32[R]
    table: Tensor  # i32[R, B]
    max_q: int
    max_kv: int


Call = Callable[[Tensor, Tensor, Tensor, Rows, Heads, Tensor], None]


class Fa3Prefill:
    """A Prefill for Hopper, bf16 and f16."""

    name = "fa3"
    takes_all = True

    def __init__(self) -> None:
        """Raises ConfigError with a reason for each source if there is none."""
        self._call = _find()

    def supports(self, need: AttentionNeed) -> str | None:
        """Heads up to 256, no FP8, no sinks; and it must pass a trial."""
        if not gpu_of(torch.device(need.device)).hopper:
            return "FlashAttention-3 is for GPUs of compute capability 9"
        if need.dtype not in (torch.bfloat16, torch.float16):
            return f"no {need.dtype}, only bfloat16 and float16"
        if need.cache_dtype != need.dtype:
            return f"a cache of {need.cache_dtype} under activations of {need.dtype}"
        if need.sinks:
            return "no attention sinks"
        if need.head_dim > MAX_HEAD:
            return f"heads of {need.head_dim}: {MAX_HEAD} at most"
        return trial(self, need)

    def plan(self, need: AttentionNeed, batch: ForwardBatch, first: int) -> Rows:
        """Rows before `first` have one token each."""
        return Rows(
            first,
            batch.q_indptr[first:] - first,
            batch.kv_lens[first:],
            batch.block_table[first:],
            batch.max_q,
            batch.max_kv,
        )

    def run(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        heads: Heads,
        planned: object,
        out: Tensor,
    ) -> None:
        """q [T, Q, D] over one layer's pages [N, K, P, D] into out [T, Q, D], both of all rows."""
        assert isinstance(planned, Rows), "planned by another"
        first = planned.first
        # It reads pages as [N, P, K, D], in any order of memory.
        pages = keys.transpose(1, 2), values.transpose(1, 2)
        self._call(q[first:], *pages, planned, heads, out[first:])


def _find() -> Call:
    reasons = []
    for source in (_of_interface, _of_vllm):
        try:
            return source()
        except (ImportError, OSError, RuntimeError, AttributeError, ConfigError) as error:
            reasons.append(str(error).strip().partition("\n")[0])
    raise ConfigError("no FlashAttention-3: " + "; ".join(reasons), "attention_backend")


def _window(heads: Heads) -> tuple[int, int]:
    """Keys before and after a query, itself not counted; -1 is all."""
    return (heads.window - 1, 0) if heads.window else (-1, -1)


def _of_interface() -> Call:
    attend: Any = importlib.import_module(INTERFACE).flash_attn_with_kvcache

    def call(
        q: Tensor, keys: Tensor, values: Tensor, rows: Rows, heads: Heads, out: Tensor
    ) -> None:
        found = attend(
            q,
            keys,
            values,
            cache_seqlens=rows.lens,
            page_table=rows.table,
            cu_seqlens_q=rows.indptr,
            max_seqlen_q=rows.max_q,
            softmax_scale=heads.scale,
            causal=True,
            window_size=_window(heads),
            softcap=heads.soft_cap,
        )
        out.copy_(found)

    return call


def _of_vllm() -> Call:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("no vllm package is installed", "attention_backend")
    folder = Path(next(iter(spec.submodule_search_locations))) / "vllm_flash_attn"
    files = sorted(folder.glob(f"{EXTENSION}*.so"))
    if not files:
        raise ConfigError(f"vllm has no {EXTENSION} in {folder}", "attention_backend")
    operators: Any = torch.ops
    operators.load_library(str(files[0]))
    forward = operators._vllm_fa3_C.fwd
    count = len(forward.default._schema.arguments)
    if count != ARGUMENTS:
        raise ConfigError(
            f"vllm's FlashAttention-3 takes {count} arguments, not {ARGUMENTS}: it is of another "
            "version than this program knows",
            "attention_backend",
        )

    def call(
        q: Tensor, keys: Tensor, values: Tensor, rows: Rows, heads: Heads, out: Tensor
    ) -> None:
        new_keys = new_values = query_values = None
        rotary_cos = rotary_sin = rotary_lens = None
        query_scale = key_scale = value_scale = None
        before, after = _window(heads)
        forward(
            *(q, keys, values, new_keys, new_values, query_values, out),
            *(rows.indptr, None, None, None, rows.lens, rows.max_q, rows.max_kv),
            *(rows.table, None, None, rotary_cos, rotary_sin, rotary_lens),
            *(query_scale, key_scale, value_scale),
            *(heads.scale, True, before, after, heads.soft_cap, True),
            *(None, 0, None, 0),  # metadata, splits (0: it chooses), packing, processors spared
            *(None, 1, 0, None),  # sinks, context parallelism
        )

    return call
