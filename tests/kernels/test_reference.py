"""The reference kernels against formulas written out in f64."""

from __future__ import annotations

import secrets

import pytest
import torch
from torch import Tensor

from octavo.kernels.reference import reference_ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place of the result, and a little for f32 sums.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


@pytest.fixture(autouse=True)
def seed() -> None:
    value = secrets.randbits(31)
    print(f"seed {value}")
    torch.manual_seed(value)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype] * 0.01
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    ops = reference_ops(dtype)
    x, residual = torch.randn(2, 5, 48).to(dtype)
    weight = torch.randn(48).to(dtype)

    def exact(y: Tensor) -> Tensor:
        y = y.double()
        return y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    close(ops.rms_norm(x, weight, 1e-5), exact(x), dtype)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    close(total, x.double() + residual.double(), dtype)
    close(normed, exact(total), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_rows_are_not_lost_in_eps(dtype: torch.dtype) -> None:
    """Squares are taken in f32: in f16 they would vanish, or overflow for large rows."""
    ops = reference_ops(dtype)
    weight = torch.ones(32, dtype=dtype)
    for scale in (1e-4, 1e3):
        x = (torch.randn(3, 32) * scale).to(dtype)
        wide = x.double()
        expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-12).sqrt()
        close(ops.rms_norm(x, weight, 1e-12), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_turns_pairs_of_halves(dtype: torch.dtype) -> None:
    ops = reference_ops(dtype)
    q, k = torch.randn(4, 3, 10).to(dtype), torch.randn(4, 1, 10).to(dtype)
    positions = torch.tensor([5, 0, 19, 5], dtype=torch.int32)
    angles = torch.rand(20, 5, dtype=torch.float64) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1).float()
    for x, found in zip((q, k), ops.rope(q, k, positions, table), strict=True):
        pairs = torch.complex(x[..., :5].double(), x[..., 5:].double())
        turned = pairs * torch.polar(
            torch.ones(4, 1, 5, dtype=torch.float64), angles[positions.long()].unsqueeze(1)
        )
        assert found.dtype == dtype
        torch.testing.assert_close(
            found.double(),
            torch.cat((turned.real, turned.imag), dim=-1),
            rtol=ROUNDING[dtype],
            atol=ROUNDING[dtype],
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    x = (torch.randn(6, 34) * 4).to(dtype)
    gate, up = x.double().chunk(2, dim=1)
    close(reference_ops(dtype).silu_mul(x), gate / (1 + (-gate).exp()) * up, dtype)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    close(reference_ops(dtype).gelu_mul(x), gate / 2 * (1 + inner.tanh()) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype: torch.dtype, bias: bool) -> None:
    ops = reference_ops(dtype)
    x, matrix = torch.randn(7, 40).to(dtype), torch.randn(9, 40).to(dtype)
    vector = torch.randn(9).to(dtype) if bias else None
    weight = ops.pack(matrix)
    assert (weight.rows, weight.columns, weight.layout) == (9, 40, "plain")
    exact = x.double() @ matrix.double().T + (vector.double() if vector is not None else 0)
    scale = float(exact.abs().max())
    for out in (None, dtype, torch.float32):
        found = ops.linear(x, weight, vector, out)
        assert found.dtype == (out or dtype)
        bound = ROUNDING[found.dtype] * scale
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=bound)


def test_embed() -> None:
    ops = reference_ops(torch.float32)
    matrix = torch.randn(11, 6)
    ids = torch.tensor([10, 0, 3, 3], dtype=torch.int32)
    assert torch.equal(ops.embed(ids, ops.pack(matrix)), matrix[[10, 0, 3, 3]])


def test_inputs_are_left_alone() -> None:
    ops = reference_ops(torch.float32)
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    copies = [t.clone() for t in (x, residual, weight)]
    ops.add_rms_norm(x, residual, weight, 1e-6)
    ops.silu_mul(x)
    assert all(torch.equal(a, b) for a, b in zip((x, residual, weight), copies, strict=True))
