"""The path without a compiler: prepacked linears against f64, and a decoder that runs on it."""

from __future__ import annotations

import secrets

import pytest
import torch

from octavo.kernels.cpu.onednn import onednn_ops
from octavo.kernels.ops import Ops
from tests.kernels.native_parts import DTYPES, ROUNDING


@pytest.fixture(params=DTYPES, ids=str)
def ops(request: pytest.FixtureRequest) -> Ops:
    value = secrets.randbits(31)
    print(f"seed {value}")
    torch.manual_seed(value)
    made = onednn_ops(request.param)
    if isinstance(made, str):
        pytest.skip(made)
    return made


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_linear_and_embedding(ops: Ops, tokens: int) -> None:
    weight = torch.randn(70, 33) / 6
    packed = ops.pack(weight)
    dtype = packed.dtype
    weight, bias = weight.to(dtype), torch.randn(70).to(dtype)
    x = torch.randn(tokens, 33).to(dtype)
    for use in (None, bias):
        exact = x.double() @ weight.double().t() + (0 if use is None else use.double())
        for out in (None, torch.float32):
            found = ops.linear(x, packed, use, out)
            assert found.dtype == (out or dtype)
            torch.testing.assert_close(
                found.double(), exact, rtol=ROUNDING[dtype], atol=2 * ROUNDING[torch.float32]
            )
    ids = torch.randint(0, 70, (9,), dtype=torch.int32)
    assert torch.equal(ops.embed(ids, packed), weight[ids.long()])


def test_other_dtypes_are_refused() -> None:
    assert "float16" in str(onednn_ops(torch.float16))
