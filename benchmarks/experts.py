"""Routed experts on the CPU beside the time that their bytes take.

    python benchmarks/experts.py [--shape qwen3-30b-a3b] [--threads 2] [--rounds 30] [--layer]

One layer of experts in bf16 at the real sizes, random weights, and tokens whose experts are drawn
evenly. Each round measures the machine's streaming rate (the best of summing a large tensor and of
one row times a large matrix) and then runs each batch size, so that a busy neighbour slows both
alike; the figures are medians over rounds, and the ratio is that of a round's own time to the bytes
of the experts that its tokens touched at its own rate. With one thread times are CPU time, which a
busy machine disturbs least; two threads of which one lost its core say nothing, so look at the
least as well. With --layer the router and the shared experts are timed too. Not for: whole models.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.experts import looped
from octavo.kernels.ops import Ops
from octavo.kernels.select import select
from octavo.layers.experts import route
from octavo.models.spec import MoeSpec


@dataclass(frozen=True)
class Shape:
    """One layer of experts."""

    hidden: int
    spec: MoeSpec


def shape(hidden: int, experts: int, top: int, width: int, shared: int = 0) -> Shape:
    return Shape(hidden, MoeSpec(experts, top, width, (True,), shared_size=shared))


SHAPES = {
    "qwen3-30b-a3b": shape(2048, 128, 8, 768),
    "deepseek-v2-lite": shape(2048, 64, 6, 1408, shared=2816),
    "qwen2-moe-a2.7b": shape(2048, 60, 4, 1408, shared=5632),
    "mixtral-8x7b": shape(4096, 8, 2, 14336),
}
TOKENS = (1, 2, 4, 8, 16, 32)
READ = 256 << 20  # bytes
WIDE = 2048  # columns of a matrix that is read


class Layer:
    """Experts of one shape, and what stands around them."""

    def __init__(self, ops: Ops, chosen: Shape, *, loop: bool = False) -> None:
        spec, hidden = chosen.spec, chosen.hidden
        self.spec, self.hidden, self.ops = spec, hidden, ops
        count, width = spec.num_experts, spec.intermediate_size
        make = looped(ops) if loop or ops.experts is None else ops.experts
        self.experts = make(noise(count, 2 * width, hidden), noise(count, hidden, width))
        self.router = ops.pack(noise(count, hidden))
        size = spec.shared_size
        self.shared = (ops.pack(noise(2 * size, hidden)), ops.pack(noise(hidden, size)))

    def whole(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """All of the layer, x [T, H] -> (result, experts)."""
        chosen, weights = route(
            self.ops.linear(x, self.router, None, torch.float32), self.spec, None
        )
        out = self.experts(x, chosen, weights)
        if self.spec.shared_size:
            inner = self.ops.silu_mul(self.ops.linear(x, self.shared[0], None, None))
            out = out + self.ops.linear(inner, self.shared[1], None, None)
        return out, chosen

    def bytes_of(self, chosen: Tensor, *, whole: bool) -> int:
        """What must be read for these experts."""
        each = 3 * self.hidden * 2
        total = chosen.unique().numel() * each * self.spec.intermediate_size
        if whole:
            total += each * self.spec.shared_size + self.spec.num_experts * self.hidden * 2
        return total


def noise(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.bfloat16).uniform_(-0.03, 0.03)


def draw(spec: MoeSpec, tokens: int) -> tuple[Tensor, Tensor]:
    """Experts i64[T, k], each token's different ones, and weights f32[T, k]."""
    rows = [torch.randperm(spec.num_experts)[: spec.top_k] for _ in range(tokens)]
    return torch.stack(rows), torch.rand(tokens, spec.top_k)


class Clock:
    """Times work, and the streaming of memory, with so many threads."""

    def __init__(self, ops: Ops, threads: int) -> None:
        self._now = time.process_time if threads == 1 else time.perf_counter
        self._parts = torch.ones(READ // 8, dtype=torch.int64).chunk(threads)
        self._pool = ThreadPoolExecutor(threads)
        self._ops = ops
        self._row = noise(1, WIDE)
        self._matrix = ops.pack(noise(READ // WIDE // 2, WIDE))

    def seconds(self, work: Callable[[], object]) -> float:
        start = self._now()
        work()
        return self._now() - start

    def rate(self) -> float:
        """Bytes a second, the best of four: a read that was disturbed says nothing."""
        ways = (self._sum, self._product) * 2
        return READ / min(self.seconds(way) for way in ways)

    def _sum(self) -> None:
        # Not torch's own threads: they would go on spinning beside those of the kernels.
        list(self._pool.map(Tensor.sum, self._parts))

    def _product(self) -> None:
        self._ops.linear(self._row, self._matrix, None, None)


def measure(layer: Layer, clock: Clock, tokens: int, *, whole: bool) -> tuple[float, int]:
    """(seconds, bytes that were touched) of one run with new tokens."""
    x = noise(tokens, layer.hidden)
    if whole:
        taken = clock.seconds(lambda: layer.whole(x))
        return taken, layer.bytes_of(layer.whole(x)[1], whole=True)
    chosen, weights = draw(layer.spec, tokens)
    taken = clock.seconds(lambda: layer.experts(x, chosen, weights))
    return taken, layer.bytes_of(chosen, whole=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--kernels", default="auto", help="auto, native, onednn or reference")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layer", action="store_true", help="with router and shared experts")
    parser.add_argument("--loop", action="store_true", help="an expert at a time, to compare")
    args = parser.parse_args()
    torch.set_num_threads(args.threads if args.kernels in ("onednn", "reference") else 1)
    ops, notes = select(torch.bfloat16, args.kernels, threads=args.threads)
    print(notes[-1])
    layer = Layer(ops, SHAPES[args.shape], loop=args.loop)
    clock = Clock(ops, args.threads)
    rates: list[float] = []
    found: dict[int, list[tuple[float, float, float]]] = {tokens: [] for tokens in TOKENS}
    for turn in range(args.rounds + 1):
        for tokens in TOKENS:
            rate = clock.rate()
            taken, size = measure(layer, clock, tokens, whole=args.layer)
            if turn:  # the first warms up
                rates.append(rate)
                found[tokens].append((taken, size / taken, taken * rate / size))
    print(f"{args.shape}, {args.threads} threads; reads {statistics.median(rates) / 1e9:.1f} GB/s")
    print("tokens   time, ms   GB/s   ratio to the bytes (least to most)")
    for tokens, rows in found.items():
        taken, rate, ratio = (statistics.median(column) for column in zip(*rows, strict=True))
        ratios = [row[2] for row in rows]
        print(
            f"{tokens:6} {taken * 1e3:10.2f} {rate / 1e9:6.1f}   {ratio:.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
