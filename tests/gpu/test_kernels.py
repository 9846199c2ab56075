"""Small kernels of the GPU against the reference in f32 or f64, on fresh random inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from tests.gpu.measure import bound, distance, poison, poison_allocator

pytest.importorskip("triton")

from octavo.kernels.triton import activation, gemv, norm, rotary, skinny
from octavo.kernels.triton.launch import gpu_of

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 576), (5, 1024), (2, 5120)])
def test_norms(device: torch.device, dtype: torch.dtype, rows: int, size: int) -> None:
    x, residual = random(device, dtype, rows, size), random(device, dtype, rows, size)
    weight = random(device, dtype, size)
    poison_allocator(device)
    plain = norm.rms_norm(x, weight, 1e-5)
    both, total = norm.add_rms_norm(x, residual, weight, 1e-5)
    # The interpreter cuts where a GPU rounds.
    assert distance(total, x + residual) < (1e-9 if device.type == "cuda" else bound(device, dtype))
    assert distance(plain, reference.rms_norm(x.float(), weight.float(), 1e-5)) < bound(
        device, dtype
    )
    exact = reference.rms_norm((x + residual).float(), weight.float(), 1e-5)
    assert distance(both, exact) < bound(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1536), (7, 100), (2, 14336)])
def test_silu_mul(device: torch.device, dtype: torch.dtype, rows: int, size: int) -> None:
    x = random(device, dtype, rows, 2 * size) * 3
    poison_allocator(device)
    found = activation.silu_mul(x)
    assert distance(found, reference.silu_mul(x.float())) < bound(device, dtype)
    found = activation.gelu_mul(x)
    assert distance(found, reference.gelu_mul(x.float())) < bound(device, dtype)
    extreme = torch.tensor([[-1e4, 1e4, -0.0, 2.0, 2.0, 2.0]], device=device, dtype=dtype)
    assert torch.equal(activation.silu_mul(extreme), reference.silu_mul(extreme))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 64), (9, 3, 80), (2, 1, 256)])
def test_rope(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int
) -> None:
    q, k = random(device, dtype, 5, heads, size), random(device, dtype, 5, kv_heads, size)
    table = torch.randn(40, size, device=device)
    positions = torch.randint(0, 40, (5,), device=device, dtype=torch.int32)
    poison_allocator(device)
    found = rotary.rope(q, k, positions, table)
    expected = reference.rope(q.float(), k.float(), positions, table)
    for one, other in zip(found, expected, strict=True):
        assert distance(one, other) < bound(device, dtype)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("dtype", "cache"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e5m2),
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "page"), [(4, 2, 64, 16), (3, 1, 96, 32)])
def test_rope_store(
    device: torch.device,
    dtype: torch.dtype,
    cache: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    page: int,
    norms: bool,
) -> None:
    """Queries are as rotated apart; pages hold the cast keys and values and nothing else moved."""
    tokens, pages = 7, 5
    qkv = random(device, dtype, tokens, (heads + 2 * kv_heads) * size)
    weights = [random(device, dtype, size) for _ in range(2)] if norms else [None, None]
    table = torch.randn(50, size, device=device)
    positions = torch.randint(0, 50, (tokens,), device=device, dtype=torch.int32)
    slots = 2 * torch.randperm(pages * page // 2, device=device)[:tokens].int()  # no neighbours
    slots[3] = -1
    lonely = (slots % page != 0) & (slots >= 0)  # a page's first token clears the cells after it
    slots = torch.where(lonely, slots, -1)
    cells = [torch.randn(pages, kv_heads, page, size, device=device).to(cache) for _ in range(2)]
    before = [cell.clone() for cell in cells]
    poison_allocator(device)
    found = rotary.rope_store(
        qkv,
        *cells,
        positions=positions,
        slot_map=slots,
        num_heads=heads,
        cos_sin=table,
        query_norm=weights[0],
        key_norm=weights[1],
        eps=1e-6,
    )
    q, k, v = qkv.view(tokens, -1, size).split([heads, kv_heads, kv_heads], dim=1)
    if norms:
        q = reference.rms_norm(q, weights[0], 1e-6)
        k = reference.rms_norm(k, weights[1], 1e-6)
    q, k = reference.rope(q, k, positions, table)
    assert distance(found, q.float()) < bound(device, dtype)
    for cell, old, new in zip(cells, before, (k, v), strict=True):
        expected = old.float()
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot // page, :, slot % page] = new[token].float().to(cache).float()
        # One step of the cache's own rounding, where a key lies on an edge.
        assert distance(cell.float(), expected) < max(bound(device, dtype, cache), 1e-2)
        untouched = torch.ones(pages * page, dtype=torch.bool)
        untouched[slots[slots >= 0].cpu().long()] = False
        same = (cell.view(torch.uint8) == old.view(torch.uint8)).view(*cell.shape, -1).all(dim=-1)
        same = same.all(dim=-1).transpose(1, 2).reshape(-1, kv_heads).all(dim=1).cpu()
        assert bool(same[untouched].all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(48, 64), (130, 576), (1000, 4096), (64, 14336)])
def test_gemv(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, bias: bool, silu: bool
) -> None:
    x = random(device, dtype, 1, columns)
    weight = random(device, dtype, rows, columns)
    shift = random(device, dtype, rows) if bias else None
    poison_allocator(device)
    found = gemv.gemv(x, weight, shift, silu=silu)
    expected = x.float() @ weight.float().t()
    if shift is not None:
        expected += shift.float()
    if silu:
        expected = reference.silu_mul(expected)
    assert found.shape == expected.shape
    assert distance(found, expected) < bound(device, dtype)
    if not silu:
        wide = gemv.gemv(x, weight, shift, out_dtype=torch.float32)
        assert wide.dtype == torch.float32
        assert distance(wide, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [2, 16, 17, 64, 100, 200])
@pytest.mark.parametrize(("rows", "columns"), [(48, 64), (130, 584), (1000, 4096), (2048, 14336)])
def test_skinny(
    device: torch.device,
    dtype: torch.dtype,
    count: int,
    rows: int,
    columns: int,
    bias: bool,
    silu: bool,
) -> None:
    """Products over whole tiles and shared ones, and what a row gets beside broken rows."""
    if not gpu_of(device).hopper:
        pytest.skip("no GPU of compute capability 9")
    x, weight = random(device, dtype, count, columns), random(device, dtype, rows, columns)
    weight /= columns**0.5
    shift = random(device, dtype, rows) if bias else None
    poison_allocator(device)
    found = skinny.skinny(x, weight, shift, silu=silu)
    expected = x.float() @ weight.float().t()
    if shift is not None:
        expected += shift.float()
    if silu:
        expected = reference.silu_mul(expected)
    assert found.shape == expected.shape
    assert distance(found, expected) < bound(device, dtype)
    x[1:] = torch.nan
    again = skinny.skinny(x, weight, shift, silu=silu)
    assert torch.equal(again[0], found[0])
    if not silu:
        wide = skinny.skinny(x[:1].expand(count, columns), weight, shift, out_dtype=torch.float32)
        # Tensor cores cut sums towards zero at each step of 16 columns, where f32 would round. Over
        # 1,024 columns the library's product is off by the same 9.9e-7, of which 8.5e-7 is bias.
        assert distance(wide, expected[:1].expand(count, rows)) < max(1e-5, 2e-9 * columns)


def test_poison_is_seen() -> None:
    assert distance(poison(torch.zeros(4)), torch.ones(4)) != distance(
        torch.zeros(4), torch.ones(4)
    )
