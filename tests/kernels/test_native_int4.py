"""Weights of 4 bits in native code: exact arithmetic on the rounded values."""

from __future__ import annotations

import secrets

import pytest
import torch
from torch import Tensor

from octavo.kernels.cpu.native import NativeOps
from octavo.kernels.formats import Grouped
from octavo.kernels.ops import Ops
from octavo.quant.online import quantize_groups
from tests.kernels.native_parts import native_library
from tests.kernels.test_native_int8 import rounded

DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def seed() -> None:
    value = secrets.randbits(31)
    print(f"seed {value}")
    torch.manual_seed(value)


def ops(threads: int = 2) -> Ops:
    library = native_library(threads)
    if library.refuse(DTYPE, int8=True):
        pytest.skip(library.refuse(DTYPE, int8=True))
    return NativeOps(library, DTYPE, int4=True).table("under test")


def grouped(rows: int, columns: int, group: int) -> Grouped:
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    scale = (torch.rand(rows, columns // group) * 0.1 + 0.01).half().float()
    zero = (torch.rand(rows, columns // group) * 20 - 2).half().float()
    return Grouped(codes, scale, zero, group)


SHAPES = [
    (1, 64, 32, 32),
    (3, 96, 7, 32),
    (12, 128, 97, 64),
    (13, 576, 64, 32),
    (64, 512, 130, 128),
    (150, 4096, 33, 128),
    (2, 768, 40, 768),
]


@pytest.mark.parametrize(("tokens", "columns", "rows", "group"), SHAPES)
def test_linear_is_exact_on_the_rounded_values(
    tokens: int, columns: int, rows: int, group: int
) -> None:
    table = ops()
    assert table.pack_grouped is not None
    weight = grouped(rows, columns, group)
    x = (torch.randn(tokens, columns) * torch.rand(tokens, 1) * 30).to(DTYPE)
    x[0] = 0
    bias = torch.randn(rows).to(DTYPE)
    plain = weight.plain(torch.float64)
    exact = bias.double().expand(tokens, rows).clone()
    for start in range(0, columns, 128):  # groups of x have scales of their own
        xq, xs = rounded(x[:, start : start + 128])
        exact += (xq @ plain[:, start : start + 128].t()) * xs
    found = table.linear(x, table.pack_grouped(weight), bias, torch.float32)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4 * columns**0.5)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    table = ops()
    assert table.pack_grouped is not None
    packed = table.pack_grouped(grouped(97, 192, 64))
    x = torch.randn(70, 192).to(DTYPE)
    alone = torch.cat([table.linear(x[i : i + 1], packed, None, None) for i in range(70)])
    x_loud = x.clone()
    x_loud[5] *= 1000
    together = table.linear(x_loud, packed, None, None)
    keep = [i for i in range(70) if i != 5]
    assert torch.equal(together[keep], alone[keep])


def test_an_order_of_columns_is_kept() -> None:
    """Such a weight has 8 bits: it cannot be read in the input's order."""
    table = ops()
    assert table.pack_grouped is not None
    weight = grouped(40, 128, 32)
    weight = Grouped(weight.codes, weight.scale, weight.zero, 32, torch.randperm(128))
    x = torch.randn(5, 128).to(DTYPE)
    found = table.linear(x, table.pack_grouped(weight), None, torch.float32)
    exact = x.double() @ weight.plain(torch.float64).t()
    assert (found.double() - exact).norm() < 0.02 * exact.norm()


def meant(weight: Tensor, group: int, *, whole_zero: bool) -> Tensor:
    return quantize_groups(weight, group, whole_zero=whole_zero).plain(torch.float32)


@pytest.mark.parametrize("whole_zero", [False, True])
def test_rounding_to_4_bits(whole_zero: bool) -> None:
    weight = torch.randn(30, 128) * 0.1
    weight[3] = 0
    weight[4] = 0.7
    weight[5] = -0.7
    found = meant(weight, 32, whole_zero=whole_zero)
    groups = weight.view(30, 4, 32)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    if whole_zero:
        low, high = low.clamp(max=0), high.clamp(min=0)
    # Half a step away, and a little more where the zero point is rounded too.
    limit = (high - low) / 15 * (1.01 if whole_zero else 0.51)
    assert bool(((found - weight).view(30, 4, 32).abs() <= limit + 1e-6).all())
    assert torch.equal(found[3], weight[3])
    torch.testing.assert_close(found[4:6], weight[4:6])


def test_blocks_of_16_steps_are_found_again() -> None:
    """As files of such blocks hold them: rounding what they say gives the same numbers."""
    codes = torch.randint(0, 16, (20, 64), dtype=torch.uint8)
    codes[:, 0], codes[:, 1], codes[:, 32], codes[:, 33] = 0, 15, 15, 0
    scale = torch.rand(20, 2).half().float() + 0.01
    least = torch.randn(20, 2).half().float()
    values = codes.view(20, 2, 32).float() * scale.unsqueeze(-1) + least.unsqueeze(-1)
    found = quantize_groups(values.view(20, 64), 32)
    assert torch.equal(found.codes, codes)
    torch.testing.assert_close(found.scale, scale)
