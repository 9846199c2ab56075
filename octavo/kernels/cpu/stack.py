"""A whole decoder as one native call: the handle that owns its scratch memory.

Not for: deciding whether a decoder fits (`octavo/models/fused.py` gathers it; `make` refuses).
Next file: `octavo/attention/native.py`.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from octavo.forward import ForwardBatch, KVCache
from octavo.kernels.cpu.binding import CACHES, Library, StackShape, StepArrays
from octavo.kernels.ops import PackedWeight
from octavo.kernels.stack import StackBlock, StackModel

COMPLAINTS = {
    -2: "a token id lies outside the embedding",
    -3: "a position lies outside the rope table",
    -4: "a slot lies outside the cache",
    -5: "row lengths, block table and tokens do not agree",
    -6: "a sampled row lies outside the step's tokens",
}


class NativeStack:
    """Runs embedding, blocks, last norm and head of one model. Not for two threads at once."""

    __slots__ = ("__weakref__", "_code", "_handle", "_kv", "_library", "_model", "_pointers")

    def __init__(self, library: Library, model: StackModel, code: int) -> None:
        self._library = library
        self._model = model  # keeps the weights alive
        self._code = code  # of the types of activations and weights
        self._kv: KVCache | None = None
        self._pointers: tuple[Tensor, Tensor] | None = None
        shape = _shape(model)
        layers = torch.tensor([_fields(block) for block in model.blocks], dtype=torch.int64)
        self._handle = library.call.oct_stack_new(
            self._code, ctypes.byref(shape), layers.data_ptr()
        )
        weakref.finalize(self, library.call.oct_stack_free, self._code, self._handle)

    @staticmethod
    def make(library: Library, model: StackModel, code: int, layout: str) -> NativeStack | str:
        """The stack, or the reason why the kernels cannot run this model.

        `code` and `layout` are those of the weights.
        """
        dtype = model.embedding.dtype
        weights = [model.embedding, model.head]
        vectors: list[Tensor | None] = [model.norm]
        for block in model.blocks:
            weights += [block.qkv, block.output, block.gate_up, block.down]
            vectors += [
                block.norm,
                block.qkv_bias,
                block.query_norm,
                block.key_norm,
                block.output_bias,
                block.mlp_norm,
                block.gate_up_bias,
                block.down_bias,
            ]
        for weight in weights:
            if weight.layout != layout or weight.dtype != dtype:
                return f"a weight is packed as {weight.layout} for {weight.dtype}"
        for vector in vectors:
            if vector is not None and (vector.dtype != dtype or not vector.is_contiguous()):
                return f"a bias or norm is {vector.dtype}, not {dtype}"
        reason = _misfit(model)
        return reason or NativeStack(library, model, code)

    def logits(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Ids i32[T] -> f32[S, V] of the sampled rows; stores KV of all tokens."""
        out = torch.empty(batch.sample_rows.numel(), self._model.head.rows)
        self._run(ids, batch, out, None)
        return out

    def hidden(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Ids i32[T] -> [T, H] after the last norm; stores KV of all tokens."""
        model = self._model
        out = torch.empty(ids.numel(), model.embedding.columns, dtype=model.norm.dtype)
        self._run(ids, batch, None, out)
        return out

    def _run(
        self, ids: Tensor, batch: ForwardBatch, logits: Tensor | None, hidden: Tensor | None
    ) -> None:
        keys, values = self._cache(batch.kv)
        inputs = (
            ids,
            batch.positions,
            batch.slot_map,
            batch.q_indptr,
            batch.kv_lens,
            batch.block_table,
            batch.sample_rows,
        )
        arrays = [_i32(tensor) for tensor in inputs]
        step = StepArrays(
            arrays[0].numel(),
            batch.num_rows,
            arrays[6].numel(),
            batch.kv.keys[0].shape[0],
            arrays[5].shape[1],
            *(tensor.data_ptr() for tensor in arrays),
            keys.data_ptr(),
            values.data_ptr(),
            0 if logits is None else logits.data_ptr(),
            0 if hidden is None else hidden.data_ptr(),
        )
        code = self._library.call.oct_stack_run(
            self._library.pool, self._code, self._handle, ctypes.byref(step)
        )
        if code:
            raise ValueError(f"the step cannot be run: {COMPLAINTS.get(code, code)}")

    def _cache(self, kv: KVCache) -> tuple[Tensor, Tensor]:
        """Pointers to each layer's pages, i64[L], remembered for the cache last seen."""
        if self._kv is not kv or self._pointers is None:
            model = self._model
            page = (model.num_kv_heads, kv.block_size * model.head_dim)
            for pages in (*kv.keys, *kv.values):
                assert pages.shape[1:] == page, f"pages {tuple(pages.shape)}, not [N, {page}]"
                assert pages.dtype == (model.cache_dtype or model.norm.dtype)
                assert pages.is_contiguous()
            assert kv.block_size == model.block_size
            self._pointers = (_pointers(kv.keys), _pointers(kv.values))
            self._kv = kv
        return self._pointers


def _i32(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.int32:
        tensor = tensor.to(torch.int32)
    return tensor.contiguous()


def _pointers(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


def _shape(model: StackModel) -> StackShape:
    return StackShape(
        len(model.blocks),
        model.embedding.columns,
        model.blocks[0].down.columns,
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        model.head.rows,
        model.embedding.rows,
        model.block_size,
        model.cos_sin.shape[0],
        model.eps,
        model.scale,
        model.soft_cap,
        0 if model.cache_dtype is None else CACHES[model.cache_dtype],
        model.cos_sin.data_ptr(),
        model.embedding.data.data_ptr(),
        model.norm.data_ptr(),
        model.head.data.data_ptr(),
    )


def _fields(block: StackBlock) -> list[int]:
    """In the order of `LayerField` in stack.h."""
    parts: tuple[Tensor | PackedWeight | None, ...] = (
        block.norm,
        block.qkv,
        block.qkv_bias,
        block.query_norm,
        block.key_norm,
        block.output,
        block.output_bias,
        block.mlp_norm,
        block.gate_up,
        block.gate_up_bias,
        block.down,
        block.down_bias,
    )
    scales = (_float_bits(scale) for scale in (block.key_scale, block.value_scale))
    return [*(_address(part) for part in parts), block.window, *scales]


def _float_bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


def _address(part: Tensor | PackedWeight | None) -> int:
    if part is None:
        return 0
    return part.data.data_ptr() if isinstance(part, PackedWeight) else part.data_ptr()


def _misfit(model: StackModel) -> str:
    """Which size does not agree with the others; empty if all do."""
    hidden = model.embedding.columns
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if model.head_dim % 16 or model.head_dim > 256:
        return f"heads of {model.head_dim}: only multiples of 16 up to 256"
    for block in model.blocks:
        inner = block.down.columns
        wanted = (
            (block.qkv, q + 2 * kv, hidden),
            (block.output, hidden, q),
            (block.gate_up, 2 * inner, hidden),
            (block.down, hidden, model.blocks[0].down.columns),
        )
        for weight, rows, columns in wanted:
            if (weight.rows, weight.columns) != (rows, columns):
                return f"a weight is [{weight.rows}, {weight.columns}], not [{rows}, {columns}]"
    if model.head.columns != hidden:
        return f"the head takes {model.head.columns} values, not {hidden}"
    if model.cos_sin.shape[1] != model.head_dim or not model.cos_sin.is_contiguous():
        return f"a rope table of {model.cos_sin.shape[1]} for heads of {model.head_dim}"
    if hidden % 2 or q % 2 or model.blocks[0].down.columns % 2:
        return "an odd size"
    return ""
