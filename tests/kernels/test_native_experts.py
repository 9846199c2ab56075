"""Native experts: as a loop over native products gives them, to the bit, at any size and batch."""

from __future__ import annotations

import secrets

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.experts import ClampedExperts, LoopedExperts
from octavo.kernels.ops import ClampedForm, Ops
from tests.kernels.native_parts import DTYPES, native_ops


@pytest.fixture(autouse=True)
def seed() -> None:
    value = secrets.randbits(31)
    print(f"seed {value}")
    torch.manual_seed(value)


def inputs(
    dtype: torch.dtype, tokens: int, experts: int, top: int, sizes: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """gate_up, down, x, chosen, weights."""
    hidden, width = sizes
    gate_up = (torch.randn(experts, 2 * width, hidden) * hidden**-0.5).to(dtype)
    down = (torch.randn(experts, hidden, width) * width**-0.5).to(dtype)
    x = torch.randn(tokens, hidden).to(dtype)
    chosen = torch.stack([torch.randperm(experts)[:top] for _ in range(tokens)])
    return gate_up, down, x, chosen, torch.rand(tokens, top)


def made(ops: Ops, gate_up: Tensor, down: Tensor, x: Tensor, *choice: Tensor) -> Tensor:
    assert ops.experts is not None
    return ops.experts(gate_up, down)(x, *choice)


# Odd sizes, one expert alone, more rows of one expert than a block, more pairs than fit at once.
SHAPES = [
    (1, 8, 3, (64, 96)),
    (2, 5, 5, (33, 7)),
    (7, 16, 2, (130, 65)),
    (150, 3, 2, (64, 40)),
    (3000, 6, 3, (32, 16)),
]


@pytest.mark.parametrize(("tokens", "experts", "top", "sizes"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["f32", "bf16", "int8"])
def test_the_same_bits_as_a_loop_over_products(
    kind: str, threads: int, tokens: int, experts: int, top: int, sizes: tuple[int, int]
) -> None:
    dtype = torch.float32 if kind == "f32" else torch.bfloat16
    ops = native_ops(dtype, threads, int8=kind == "int8")
    args = inputs(dtype, tokens, experts, top, sizes)
    found = made(ops, *args)
    assert torch.equal(found, LoopedExperts(ops, args[0], args[1])(*args[2:]))
    if kind == "f32":
        exact = reference.experts(args[0], args[1])(*args[2:])
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "experts", "top", "sizes"), SHAPES[:1] + SHAPES[3:])
@pytest.mark.parametrize("dtype", DTYPES)
def test_biases_and_a_bounded_gate(
    dtype: torch.dtype, tokens: int, experts: int, top: int, sizes: tuple[int, int]
) -> None:
    ops = native_ops(dtype)
    assert ops.clamped_experts is not None
    gate_up, down, x, chosen, weights = inputs(dtype, tokens, experts, top, sizes)
    hidden, width = sizes
    form = ClampedForm(
        torch.randn(experts, 2 * width).to(dtype), torch.randn(experts, hidden).to(dtype), 1.7, 0.9
    )
    product = ops.clamped_experts(gate_up, down, form)
    found = product(x, chosen, weights)
    wide = ClampedForm(form.gate_up_bias.float(), form.down_bias.float(), 1.7, 0.9)
    exact = ClampedExperts(gate_up.float(), down.float(), wide)(x.float(), chosen, weights)
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert float((found - exact).norm() / exact.norm()) < bound
    last = slice(tokens - 1, tokens)
    assert torch.equal(product(x[last], chosen[last], weights[last]), found[last])


def test_a_width_that_fills_no_panel_and_a_gate_that_is_not_a_number() -> None:
    ops = native_ops(torch.float32)
    assert ops.clamped_experts is not None
    gate_up, down, x, chosen, weights = inputs(torch.float32, 2, 3, 2, (40, 20))
    form = ClampedForm(torch.randn(3, 40), torch.randn(3, 40), 1.7, 0.9)
    product = ops.clamped_experts(gate_up, down, form)
    exact = ClampedExperts(gate_up, down, form)(x, chosen, weights)
    torch.testing.assert_close(product(x, chosen, weights), exact, rtol=1e-5, atol=1e-5)
    x[1, 3] = torch.nan
    broken = product(x, chosen, weights)
    assert bool(broken[0].isfinite().all())
    assert bool(broken[1].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_alone_and_among_others_is_the_same_bits(dtype: torch.dtype) -> None:
    ops = native_ops(dtype)
    gate_up, down, x, chosen, weights = inputs(dtype, 61, 4, 2, (96, 72))
    whole = made(ops, gate_up, down, x, chosen, weights)
    for row in (0, 17, 60):
        own = slice(row, row + 1)
        assert torch.equal(made(ops, gate_up, down, x[own], chosen[own], weights[own]), whole[own])
    assert made(ops, gate_up, down, x[:0], chosen[:0], weights[:0]).shape == (0, 96)


def test_experts_that_are_not_chosen_are_not_read_and_none_other_is_taken() -> None:
    ops = native_ops(torch.float32)
    gate_up, down, x, chosen, weights = inputs(torch.float32, 3, 4, 2, (32, 16))
    gate_up[2], down[2] = torch.nan, torch.nan
    chosen[chosen == 2] = 3
    assert bool(made(ops, gate_up, down, x, chosen, weights).isfinite().all())
    for wrong in (-1, 4):
        chosen[1, 1] = wrong
        with pytest.raises(IndexError, match=r"outside 0\.\.3"):
            made(ops, gate_up, down, x, chosen, weights)
