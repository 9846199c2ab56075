"""Weights of 8 bits: exact arithmetic on the rounded values, small errors, the same bits always."""

from __future__ import annotations

import secrets

import pytest
import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.select import select
from tests.kernels.native_parts import native_ops

DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def seed() -> None:
    value = secrets.randbits(31)
    print(f"seed {value}")
    torch.manual_seed(value)


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of -127 to 127 and scales [n, 1], in f64, of rows given in bf16."""
    wide = rows.float()
    top = wide.abs().amax(1, keepdim=True)
    # A true division: torch multiplies a number over a tensor by the reciprocal.
    inverse = torch.where(top > 0, torch.full_like(top, 127) / top, 0.0)
    return (wide * inverse).round().double(), (top / 127).double()


SHAPES = [(1, 16, 32), (3, 33, 7), (12, 64, 97), (13, 577, 64), (64, 510, 130), (150, 4096, 33)]


@pytest.mark.parametrize(("tokens", "columns", "rows"), SHAPES)
def test_linear_is_exact_on_the_rounded_values(tokens: int, columns: int, rows: int) -> None:
    ops = native_ops(DTYPE, int8=True)
    x = (torch.randn(tokens, columns) * torch.rand(tokens, 1) * 30).to(DTYPE)
    x[0] = 0
    weight, bias = torch.randn(rows, columns).to(DTYPE), torch.randn(rows).to(DTYPE)
    weight[-1] = 0
    wq, ws = rounded(weight)
    exact = bias.double().expand(tokens, rows).clone()
    for start in range(0, columns, 128):  # groups of x have scales of their own
        xq, xs = rounded(x[:, start : start + 128])
        exact += (xq @ wq[:, start : start + 128].t()) * xs * ws.t()
    found = ops.linear(x, ops.pack(weight), bias, torch.float32)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-5 * columns**0.5)


def test_errors_on_gaussian_values_are_small() -> None:
    ops = native_ops(DTYPE, int8=True)
    x, weight = torch.randn(64, 576).to(DTYPE), torch.randn(300, 576).to(DTYPE)
    exact = x.double() @ weight.double().t()
    error = ops.linear(x, ops.pack(weight), None, torch.float32).double() - exact
    assert error.pow(2).mean().sqrt() < 0.02 * exact.pow(2).mean().sqrt()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """One scale for a whole batch would let a large row round its neighbours to nothing."""
    ops = native_ops(DTYPE, int8=True)
    packed = ops.pack(torch.randn(97, 200).to(DTYPE))
    x = torch.randn(70, 200).to(DTYPE)
    alone = torch.cat([ops.linear(x[i : i + 1], packed, None, None) for i in range(70)])
    x_loud = x.clone()
    x_loud[5] *= 1000
    together = ops.linear(x_loud, packed, None, None)
    keep = [i for i in range(70) if i != 5]
    assert torch.equal(together[keep], alone[keep])


def test_what_is_not_finite_shows_in_its_row_alone() -> None:
    ops = native_ops(DTYPE, int8=True)
    packed = ops.pack(torch.randn(40, 64).to(DTYPE))
    x = torch.randn(4, 64).to(DTYPE)
    clean = ops.linear(x, packed, None, None)
    x[1, 3], x[2, 60] = torch.nan, torch.inf
    found = ops.linear(x, packed, None, None)
    assert found[1:3].isnan().all()
    assert torch.equal(found[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize("columns", [30, 33, 576])
def test_embedding(columns: int) -> None:
    ops = native_ops(DTYPE, int8=True)
    weight = torch.randn(101, columns).to(DTYPE)
    ids = torch.randint(0, 101, (50,), dtype=torch.int32)
    integers, scales = rounded(weight)
    wanted = (integers.float() * scales.float()).to(DTYPE)[ids.long()]
    assert torch.equal(ops.embed(ids, ops.pack(weight)), wanted)


def test_where_it_cannot_be_had() -> None:
    native_ops(DTYPE, int8=True)
    ops, notes = select(DTYPE, int8=True)
    assert ops.name == "native"
    assert "int8" in notes[-1]
    with pytest.raises(ConfigError, match=r"bfloat16 only.*leave quantization out"):
        select(torch.float32, int8=True)
    with pytest.raises(ConfigError, match="no weights of 8 bits"):
        select(DTYPE, "reference", int8=True)
