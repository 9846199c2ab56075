"""Native kernels against formulas in f64, and their promise: the same bits in any batch."""

from __future__ import annotations

import secrets

import pytest
import torch
from torch import Tensor

from octavo.kernels.ops import PackedWeight
from octavo.kernels.reference import reference_ops
from tests.kernels.native_parts import DTYPES, ROUNDING, native_ops


@pytest.fixture(autouse=True)
def seed() -> None:
    value = secrets.randbits(31)
    print(f"seed {value}")
    torch.manual_seed(value)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """`scale` is the size of the terms of a sum that may cancel."""
    rounding = ROUNDING[dtype]
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), expected, rtol=rounding, atol=ROUNDING[torch.float32] * scale
    )


# Odd and even K, N short of a panel, rows short of and beyond a tile, several blocks of rows.
SHAPES = [(1, 16, 32), (3, 33, 7), (12, 64, 97), (13, 577, 64), (64, 512, 130), (400, 96, 65)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "columns", "rows"), SHAPES)
def test_linear(dtype: torch.dtype, tokens: int, columns: int, rows: int) -> None:
    ops = native_ops(dtype)
    x = torch.randn(tokens, columns).to(dtype)
    weight = (torch.randn(rows, columns) / columns**0.5).to(dtype)
    bias = torch.randn(rows).to(dtype)
    packed = ops.pack(weight)
    product = x.double() @ weight.double().t()
    close(ops.linear(x, packed, None, None), product, dtype, 2)
    close(ops.linear(x, packed, bias, None), product + bias.double(), dtype, 2)
    close(ops.linear(x, packed, bias, torch.float32), product + bias.double(), torch.float32, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_row_is_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    weight = torch.randn(197, 191).to(dtype)
    x = torch.randn(230, 191).to(dtype)
    one, three = native_ops(dtype, 1), native_ops(dtype, 3)
    whole = three.linear(x, three.pack(weight), None, torch.float32)
    packed = one.pack(weight)
    assert torch.equal(one.linear(x, packed, None, torch.float32), whole)
    for size in range(1, 40):
        start = int(torch.randint(0, len(x) - size + 1, ()))
        part = one.linear(x[start : start + size], packed, None, torch.float32)
        assert torch.equal(part, whole[start : start + size]), size


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_and_strided_rows(dtype: torch.dtype) -> None:
    ops = native_ops(dtype)
    packed = ops.pack(torch.randn(40, 24).to(dtype))
    assert ops.linear(torch.empty(0, 24, dtype=dtype), packed, None, None).shape == (0, 40)
    wide = torch.randn(5, 48).to(dtype)
    strided = ops.linear(wide[:, 24:], packed, None, None)
    assert torch.equal(strided, ops.linear(wide[:, 24:].contiguous(), packed, None, None))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [30, 33, 576])
def test_embedding_out_of_the_packed_matrix(dtype: torch.dtype, columns: int) -> None:
    ops = native_ops(dtype)
    weight = torch.randn(101, columns).to(dtype)
    packed = ops.pack(weight)
    ids = torch.randint(0, 101, (77,), dtype=torch.int32)
    assert torch.equal(ops.embed(ids, packed), weight[ids.long()])
    for bad in (-1, 101):
        with pytest.raises(IndexError, match=r"0\.\.100"):
            ops.embed(torch.tensor([0, bad], dtype=torch.int32), packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 48, 577])
def test_norms(dtype: torch.dtype, size: int) -> None:
    ops = native_ops(dtype)
    x, residual = torch.randn(2, 37, size).to(dtype)
    weight = torch.randn(size).to(dtype)

    def exact(y: Tensor) -> Tensor:
        y = y.double()
        return y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    close(ops.rms_norm(x, weight, 1e-5), exact(x), dtype)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(normed, exact(total), dtype)
    assert torch.equal(ops.rms_norm(x[5:6], weight, 1e-5), ops.rms_norm(x, weight, 1e-5)[5:6])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 48, 64, 80, 256])
def test_rope(dtype: torch.dtype, size: int) -> None:
    ops = native_ops(dtype)
    q, k = torch.randn(21, 5, size).to(dtype), torch.randn(21, 2, size).to(dtype)
    positions = torch.randint(0, 50, (21,), dtype=torch.int32)
    table = torch.randn(50, size)
    wanted = reference_ops(torch.float64).rope(q.double(), k.double(), positions, table.double())
    for found, exact in zip(ops.rope(q, k, positions, table), wanted, strict=True):
        # The reference computes in f32 whatever it is given.
        close(found, exact, dtype, 4)
    with pytest.raises(IndexError, match=r"0\.\.49"):
        ops.rope(q, k, positions + 50, table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 37, 96])
def test_gated_activation(dtype: torch.dtype, size: int) -> None:
    ops = native_ops(dtype)
    x = (torch.randn(19, 2 * size) * 6).to(dtype)
    x[0, :4] = torch.tensor([-300.0, 300.0, -88.0, 0.0]).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    close(ops.silu_mul(x), gate * torch.sigmoid(gate) * up, dtype)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh")
    close(ops.gelu_mul(x), gelu * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_with_a_wide_weight(dtype: torch.dtype) -> None:
    ops = native_ops(dtype)
    x, residual = torch.randn(9, 70).to(dtype), torch.randn(9, 70).to(dtype)
    weight = 1 + torch.randn(70) / 1000  # bf16 would lose most of what differs from 1
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    wide = (x + residual).double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert torch.equal(total, x + residual)
    close(normed, exact, dtype)
    close(ops.rms_norm(total, weight, 1e-5), exact, dtype)


def test_weights_lie_on_cache_lines_and_survive_their_neighbours() -> None:
    ops = native_ops(torch.float32)
    matrices = [torch.randn(33, 20) for _ in range(50)]
    packed: list[PackedWeight] = [ops.pack(matrix) for matrix in matrices]
    x = torch.randn(2, 20)
    for matrix, weight in zip(matrices[::2], packed[::2], strict=True):
        assert weight.data.data_ptr() % 64 == 0
        close(ops.linear(x, weight, None, None), x.double() @ matrix.double().t(), x.dtype, 10)


def test_a_wrong_dtype_is_refused() -> None:
    ops = native_ops(torch.float32)
    packed = ops.pack(torch.randn(8, 8))
    with pytest.raises(AssertionError, match="float64"):
        ops.linear(torch.randn(2, 8).double(), packed, None, None)
