"""Paged attention on NVIDIA GPUs by our own Triton kernels.

Pages lie as [N, K, P, D], so that a page of one head is one run of memory. A step's rows with one
query each take a decode form (`attention_decode.py`), all others a `Prefill`.
Everything that changes from step to step is read on the device from memory that stays where it is,
so `forward` can be captured in a CUDA graph; `plan` may be called in the capture or before each
replay. What a captured graph fixes is the number of rows and the form: `choose` names the form for
a step's lengths. Not for: other devices. Next file: `octavo/kernels/gpu.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.base import AttentionNeed, HeadRules
from octavo.attention.prefill import Prefill, TritonPrefill
from octavo.errors import ConfigError
from octavo.forward import CacheLayout, ForwardBatch
from octavo.kernels.triton import attention_tiles as tiles
from octavo.kernels.triton.attention_decode import Heads, decode
from octavo.kernels.triton.attention_newest import Newest
from octavo.kernels.triton.attention_pieces import Pieces, list_pieces
from octavo.kernels.triton.launch import gpu_of
from octavo.kernels.triton.rotary import rope_store, store

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
EVEN, UNEVEN = "even", "uneven"  # forms of a decode step
MAX_HEAD = 256


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A step's work: decode rows by pieces, and the rows after them."""

    decodes: int  # rows that the decode kernel serves
    pieces: Pieces | None
    windowed: Pieces | None  # for layers with a window
    prefill: object  # what the Prefill planned; None without such rows
    even: bool = False  # rows are all decode rows, none of which is cut unevenly


@dataclass(frozen=True, slots=True)
class _Room:
    """Memory that plans point into, as long as the backend lives."""

    rows: int
    items: tuple[Tensor, Tensor]  # of layers without a window, of those with one
    firsts: Tensor  # i32[2, rows]
    counts: Tensor
    partial: Tensor
    lse: Tensor
    arrived: Tensor


