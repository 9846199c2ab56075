"""Kernels for quantized weights against products in f32 with the weights that are meant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.kernels.formats import BLOCK, Fp8, Grouped, quantize_fp8
from tests.gpu.measure import bound, distance, poison_allocator

pytest.importorskip("triton")

from octavo.kernels import gpu_quantized
from octavo.kernels.triton import fp8, w4a16

HALVES = [torch.bfloat16, torch.float16]


def grouped(device: torch.device, rows: int, columns: int, group: int) -> Grouped:
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=device)
    scale = (torch.rand(rows, columns // group, device=device) * 0.01 + 0.001).half().float()
    zero = torch.randint(0, 16, scale.shape, device=device).float()
    return Grouped(codes, scale, zero, group)


SHAPES = [(70, 256, 128), (40, 384, 64), (97, 160, 32), (33, 512, 512), (20, 896, 128)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
@pytest.mark.parametrize("count", [1, 2, 17, 64, 65])
def test_four_bits(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, group: int, count: int
) -> None:
    weight = grouped(device, rows, columns, group)
    packed = gpu_quantized.pack_grouped(weight, dtype=dtype, copy=False)
    x, bias = torch.randn(count, columns, device=device).to(dtype), torch.randn(rows).to(dtype)
    bias = bias.to(device)
    exact = x.float() @ weight.plain(torch.float32).t() + bias.float()
    poison_allocator(device)
    found = gpu_quantized.linear(x, packed, bias, torch.float32)
    # Weights with several scales in a tile are rounded to the activations' dtype first.
    assert distance(found, exact) < bound(device, dtype)
    again = gpu_quantized.linear(x, packed, bias, torch.float32)
    assert torch.equal(found, again)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_made_plain(device: torch.device, dtype: torch.dtype, group: int) -> None:
    weight = grouped(device, 45, 256, group)
    found = w4a16.w4_plain(w4a16.pack_words(weight), dtype)
    assert distance(found, weight.plain(torch.float32)) < bound(device, dtype)


@pytest.mark.parametrize("count", [1, 5])
def test_gates_and_order_and_copy(device: torch.device, count: int) -> None:
    dtype = torch.bfloat16
    weight = grouped(device, 60, 256, 64)
    order = torch.randperm(256, device=device)
    weight = Grouped(weight.codes, weight.scale, weight.zero, 64, order)
    plain = weight.plain(torch.float32)
    x = torch.randn(count, 256, device=device).to(dtype)
    gate, up = (x.float() @ plain.t()).to(dtype).float().chunk(2, dim=1)
    exact = torch.nn.functional.silu(gate) * up
    for copy in (False, True):
        packed = gpu_quantized.pack_grouped(weight, dtype=dtype, copy=copy)
        found = gpu_quantized.linear_silu(x, packed, None)
        assert distance(found, exact) < 3 * bound(device, dtype)
        many = torch.randn(70, 256, device=device).to(dtype)
        found = gpu_quantized.linear(many, packed, None, torch.float32)
        assert distance(found, many.float() @ plain.t()) < bound(device, dtype)


@pytest.mark.parametrize(("splits", "outputs"), [(1, 16), (3, 32), (4, 64)])
def test_shared_columns_add_up_in_order(device: torch.device, splits: int, outputs: int) -> None:
    weight = grouped(device, 80, 1024, 128)
    words = w4a16.pack_words(weight)
    x = torch.randn(19, 1024, device=device).to(torch.bfloat16)
    if outputs == 16 and device.type == "cuda":
        outputs = 64
    cut = w4a16.RowsCut(16, outputs, splits, 4, 2)
    exact = x.float() @ weight.plain(torch.float32).t()
    for _ in range(3):  # what is counted is zero again
        poison_allocator(device)
        found = w4a16.w4_rows(x, words, out_dtype=torch.float32, cut=cut)
        assert distance(found, exact) < bound(device, torch.bfloat16)


def meant(x: Tensor, scale: Tensor) -> Tensor:
    """What rounded activations stand for."""
    if scale.dim() == 2:
        return x.float() * scale.t().repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    return x.float() * scale.view(-1, 1)


@pytest.mark.parametrize("count", [1, 3, 16])
@pytest.mark.parametrize("kind", ["token", "static", "block"])
def test_eight_bit_floats_few_rows(device: torch.device, kind: str, count: int) -> None:
    weight = quantize_fp8(torch.randn(96, 384, device=device) * 0.05)
    x = (torch.randn(count, 384, device=device) * 3).to(torch.bfloat16)
    static = torch.tensor([0.02], device=device) if kind == "static" else None
    if kind == "block":
        scale = torch.rand(96, 3, device=device) * 0.01 + 0.001
        weight = Fp8(weight.data, scale)
        rounded, x_scale = fp8.quantize_blocks(x)
    else:
        rounded, x_scale = fp8.quantize(x, static)
    assert distance(meant(rounded, x_scale), x.float()) < 0.08
    bias = torch.randn(96, device=device).to(torch.bfloat16)
    exact = meant(rounded, x_scale) @ weight.plain(torch.float32).t() + bias.float()
    for splits in (1, 2):
        cut = fp8.Fp8Cut(32, 128, splits, 4, 2)
        poison_allocator(device)
        found = fp8.fp8_rows(
            rounded, x_scale, weight.data, weight.scale, bias, out_dtype=torch.float32, cut=cut
        )
        assert distance(found, exact) < bound(device, torch.bfloat16)


def test_a_row_rounds_by_itself(device: torch.device) -> None:
    x = torch.randn(4, 256, device=device).to(torch.bfloat16)
    alone = [fp8.quantize(x[i : i + 1]) for i in range(4)]
    x[1] *= 1000
    x[2, 7] = torch.nan
    rounded, scale = fp8.quantize(x)
    for i in (0, 3):
        assert torch.equal(rounded[i].view(torch.uint8), alone[i][0][0].view(torch.uint8))
        assert torch.equal(scale[i : i + 1], alone[i][1])
    assert bool(meant(rounded, scale)[2].isnan().any())


@pytest.mark.parametrize("kind", ["token", "static", "static-rows", "block", "broken-block"])
@pytest.mark.parametrize("count", [1, 17, 130])
def test_eight_bit_floats(device: torch.device, kind: str, count: int) -> None:
    """Through the table, where the library takes many rows."""
    if device.type != "cuda" and count > fp8.FEW and kind in ("block", "static-rows", "token"):
        pytest.skip("the library's product is the GPU's")
    weight = quantize_fp8(torch.randn(256, 512, device=device) * 0.05)
    if kind.startswith("static"):
        scale = weight.scale if kind == "static-rows" else torch.full_like(weight.scale, 3e-4)
        weight = Fp8(weight.data, scale, 0.02)
    elif kind != "token":
        scale = torch.rand(2, 4, device=device) * 0.01 + 0.001
        scale = scale.repeat_interleave(128, 0)
        if kind == "broken-block":
            scale = scale.roll(64, 0)
        weight = Fp8(weight.data, scale)
    packed = gpu_quantized.pack_fp8(weight, dtype=torch.bfloat16)
    x = torch.randn(count, 512, device=device).to(torch.bfloat16)
    exact = x.float() @ weight.plain(torch.float32).t()
    found = gpu_quantized.linear(x, packed, None, torch.float32)
    # Activations of 8 bits, which the interpreter cuts where a GPU rounds.
    assert distance(found, exact) < (0.06 if device.type == "cuda" else 0.12)


@pytest.mark.parametrize("processors", [16, 78, 132, 148])
def test_cuts_fit_into_their_room(processors: int) -> None:
    """Whatever the shape: programs that share a tile have a place for what they find."""
    for outputs in (64, 4096, 6144, 28672, 38400, 57344, 151936, 262144):
        for columns in (128, 576, 4096, 14336, 28672):
            for count in (2, 16, 17, 33, 64):
                cut = w4a16.rows_cut(count, outputs, columns, processors)
                tiles = -(-outputs // cut.outputs)
                assert cut.splits == 1 or (
                    tiles <= w4a16.MOST_TILES
                    and tiles * cut.splits * cut.rows * cut.outputs <= w4a16.MOST_CELLS
                )
            for blocked in (False, True):
                few = fp8.fp8_cut(outputs, columns, processors, blocked=blocked)
                tiles = -(-outputs // few.outputs)
                assert few.splits == 1 or (
                    tiles <= fp8.MOST_TILES
                    and tiles * few.splits * fp8.FEW * few.outputs <= fp8.MOST_CELLS
                )
