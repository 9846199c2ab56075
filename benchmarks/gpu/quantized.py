"""Times products with quantized weights: python -m benchmarks.gpu.quantized [--sweep].

Each figure is the median of replays of a CUDA graph whose launches read different weights, more
than the L2 cache holds. The error is the relative distance to the product in float32 with the same
weights. "%" is the bytes of the weight over the time over 4.27 TB/s, the card's copy rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

import torch
from torch import Tensor

from benchmarks.gpu.kernels import graph_time
from octavo.kernels import gpu_quantized
from octavo.kernels.formats import Fp8, Grouped, quantize_fp8
from octavo.kernels.ops import PackedWeight
from octavo.kernels.triton import fp8, w4a16

RATE = 4.27e6  # bytes a microsecond
ROTATION = 300 << 20
BF16 = torch.bfloat16
SHAPES_8B = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
SHAPES_70B = {
    "qkv": (10240, 8192),
    "o": (8192, 8192),
    "gate_up": (57344, 8192),
    "down": (8192, 28672),
}


def random_w4(rows: int, columns: int, group: int = 128) -> Grouped:
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device="cuda")
    scale = torch.rand(rows, columns // group, device="cuda").half().float() * 0.004 + 0.001
    scale = scale.half().float()
    zero = torch.randint(1, 16, scale.shape, device="cuda").float()
    return Grouped(codes, scale, zero, group)


def copies(make: Callable[[], PackedWeight]) -> list[PackedWeight]:
    first = make()
    if TURN.of:
        return [first]
    size = first.data.numel() * first.data.element_size()
    return [first] + [make() for _ in range(max(1, ROTATION // size))]


@dataclass
class Turn:
    """Which calls this process runs: all and timed, or a share of them to fill the cache."""

    share: int = 0
    of: int = 0  # 0: time them
    count: int = 0


TURN = Turn()


def report(name: str, weights: list[PackedWeight], run: Callable[[PackedWeight], Tensor]) -> float:
    TURN.count += 1
    if TURN.of:
        if TURN.count % TURN.of == TURN.share:
            run(weights[0])
        return 0.0
    calls = [lambda w=w: run(w) for w in islice(cycle(weights), max(8, len(weights)))]
    time = graph_time(calls, 5)
    size = weights[0].data.numel() * weights[0].data.element_size()
    print(f"{name:<44} {time:8.1f} us  {100 * size / time / RATE:4.0f}%", flush=True)
    return time


def distance(found: Tensor, exact: Tensor) -> float:
    if TURN.of:
        return 0.0
    return float((found.float() - exact).norm() / exact.norm())


def four_bits(shapes: dict[str, tuple[int, int]], sweep: bool) -> None:
    total = dict.fromkeys((1, 8, 16, 32, 64), 0.0)
    for name, (rows, columns) in shapes.items():
        grouped = random_w4(rows, columns)
        exact_weight = grouped.plain(torch.float32)
        weights = copies(partial(packed_w4, rows, columns))
        weights[0] = gpu_quantized.pack_grouped(grouped, dtype=BF16, copy=False)
        for count in total:
            x = torch.randn(count, columns, device="cuda").to(BF16)
            exact = x.float() @ exact_weight.t()
            error = distance(gpu_quantized.linear(x, weights[0], None, None), exact)
            again = gpu_quantized.linear(x, weights[0], None, None)
            same = torch.equal(again, gpu_quantized.linear(x, weights[0], None, None))
            silu = name == "gate_up"
            run = (
                (lambda w, x=x: gpu_quantized.linear_silu(x, w, None))
                if silu
                else (lambda w, x=x: gpu_quantized.linear(x, w, None, None))
            )
            line = f"w4 {name} M={count} error {error:.4f} {'same' if same else 'DIFFERS'}"
            total[count] += report(line, weights, run)
            if sweep:
                _sweep_w4(name, weights, x)
        plain = w4a16.w4_plain(words_of(weights[0]), BF16)
        print(f"   plain error {distance(plain, exact_weight):.4f}", end=" ")
        report(f"w4 {name} made plain", weights, lambda w: w4a16.w4_plain(words_of(w), BF16))
        del weights, exact_weight
    print("32 layers, ms:", {count: round(32 * time / 1e3, 3) for count, time in total.items()})


def packed_w4(rows: int, columns: int) -> PackedWeight:
    return gpu_quantized.pack_grouped(random_w4(rows, columns), dtype=BF16, copy=False)


def words_of(weight: PackedWeight) -> w4a16.Words:
    meta = weight.extra[0]
    return w4a16.Words(weight.data, meta, weight.columns // meta.shape[1])


def _sweep_w4(name: str, weights: list[PackedWeight], x: Tensor) -> None:
    silu = name == "gate_up"
    if x.shape[0] == 1:
        for tile in ((8, 16, 2), (16, 16, 2), (16, 32, 4), (8, 32, 4), (8, 16, 4), (16, 8, 1)):
            _try(
                f"     tile {tile}",
                weights,
                lambda w, tile=tile: w4a16.w4_row(x, words_of(w), silu=silu, tile=tile),
            )
        return
    if x.shape[0] not in (8, 32, 64):
        return
    size = {8: 16, 32: 32, 64: 64}[x.shape[0]]
    for outputs, warps in ((128, 4), (256, 4)) if x.shape[0] < 64 else ((128, 4), (128, 8)):
        for splits in (1, 2) if name == "gate_up" else (2, 3, 4, 7):
            for stages in (2, 3, 4):
                cut = w4a16.RowsCut(size, outputs, splits, warps, stages)
                _try(
                    f"     {cut}",
                    weights,
                    lambda w, cut=cut: w4a16.w4_rows(x, words_of(w), cut=cut),
                )


def _try(name: str, weights: list[PackedWeight], run: Callable[[PackedWeight], Tensor]) -> None:
    try:
        report(name, weights, run)
    except Exception as error:
        print(f"{name}: {type(error).__name__} {str(error)[:80]}", flush=True)


def random_fp8(rows: int, columns: int) -> Fp8:
    made = quantize_fp8(torch.randn(rows, columns, device="cuda", dtype=BF16) * 0.02)
    return Fp8(made.data, torch.full_like(made.scale, 2e-4))


def packed_fp8(rows: int, columns: int) -> PackedWeight:
    return gpu_quantized.pack_fp8(random_fp8(rows, columns), dtype=BF16)


def eight_bits(shapes: dict[str, tuple[int, int]], sweep: bool) -> None:
    total = dict.fromkeys((1, 8, 16, 32, 64, 128, 512), 0.0)
    for name, (rows, columns) in shapes.items():
        base = random_fp8(rows, columns)
        row_scaled = copies(partial(packed_fp8, rows, columns))
        row_scaled[0] = gpu_quantized.pack_fp8(base, dtype=BF16)
        static = [
            gpu_quantized.pack_fp8(Fp8(w.data, w.extra[0], 0.01), dtype=BF16) for w in row_scaled
        ]
        block_scale = torch.full((rows, columns // 128), 2e-4, device="cuda")
        blocks = [gpu_quantized.pack_fp8(Fp8(w.data, block_scale), dtype=BF16) for w in row_scaled]
        exact_weight = base.plain(torch.float32)
        for count in total:
            x = torch.randn(count, columns, device="cuda").to(BF16)
            exact = x.float() @ exact_weight.t()
            for kind, weights in (("row", row_scaled), ("static", static), ("block", blocks)):
                error = distance(gpu_quantized.linear(x, weights[0], None, None), exact)
                line = f"fp8 {kind} {name} M={count} error {error:.4f}"
                time = report(line, weights, lambda w, x=x: gpu_quantized.linear(x, w, None, None))
                if kind == "static":
                    total[count] += time
            if sweep and count == 8:
                _sweep_fp8(static, x)
        del row_scaled, static, blocks, exact_weight
    print("80 layers, static, ms:", {c: round(80 * time / 1e3, 2) for c, time in total.items()})


def _sweep_fp8(weights: list[PackedWeight], x: Tensor) -> None:
    rounded, x_scale = fp8.quantize(x)
    for outputs, columns, splits, stages in (
        *((64, 512, 1, 5), (64, 512, 1, 3), (64, 256, 2, 3), (64, 256, 2, 5), (64, 512, 2, 3)),
        *((64, 256, 1, 5), (32, 512, 1, 5), (32, 512, 2, 5), (32, 256, 4, 5)),
    ):
        cut = fp8.Fp8Cut(outputs, columns, splits, 4, stages)
        _try(
            f"     token {cut}",
            weights,
            lambda w, cut=cut: fp8.fp8_rows(
                rounded, x_scale, w.data, w.extra[0], out_dtype=BF16, cut=cut
            ),
        )
        _try(
            f"     static {cut}",
            weights,
            lambda w, cut=cut: fp8.fp8_rows(
                x, w.extra[1], w.data, w.extra[0], out_dtype=BF16, cut=cut
            ),
        )


def parts() -> Iterator[tuple[str, Callable[[bool], None]]]:
    yield "w4-8b", lambda sweep: four_bits(SHAPES_8B, sweep)
    yield "fp8-70b", lambda sweep: eight_bits(SHAPES_70B, sweep)


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", help="w4-8b or fp8-70b; all if left out")
    parser.add_argument("--sweep", action="store_true", help="other cuts too")
    parser.add_argument("--warm", help="I/N: only run a share of the kernels once")
    args = parser.parse_args()
    if args.warm:
        TURN.share, TURN.of = map(int, args.warm.split("/"))
    for name, run in parts():
        if args.only in name:
            run(args.sweep)


if __name__ == "__main__":
    main()