class TritonAttention:
    """An AttentionBackend, and a FusedAttention, over pages [N, K, P, D]."""

    forms = (EVEN, UNEVEN)

    def __init__(self, prefill: Prefill | None = None) -> None:
        """`prefill` serves rows that are not decodes; None: our own kernels."""
        self._prefill = prefill or TritonPrefill()
        self.name = self._prefill.name
        self._need: AttentionNeed | None = None
        self._room: _Room | None = None
        self._outgrown: list[_Room] = []  # captured graphs may still point into them

    def supports(self, need: AttentionNeed) -> str | None:
        """Heads of 16 to 256 in steps of 16, pages of 16 to 128, f32, bf16, f16 and FP8 caches."""
        reason = device_reason(need)
        if reason:
            return reason
        if need.dtype not in DTYPES:
            return f"no {need.dtype}, only float32, bfloat16 and float16"
        if need.cache_dtype != need.dtype and need.cache_dtype not in FP8:
            return f"a cache of {need.cache_dtype} under activations of {need.dtype}"
        if need.cache_dtype in FP8 and need.dtype == torch.float32:
            return "an FP8 cache under activations of float32, only under bfloat16 and float16"
        if need.cache_dtype not in FP8 and (need.key_scale, need.value_scale) != (1.0, 1.0):
            return f"scales of keys and values over a cache of {need.cache_dtype}, only over FP8"
        if need.head_dim % 16 or not 16 <= need.head_dim <= MAX_HEAD:
            return f"heads of {need.head_dim}: only multiples of 16 up to {MAX_HEAD}"
        if need.block_size not in (16, 32, 64, 128):
            return f"blocks of {need.block_size} tokens: only 16, 32, 64 and 128"
        if need.num_heads % need.num_kv_heads:
            return f"{need.num_heads} heads do not divide over {need.num_kv_heads} key/value heads"
        if need.num_heads // need.num_kv_heads > 64:
            return f"{need.num_heads // need.num_kv_heads} heads share a key head: 64 at most"
        return self._prefill.supports(need)

    def layout(self, need: AttentionNeed, num_blocks: int) -> CacheLayout:
        """Keys and values alike: [N, K, P, D]. Plans are made for the need given here last."""
        self._need = need
        shape = (num_blocks, need.num_kv_heads, need.block_size, need.head_dim)
        return CacheLayout(shape, shape, need.cache_dtype)

    def reserve(self, max_rows: int) -> None:
        """Takes the memory for plans of up to `max_rows` decode rows; before any capture."""
        need, shape = self._sizes()
        pieces = tiles.room_of(max_rows, shape)
        device = torch.device(need.device)

        def ints(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        if self._room is not None:
            self._outgrown.append(self._room)
        heads = pieces * need.num_heads
        self._room = _Room(
            max_rows,
            (ints(3 * pieces), ints(3 * pieces)),
            ints(2, max_rows),
            ints(2, max_rows),
            torch.zeros(heads * need.head_dim, dtype=torch.float32, device=device),
            torch.zeros(heads, dtype=torch.float32, device=device),
            ints(max_rows * need.num_kv_heads),
        )

    def choose(self, lens: NDArray[np.int32]) -> str:
        """The form for decode rows that attend to `lens` i32[R] keys: EVEN or UNEVEN."""
        need, shape = self._sizes()
        seen = np.minimum(lens, need.window) if need.windows_only else lens
        return UNEVEN if tiles.is_uneven(seen, shape) else EVEN

    def plan(self, batch: ForwardBatch, form: str | None = None) -> TritonPlan:
        """Launches what all layers share. `form` None: chosen by the host's copy of lengths.

        Without such a copy in the batch the device is asked, which waits for it.
        """
        decodes = batch.num_decodes
        mixed = decodes < batch.num_rows
        if mixed and self._prefill.takes_all:
            decodes = 0
        pieces, windowed = self._pieces(batch, form) if decodes else (None, None)
        rest = self._prefill.plan(self._sizes()[0], batch, decodes) if mixed else None
        even = (
            decodes == batch.num_rows == batch.num_tokens
            and pieces is windowed
            and pieces is not None
            and pieces.splits > 0
        )
        return TritonPlan(decodes, pieces, windowed, rest, even)

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
        store(
            k,
            v,
            batch.slot_map,
            batch.kv.keys[layer],
            batch.kv.values[layer],
            key_scale=need.key_scale,
            value_scale=need.value_scale,
        )
        return self._attend(q.contiguous(), layer, need, batch, sinks)

    def forward_fused(
        self,
        qkv: Tensor,
        rules: HeadRules,
        layer: int,
        need: AttentionNeed,
        batch: ForwardBatch,
        rows: Tensor | None = None,
    ) -> Tensor:
        """QKV [T, (Q + 2K) * D] as projected -> [T, Q * D]; norms, rotation and store included.

        Of few rows that all decode, attention itself does these. With `rows` i32[S], tokens whose
        result alone is wanted: [S, Q * D].
        """
        plan = batch.attn
        norms = rules.query_norm is not None
        if (
            isinstance(plan, TritonPlan)
            and plan.even
            and tiles.turns_newest(plan.decodes, self._sizes()[1], norms=norms)
        ):
            newest = Newest(
                qkv,
                batch.positions,
                batch.slot_map,
                rules.cos_sin,
                rules.query_norm,
                rules.key_norm,
                rules.eps,
                need.key_scale,
                need.value_scale,
            )
            found = self._attend(qkv, layer, need, batch, rules.sinks, newest=newest)
            return found if rows is None else found.index_select(0, rows)
        q = rope_store(
            qkv,
            batch.kv.keys[layer],
            batch.kv.values[layer],
            positions=batch.positions,
            slot_map=batch.slot_map,
            num_heads=need.num_heads,
            cos_sin=rules.cos_sin,
            query_norm=rules.query_norm,
            key_norm=rules.key_norm,
            eps=rules.eps,
            key_scale=need.key_scale,
            value_scale=need.value_scale,
        )
        found = self._attend(q, layer, need, batch, rules.sinks)
        return found if rows is None else found.index_select(0, rows)

    def _attend(
        self,
        q: Tensor,
        layer: int,
        need: AttentionNeed,
        batch: ForwardBatch,
        sinks: Tensor | None = None,
        newest: Newest | None = None,
    ) -> Tensor:
        plan = batch.attn
        assert isinstance(plan, TritonPlan), "the batch was planned by another backend"
        keys, values = batch.kv.keys[layer], batch.kv.values[layer]
        assert (sinks is not None) == need.sinks, "sinks come where the need has them"
        heads = Heads(
            need.num_heads,
            need.scale * need.key_scale,
            need.window,
            need.soft_cap,
            sinks,
            need.value_scale,
        )
        out = q.new_empty(q.shape[0], need.num_heads, need.head_dim)
        rows = plan.decodes
        pieces = plan.windowed if need.window else plan.pieces
        if pieces is not None:
            decode(
                q[:rows],
                keys,
                values,
                batch.block_table[:rows],
                batch.kv_lens[:rows],
                heads,
                pieces,
                tiles.decode_tile(self._sizes()[1]),
                out[:rows],
                newest=newest,
            )
        if plan.prefill is not None:
            self._prefill.run(q, keys, values, heads, plan.prefill, out)
        return out.view(q.shape[0], -1)

    def _pieces(self, batch: ForwardBatch, form: str | None) -> tuple[Pieces, Pieces]:
        """(for layers without a window, for layers with one)."""
        rows = batch.num_decodes
        need, shape = self._sizes()
        if self._room is None or self._room.rows < rows:
            self.reserve(rows)
        even = self._room_for(tiles.splits_of(rows, shape), 0, len(self._rooms().items[0]))
        if form is None:
            lens = batch.kv_lens_host
            form = self.choose(batch.kv_lens[:rows].cpu().numpy() if lens is None else lens[:rows])
        if form == EVEN:
            return even, even
        assert form == UNEVEN, form
        aim = tiles.aim_of(rows, shape)
        block = tiles.decode_tile(shape).keys

        def listed(kind: int, window: int) -> Pieces:
            pieces = self._room_for(0, kind, 3 * (aim + rows))
            list_pieces(batch.kv_lens[:rows], pieces, aim=aim, block=block, window=window)
            return pieces

        windows = need.window > 0 and tiles.lists_windows(rows, need.window, shape)
        windowed = listed(1, need.window) if windows else even
        return (even if need.windows_only else listed(0, 0)), windowed

    def _room_for(self, splits: int, kind: int, size: int) -> Pieces:
        """Memory for pieces; `kind` 1 is of layers with a window, `size` that of items."""
        room = self._rooms()
        return Pieces(
            splits,
            room.items[kind][:size].view(3, -1),
            room.firsts[kind],
            room.counts[kind],
            room.partial,
            room.lse,
            room.arrived,
        )

    def _rooms(self) -> _Room:
        assert self._room is not None, "reserve comes first"
        return self._room

    def _sizes(self) -> tuple[AttentionNeed, tiles.DecodeShape]:
        need = self._need
        assert need is not None, "layout comes first"
        shape = tiles.DecodeShape(
            kv_heads=need.num_kv_heads,
            head_dim=need.head_dim,
            page=need.block_size,
            item_bytes=need.cache_dtype.itemsize,
            processors=gpu_of(torch.device(need.device)).processors,
        )
        return need, shape


def device_reason(need: AttentionNeed) -> str | None:
    """Why the kernels cannot run on the need's device."""
    if not need.device.startswith("cuda"):
        if triton.knobs.runtime.interpret:
            return None
        return f"it runs on NVIDIA GPUs, not on {need.device}"
    if not torch.cuda.is_available():
        raise ConfigError("no CUDA device can be used", "device")
    major, minor = torch.cuda.get_device_capability(need.device)
    if major < 8:
        return f"compute capability {major}.{minor}: 8.0 or later is needed"
    if need.cache_dtype in FP8 and (major, minor) < (8, 9):
        return f"an FP8 cache on compute capability {major}.{minor}: 8.9 or later is needed"
    return None
