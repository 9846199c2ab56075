"""Prefill by FlashInfer's build of FlashAttention-3, with modules built before the start.

FlashInfer (Ye et al. 2025, arXiv:2501.01005) compiles a module for each number format, head size,
window and soft cap, which takes minutes: so a start uses what `octavo kernels build` has built and
never builds itself. Its plan needs lengths on the host, once a step. Next file: `select.py`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.attention.base import AttentionNeed
from octavo.attention.prefill import trial
from octavo.errors import ConfigError
from octavo.forward import ForwardBatch
from octavo.kernels.flashinfer import HEADS, Module, spec_of
from octavo.kernels.triton.attention_decode import Heads
from octavo.kernels.triton.launch import gpu_of

WORKSPACE = 128 << 20  # bytes, as its documentation asks for
BUILD = "octavo kernels build"


def modules_of(need: AttentionNeed) -> tuple[Module, ...]:
    """Those that a model's layers need: a model with a window may have layers without one."""
    windows = (True, False) if need.window else (False,)
    return tuple(Module(need.dtype, need.head_dim, window, need.soft_cap > 0) for window in windows)


@dataclass(slots=True)
class Rows:
    """A step's rows on the host, and what was planned of them: once for each kind of layer."""

    first: int  # token in the batch
    indptr: Tensor  # i32[R+1] from 0, on the host
    page_indptr: Tensor  # i32[R+1]
    pages: Tensor  # i32[pages], on the device
    last_page: Tensor  # i32[R]: keys in the last page
    planned: dict[tuple[int, float, float], Any] = field(default_factory=dict)


class FlashInferPrefill:
    """A Prefill for Hopper, bf16 and f16."""

    name = "flashinfer"
    takes_all = False

    def __init__(self) -> None:
        """Raises ConfigError if FlashInfer cannot be imported."""
        try:
            self._package: Any = importlib.import_module("flashinfer")
        except (ImportError, OSError, RuntimeError) as error:
            raise ConfigError(
                f"flashinfer cannot be imported: {error}", "attention_backend"
            ) from None
        self._workspace: Tensor | None = None
        self._wrappers: dict[tuple[int, float, float], Any] = {}

    def supports(self, need: AttentionNeed) -> str | None:
        """Heads of 64, 128 and 256, no FP8, no sinks, its modules built; and a trial."""
        if not gpu_of(torch.device(need.device)).hopper:
            return "its FlashAttention-3 is for GPUs of compute capability 9"
        if need.dtype not in (torch.bfloat16, torch.float16):
            return f"no {need.dtype}, only bfloat16 and float16"
        if need.cache_dtype != need.dtype:
            return f"a cache of {need.cache_dtype} under activations of {need.dtype}"
        if need.sinks:
            return "no attention sinks"
        if need.head_dim not in HEADS:
            return f"heads of {need.head_dim}: only {', '.join(map(str, HEADS))}"
        for module in modules_of(need):
            spec = spec_of(module)
            if not spec.is_compiled:
                return f"its module {spec.name} is not built; run `{BUILD}`"
        return trial(self, need)

    def plan(self, need: AttentionNeed, batch: ForwardBatch, first: int) -> Rows:
        """Waits for the device if the host does not know the lengths."""
        lens = batch.kv_lens_host
        known = batch.kv_lens.cpu().numpy() if lens is None else lens
        lens = known[first : batch.num_rows]
        widths = -(-lens // need.block_size)
        ends = np.concatenate(([0], np.cumsum(widths))).astype(np.int32)
        # Where each page's number stands in the table, which is on the device.
        width = batch.block_table.shape[1]
        at = np.arange(ends[-1]) - np.repeat(ends[:-1], widths)
        at += np.repeat(np.arange(first, batch.num_rows), widths) * width
        table = batch.block_table.flatten()
        pages = table[torch.from_numpy(at).to(table.device)]
        last = lens - (widths - 1) * need.block_size
        return Rows(
            first,
            batch.q_indptr[first:].cpu() - first,
            torch.from_numpy(ends),
            pages,
            torch.from_numpy(last.astype(np.int32)),
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
        kind = (heads.window, heads.soft_cap, heads.scale)
        if kind not in planned.planned:
            planned.planned[kind] = self._planned(q, keys, heads, planned)
        first = planned.first
        planned.planned[kind].run(q[first:], (keys, values), out=out[first:])

    def _planned(self, q: Tensor, keys: Tensor, heads: Heads, rows: Rows) -> Any:
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)
        kind = (heads.window, heads.soft_cap, heads.scale)
        if kind not in self._wrappers:
            self._wrappers[kind] = self._package.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "HND", backend="fa3"
            )
        wrapper = self._wrappers[kind]
        _, kv_heads, page, size = keys.shape
        wrapper.plan(
            rows.indptr,
            rows.page_indptr,
            rows.pages,
            rows.last_page,
            heads.num_heads,
            kv_heads,
            size,
            page,
            causal=True,
            sm_scale=heads.scale,
            window_left=heads.window - 1 if heads.window else -1,
            logits_soft_cap=heads.soft_cap or None,
            q_data_type=q.dtype,
            kv_data_type=keys.dtype,
        )
        return wrapper
