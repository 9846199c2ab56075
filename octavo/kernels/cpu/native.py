"""The table of native kernels: tensors in, tensors out, over the C++ library.

Weights are packed into panels (`gemm.h`) that lie together in large, huge-page-friendly regions.
A row's result is the same bits in any batch and with any number of threads. Not for: attention
(`octavo/attention/native.py`) or building (`build.py`). Next file: `stack.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.cpu.arena import Arena
from octavo.kernels.cpu.binding import DTYPES, INT8_WEIGHTS, Library
from octavo.kernels.cpu.experts import NativeExperts
from octavo.kernels.cpu.heads import NativeHeads
from octavo.kernels.cpu.stack import NativeStack
from octavo.kernels.formats import Grouped
from octavo.kernels.ops import (
    ClampedForm,
    ExpertProduct,
    HeadProduct,
    Ops,
    PackedWeight,
    SampleRows,
)
from octavo.kernels.stack import StackModel

LAYOUT = "panels32"
INT8_LAYOUT = "panels32-int8"  # 8 or 4 bits: a packed weight says which
GROUPS = (128, 64, 32)  # columns that share a scale in 4 bits


class NativeOps:
    """Native kernels for activations of one dtype. See `Ops` for shapes.

    With `int8` all weights have 8 bits, each row with a scale of its own, and products round each
    token to 8 bits by its own largest value: about 1 % of error on Gaussian values, a quarter to
    a half of the time. bf16 activations only. With `int4` too, weights that come in 4 bits stay so.
    """

    __slots__ = ("_arena", "_code", "_dtype", "_int4", "_layout", "_weights", "library")

    def __init__(
        self, library: Library, dtype: torch.dtype, *, int8: bool = False, int4: bool = False
    ) -> None:
        int8 = int8 or int4
        assert not int8 or (dtype == torch.bfloat16 and library.int8)
        self.library = library
        self._dtype = dtype
        self._code = DTYPES[dtype]
        self._weights = INT8_WEIGHTS if int8 else self._code  # the same with the weights' type
        self._layout = INT8_LAYOUT if int8 else LAYOUT
        self._arena = Arena()
        self._int4 = int4

    def table(self, reason: str) -> Ops:
        """The kernels by name."""
        return Ops(
            name="native",
            reason=reason,
            pack=self.pack,
            linear=self.linear,
            embed=self.embed,
            rms_norm=self.rms_norm,
            add_rms_norm=self.add_rms_norm,
            rope=self.rope,
            silu_mul=self.silu_mul,
            gelu_mul=self.gelu_mul,
            sample=self.sample,
            stack=self.stack,
            pack_grouped=self.pack_grouped if self._int4 else None,
            experts=self.experts,
            clamped_experts=self.experts,
            apart=self.apart,
        )

    def pack(self, weight: Tensor) -> PackedWeight:
        """[N, K] -> panels of 32 rows."""
        rows, columns = weight.shape
        weight = weight.to(self._dtype).contiguous()
        call = self.library.call
        data = self._arena.take(call.oct_packed_bytes(self._weights, rows, columns))
        call.oct_pack(self._weights, weight.data_ptr(), columns, rows, columns, data.data_ptr())
        return PackedWeight(data, rows, columns, self._dtype, self._layout)

    def pack_grouped(self, weight: Grouped) -> PackedWeight:
        """4 bits; 8 where columns are in an order of their own or groups are no units of 32."""
        rows, columns = weight.codes.shape
        unit = next((unit for unit in GROUPS if weight.group % unit == 0), 0)
        if weight.order is not None or not unit:
            return self.pack(weight.plain(self._dtype))
        repeat = weight.group // unit
        codes = weight.codes.contiguous()
        scale = weight.scale.float().repeat_interleave(repeat, 1).contiguous()
        zero = weight.zero.float().repeat_interleave(repeat, 1).contiguous()
        call = self.library.call
        data = self._arena.take(call.oct_packed4_bytes(rows, columns, unit))
        numbers = (tensor.data_ptr() for tensor in (codes, scale, zero))
        code = call.oct_pack4(*numbers, rows, columns, unit, data.data_ptr())
        assert code == 0, (rows, columns, unit)
        return PackedWeight(data, rows, columns, self._dtype, self._layout)

    def linear(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None
    ) -> Tensor:
        """x [T, K] -> [T, N] in `out_dtype` (x's dtype or f32)."""
        x = self._input(x)
        assert weight.layout == self._layout, f"a {weight.layout} weight"
        assert x.shape[1] == weight.columns, f"x {tuple(x.shape)} for K = {weight.columns}"
        wanted = out_dtype or x.dtype
        wide = wanted == torch.float32 and self._dtype != torch.float32
        out = torch.empty(x.shape[0], weight.rows, dtype=torch.float32 if wide else self._dtype)
        if bias is not None:
            bias = self._input(bias)
            assert bias.numel() == weight.rows, f"bias {tuple(bias.shape)} for N = {weight.rows}"
        self.library.call.oct_linear(
            self.library.pool,
            self._weights,
            int(wide),
            x.data_ptr(),
            x.shape[1],
            x.shape[0],
            weight.data.data_ptr(),
            weight.rows,
            weight.columns,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
        )
        return out if out.dtype == wanted else out.to(wanted)

    def embed(self, ids: Tensor, weight: PackedWeight) -> Tensor:
        """Ids i32[T] -> [T, K]. An id outside the table raises IndexError."""
        ids = ids.to(torch.int32).contiguous()
        out = torch.empty(ids.numel(), weight.columns, dtype=self._dtype)
        code = self.library.call.oct_embed(
            self.library.pool,
            self._weights,
            ids.data_ptr(),
            ids.numel(),
            weight.data.data_ptr(),
            weight.rows,
            weight.columns,
            out.data_ptr(),
        )
        if code:
            raise IndexError(f"a token id lies outside 0..{weight.rows - 1}")
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self._norm(x, None, weight, eps)[0]

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x and residual [T, H] -> (norm of their sum, their sum)."""
        return self._norm(x, residual, weight, eps)

    def _norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        x = self._input(x)
        wide = weight.dtype == torch.float32
        weight = weight.contiguous() if wide else self._input(weight)
        size = weight.numel()
        assert x.shape[-1] == size, f"x {tuple(x.shape)} for a weight of {size}"
        out = torch.empty_like(x)
        total = out
        if residual is not None:
            residual = self._input(residual)
            assert residual.shape == x.shape
            total = torch.empty_like(x)
        self.library.call.oct_rms_norm(
            self.library.pool,
            self._code,
            int(wide),
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            x.numel() // size,
            size,
            eps,
            total.data_ptr(),
            out.data_ptr(),
        )
        return out, total

    def rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """q [T, Q, D], k [T, K, D], positions i32[T] -> both rotated."""
        return self._rotate(q, positions, cos_sin), self._rotate(k, positions, cos_sin)

    def _rotate(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        x = self._input(x)
        positions = positions.to(torch.int32).contiguous()
        assert cos_sin.dtype == torch.float32
        assert cos_sin.is_contiguous()
        tokens, heads, size = x.shape
        assert cos_sin.shape[1] == size, f"a table of {cos_sin.shape[1]} for heads of {size}"
        out = torch.empty_like(x)
        code = self.library.call.oct_rope(
            self.library.pool,
            self._code,
            x.data_ptr(),
            positions.data_ptr(),
            cos_sin.data_ptr(),
            cos_sin.shape[0],
            tokens,
            heads,
            size,
            out.data_ptr(),
        )
        if code:
            raise IndexError(f"a position lies outside 0..{cos_sin.shape[0] - 1}")
        return out

    def silu_mul(self, x: Tensor) -> Tensor:
        """x [T, 2 * I] -> [T, I]."""
        return self._gated(self.library.call.oct_silu_mul, x)

    def gelu_mul(self, x: Tensor) -> Tensor:
        """x [T, 2 * I] -> [T, I]."""
        return self._gated(self.library.call.oct_gelu_mul, x)

    def _gated(self, kernel: Callable[..., int], x: Tensor) -> Tensor:
        x = self._input(x)
        size = x.shape[1] // 2
        out = torch.empty(x.shape[0], size, dtype=self._dtype)
        kernel(self.library.pool, self._code, x.data_ptr(), x.shape[0], size, out.data_ptr())
        return out

    def sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """Logits f32[S, V] -> i32[S]; see `octavo/kernels/sample.py`."""
        logits = logits.to(torch.float32).contiguous()
        count, vocabulary = logits.shape
        settings = (
            rows.temperature.to(torch.float32).contiguous(),
            rows.top_k.to(torch.int32).contiguous(),
            rows.top_p.to(torch.float32).contiguous(),
            rows.min_p.to(torch.float32).contiguous(),
            rows.seed.to(torch.int64).contiguous(),
            rows.position.to(torch.int64).contiguous(),
        )
        assert all(setting.numel() == count for setting in settings)
        out = torch.empty(count, dtype=torch.int32)
        self.library.call.oct_sample(
            self.library.pool,
            logits.data_ptr(),
            count,
            vocabulary,
            *(setting.data_ptr() for setting in settings),
            out.data_ptr(),
        )
        return out

    def experts(
        self, gate_up: Tensor, down: Tensor, form: ClampedForm | None = None
    ) -> ExpertProduct:
        """The product of a layer's experts, gate_up [E, 2 * I, H] and down [E, H, I]."""
        return NativeExperts(
            self.library, self._weights, gate_up, down, dtype=self._dtype, form=form
        )

    def apart(self, weights: Tensor) -> HeadProduct:
        """The product of heads' own matrices [Q, N, K]; not in 8 bits, since they are small."""
        return NativeHeads(self.library, weights.to(self._dtype))

    def stack(self, model: StackModel) -> NativeStack | str:
        """A runner of the whole model, or the reason why it cannot be one."""
        return NativeStack.make(self.library, model, self._weights, self._layout)

    def _input(self, x: Tensor) -> Tensor:
        assert x.dtype == self._dtype, f"{x.dtype} given to kernels of {self._dtype}"
        return x.contiguous()
