"""Heads' own matrices in native code: one call for all heads of a layer.

For the projections that latent attention takes into queries and out of results.
"""

from __future__ import annotations

from torch import Tensor, empty
from torch.nn import functional

from octavo.kernels.cpu.arena import huge_region
from octavo.kernels.cpu.binding import DTYPES, Library


class NativeHeads:
    """A HeadProduct: a row's result is the same bits in any batch."""

    __slots__ = ("_bytes", "_code", "_library", "_shape", "_weights")

    def __init__(self, library: Library, weights: Tensor) -> None:
        """Weights [Q, N, K]; rows of odd length get a zero, and inputs too."""
        heads, rows, columns = weights.shape
        self._library = library
        self._code = DTYPES[weights.dtype]
        self._shape = (heads, rows, columns)
        weights = functional.pad(weights, (0, columns % 2)).contiguous()
        size = library.call.oct_packed_bytes(self._code, rows, weights.shape[2])
        self._bytes = -(-size // 64) * 64
        self._weights = huge_region(heads * self._bytes)
        for head in range(heads):
            library.call.oct_pack(
                self._code,
                weights[head].data_ptr(),
                weights.shape[2],
                rows,
                weights.shape[2],
                self._weights[head * self._bytes :].data_ptr(),
            )

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, Q, K] -> [T, Q, N]; rows of x may be parts of longer ones."""
        heads, rows, columns = self._shape
        assert x.shape[1:] == (heads, columns), f"x {tuple(x.shape)} for {self._shape}"
        assert DTYPES[x.dtype] == self._code
        if columns % 2:
            x = functional.pad(x, (0, 1))
        elif x.stride(2) != 1:
            x = x.contiguous()
        out = empty(len(x), heads, rows, dtype=x.dtype)
        self._library.call.oct_apart(
            self._library.pool,
            self._code,
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            len(x),
            self._weights.data_ptr(),
            self._bytes,
            heads,
            rows,
            x.shape[2],
            out.data_ptr(),
        )
        return out
