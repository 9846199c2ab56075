"""Heads' own matrices in native code: near the exact product, the same bits in any batch."""

from __future__ import annotations

import secrets

import pytest
import torch

from tests.kernels.native_parts import DTYPES, ROUNDING, native_ops


@pytest.fixture(autouse=True)
def seed() -> None:
    value = secrets.randbits(31)
    print(f"seed {value}")
    torch.manual_seed(value)


@pytest.mark.parametrize(
    ("tokens", "heads", "rows", "columns"), [(1, 4, 24, 12), (3, 5, 33, 7), (150, 2, 160, 64)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_heads(
    dtype: torch.dtype, tokens: int, heads: int, rows: int, columns: int
) -> None:
    ops = native_ops(dtype)
    assert ops.apart is not None
    weights = torch.randn(heads, columns, rows).to(dtype).transpose(1, 2)  # not in order
    longer = torch.randn(tokens, heads, columns + 6).to(dtype)
    product = ops.apart(weights)
    found = product(longer[..., :columns])
    exact = torch.einsum("thk,hnk->thn", longer[..., :columns].double(), weights.double())
    bound = ROUNDING[dtype] * float(exact.abs().max())
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=bound + 1e-5)
    last = slice(tokens - 1, tokens)
    assert torch.equal(product(longer[last, :, :columns]), found[last])
    turned = longer[..., :columns].transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(product(turned), found)
    assert product(longer[:0, :, :columns]).shape == (0, heads, rows)
