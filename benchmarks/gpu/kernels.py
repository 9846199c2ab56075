"""Times every GPU kernel on its own: python benchmarks/gpu/kernels.py [--only WORD] [--json FILE].

Each figure is the median of replays of a CUDA graph whose launches read different memory, more
than the L2 cache holds; random data. "%" is the bytes that must move, over the time, over the
card's own copy rate, measured first; prefill is in TFLOP/s. An operation of one layer is a
Llama-3.1-8B layer's: 32 query heads, 8 key heads of 128, hidden 4096, MLP 14336.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octavo.attention.base import AttentionNeed, HeadRules
from octavo.attention.triton import EVEN, UNEVEN, TritonAttention
from octavo.device.cuda import CudaDevice
from octavo.forward import ForwardBatch, KVCache
from octavo.kernels.gpu import linear, linear_silu, triton_ops
from octavo.kernels.ops import PackedWeight, SampleRows

QUERY_HEADS, KEY_HEADS, SIZE, PAGE = 32, 8, 128, 64
HIDDEN, INNER, LAYERS, VOCAB = 4096, 14336, 32, 128256
CONTEXT = 512
ROTATION = 400 << 20  # bytes that the launches of a graph read in turn, at least
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn

Row = tuple[str, str, float, str]  # group, case, microseconds, what it reaches


def graph_time(calls: list[Callable[[], object]], repeats: int = 7) -> float:
    """Microseconds a call, of calls captured together."""
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return float(np.median(times))


def copy_rate(device: torch.device) -> float:
    """Bytes read and written a microsecond by a copy of 2 GiB."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(8):
        start.record()
        target.copy_(source)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return 2 * source.numel() / float(np.median(times))


class Card:
    """The device, its copy rate, and random pages and batches upon it."""

    def __init__(self) -> None:
        device = CudaDevice()
        device.start()
        self.device = device.torch_device
        self.rate = copy_rate(self.device)
        self.title = f"{device.notes[0]}; copy {self.rate / 1e6:.2f} TB/s"

    def need(self, cache: torch.dtype) -> AttentionNeed:
        return AttentionNeed(
            num_heads=QUERY_HEADS,
            num_kv_heads=KEY_HEADS,
            head_dim=SIZE,
            scale=SIZE**-0.5,
            block_size=PAGE,
            dtype=BF16,
            cache_dtype=cache,
            device=str(self.device),
        )

    def batch(
        self, q_lens: list[int], kv_lens: list[int], cache: torch.dtype, layers: int
    ) -> ForwardBatch:
        """Rows on pages in random order, with the table of a 32k model."""
        widths = [-(-length // PAGE) for length in kv_lens]
        order = torch.randperm(sum(widths))
        table = torch.zeros(len(kv_lens), 32768 // PAGE, dtype=torch.int32)
        positions, slots, used = [], [], 0
        for row, (count, length) in enumerate(zip(q_lens, kv_lens, strict=True)):
            table[row, : widths[row]] = order[used : used + widths[row]].int()
            used += widths[row]
            at = torch.arange(length - count, length)
            positions.append(at)
            slots.append(table[row].long()[at // PAGE] * PAGE + at % PAGE)
        ends = np.cumsum([0, *q_lens])
        shape = (sum(widths), KEY_HEADS, PAGE, SIZE)

        def pages() -> tuple[Tensor, ...]:
            made = (torch.randn(shape, device=self.device, dtype=BF16) for _ in range(layers))
            return tuple(page.to(cache) for page in made)

        def ints(values: Tensor) -> Tensor:
            return values.to(torch.int32).to(self.device)

        return ForwardBatch(
            num_rows=len(q_lens),
            num_tokens=int(ends[-1]),
            num_decodes=next((i for i, n in enumerate(q_lens) if n != 1), len(q_lens)),
            positions=ints(torch.cat(positions)),
            slot_map=ints(torch.cat(slots)),
            q_indptr=ints(torch.from_numpy(ends)),
            kv_lens=ints(torch.tensor(kv_lens)),
            block_table=table.to(self.device),
            sample_rows=ints(torch.from_numpy(ends[1:] - 1)),
            max_q=max(q_lens),
            max_kv=max(kv_lens),
            kv=KVCache(pages(), pages(), PAGE),
            kv_lens_host=np.array(kv_lens, np.int32),
        )

    def percent(self, size: float, time: float) -> str:
        return f"{100 * size / time / self.rate:.0f}%"


def attend_times(
    card: Card, q_lens: list[int], kv_lens: list[int], cache: torch.dtype, form: str | None
) -> float:
    """Microseconds of one layer's attention, without the store."""
    need = card.need(cache)
    size = sum(kv_lens) * KEY_HEADS * SIZE * 2 * cache.itemsize
    layers = max(2, min(16, -(-ROTATION // size)))
    batch = card.batch(q_lens, kv_lens, cache, layers)
    backend = TritonAttention()
    backend.layout(need, 1)
    batch = replace(batch, attn=backend.plan(batch, form))
    q = torch.randn(batch.num_tokens, QUERY_HEADS, SIZE, device=card.device, dtype=BF16)

    def call(layer: int) -> Callable[[], object]:
        return lambda: backend._attend(q, layer, need, batch)

    return graph_time([call(layer) for layer in range(layers)])


def decode(card: Card) -> Iterator[Row]:
    """Rows of one query; each form where it applies, and which one the host would choose."""
    random = np.random.default_rng(0)
    cases = {
        "1 x 1k": [1024],
        "1 x 4k": [4096],
        "8 x 1k": [1024] * 8,
        "16 x 1k": [1024] * 16,
        "16 x 4k": [4096] * 16,
        "64 x 1k": [1024] * 64,
        "64 x 4k": [4096] * 64,
        "256 x 1k": [1024] * 256,
        "64 random 1..4k": random.integers(1, 4097, 64).tolist(),
        "256 random 1..4k": random.integers(1, 4097, 256).tolist(),
        "512 random 100..2k": random.integers(100, 2048, 512).tolist(),
        "1 x 32k + 15 x 512": [32768] + [512] * 15,
        "4 x 16k + 60 x 512": [16384] * 4 + [512] * 60,
        "1 x 32k + 127 x 512": [32768] + [512] * 127,
    }
    backend = TritonAttention()
    for cache in (BF16, E4M3):
        backend.layout(card.need(cache), 1)
        for name, lens in cases.items():
            size = sum(lens) * KEY_HEADS * SIZE * 2 * cache.itemsize
            chosen = backend.choose(np.array(lens, np.int32))
            for form in (EVEN, UNEVEN):
                time = attend_times(card, [1] * len(lens), lens, cache, form)
                mark = "  <- chosen" if form == chosen else ""
                word = f"decode {'fp8' if cache == E4M3 else 'bf16'}"
                yield word, f"{name}, {form}", time, card.percent(size, time) + mark


def prefill(card: Card) -> Iterator[Row]:
    """Causal attention of prompts and chunks."""
    cases = {
        "1 x 128": [(128, 128)],
        "1 x 512": [(512, 512)],
        "1 x 2k": [(2048, 2048)],
        "8 x 2k": [(2048, 2048)] * 8,
        "1 x 8k": [(8192, 8192)],
        "chunk of 2k at 8k": [(2048, 8192)],
        "chunk of 64 at 4k": [(64, 4096)],
        "8 of 300..3192": [(n, n) for n in range(300, 3200, 413)],
        "64 decodes at 1k + chunk of 2k": [(1, 1024)] * 64 + [(2048, 2048)],
    }
    for cache in (BF16, E4M3):
        for name, rows in cases.items():
            q_lens, kv_lens = [q for q, _ in rows], [kv for _, kv in rows]
            time = attend_times(card, q_lens, kv_lens, cache, None)
            work = sum(4 * QUERY_HEADS * SIZE * (q * kv - q * (q - 1) / 2) for q, kv in rows)
            word = f"prefill {'fp8' if cache == E4M3 else 'bf16'}"
            yield word, name, time, f"{work / time / 1e6:.0f} TFLOP/s"


def weights(card: Card, rows: int, columns: int) -> list[PackedWeight]:
    copies = max(2, min(24, ROTATION // (rows * columns * 2)))
    data = [torch.randn(rows, columns, device=card.device, dtype=BF16) for _ in range(copies)]
    return [PackedWeight(one, rows, columns, BF16, "plain") for one in data]


def products(card: Card) -> Iterator[Row]:
    """Linear layers of the 8B and the 0.6B shape at few rows."""
    shapes = {
        "8B qkv": (6144, HIDDEN),
        "8B o": (HIDDEN, HIDDEN),
        "8B gate_up + silu": (2 * INNER, HIDDEN),
        "8B down": (HIDDEN, INNER),
        "8B head": (VOCAB, HIDDEN),
        "0.6B qkv": (4096, 1024),
        "0.6B o": (1024, 2048),
        "0.6B gate_up + silu": (6144, 1024),
        "0.6B down": (1024, 3072),
    }
    for name, (rows, columns) in shapes.items():
        packed = weights(card, rows, columns)
        wide = torch.float32 if "head" in name else None
        for count in (1, 2, 8, 16, 64, 256):
            x = torch.randn(count, columns, device=card.device, dtype=BF16)
            if "silu" in name:
                calls = [lambda w=w, x=x: linear_silu(x, w, None) for w in packed]
            else:
                calls = [lambda w=w, x=x, d=wide: linear(x, w, None, d) for w in packed]
            time = graph_time(calls)
            yield "linear", f"{name}, {count} rows", time, card.percent(rows * columns * 2, time)


def chain(card: Card) -> Iterator[Row]:
    """All layers of the 8B shape at CONTEXT keys a row: what a decode step's graph holds."""
    layer = {
        "qkv": (6144, HIDDEN),
        "o": (HIDDEN, HIDDEN),
        "gate_up": (2 * INNER, HIDDEN),
        "down": (HIDDEN, INNER),
    }
    made = [
        {name: weights_of(card, *shape) for name, shape in layer.items()} for _ in range(LAYERS)
    ]
    head = weights_of(card, VOCAB, HIDDEN)
    ops = triton_ops(BF16, card.device)
    assert not isinstance(ops, str), ops
    need, backend = card.need(BF16), TritonAttention()
    backend.layout(need, 1)
    norm = torch.ones(HIDDEN, device=card.device, dtype=BF16)
    rules = HeadRules(torch.randn(32768, SIZE, device=card.device))
    size = sum(one.data.numel() * 2 for block in made for one in block.values())
    size += head.data.numel() * 2
    for count in (1, 8, 64, 256, 512):
        batch = card.batch([1] * count, [CONTEXT] * count, BF16, 4)
        batch = replace(batch, attn=backend.plan(batch))
        x = torch.randn(count, HIDDEN, device=card.device, dtype=BF16)

        def products_only(x: Tensor = x) -> Tensor:
            for block in made:
                linear(x, block["qkv"], None, None)
                change = linear(x, block["o"], None, None)
                inner = linear_silu(change, block["gate_up"], None)
                x = linear(inner, block["down"], None, None)
            return linear(x, head, None, torch.float32)

        def step(x: Tensor = x, batch: ForwardBatch = batch) -> Tensor:
            change, residual = x, x
            for index, block in enumerate(made):
                normed, residual = ops.add_rms_norm(change, residual, norm, 1e-5)
                qkv = linear(normed, block["qkv"], None, None)
                found = backend.forward_fused(qkv, rules, index % 4, need, batch)
                change = linear(found, block["o"], None, None)
                normed, residual = ops.add_rms_norm(change, residual, norm, 1e-5)
                change = linear(
                    linear_silu(normed, block["gate_up"], None), block["down"], None, None
                )
            normed, _ = ops.add_rms_norm(change, residual, norm, 1e-5)
            return linear(normed, head, None, torch.float32)

        time = graph_time([products_only])
        yield "8B chain", f"products, {count} rows", time, card.percent(size, time)
        time = graph_time([step])
        moved = size + count * CONTEXT * KEY_HEADS * SIZE * 4 * LAYERS
        yield "8B chain", f"whole step, {count} rows at {CONTEXT}", time, card.percent(moved, time)


def weights_of(card: Card, rows: int, columns: int) -> PackedWeight:
    data = torch.randn(rows, columns, device=card.device, dtype=BF16) * columns**-0.5
    return PackedWeight(data, rows, columns, BF16, "plain")


def small(card: Card) -> Iterator[Row]:
    """Norms, activation, rotation with store."""
    ops = triton_ops(BF16, card.device)
    assert not isinstance(ops, str), ops
    for count in (1, 64, 256, 2048):
        x, residual = torch.randn(2, count, HIDDEN, device=card.device, dtype=BF16)
        norm = torch.ones(HIDDEN, device=card.device, dtype=BF16)
        gates = torch.randn(count, 2 * INNER, device=card.device, dtype=BF16)
        time = graph_time([lambda: ops.add_rms_norm(x, residual, norm, 1e-5)] * 20)  # noqa: B023
        yield "small", f"add_rms_norm, {count} rows", time, card.percent(x.numel() * 8, time)
        time = graph_time([lambda: ops.silu_mul(gates)] * 20)  # noqa: B023
        yield "small", f"silu_mul, {count} rows", time, card.percent(gates.numel() * 3, time)


def sampling(card: Card) -> Iterator[Row]:
    """Tokens of S rows out of 128,256."""
    ops = triton_ops(BF16, card.device)
    assert not isinstance(ops, str), ops
    settings = {
        "greedy": (0.0, 0, 1.0, 0.0),
        "temperature 0.6": (0.6, 0, 1.0, 0.0),
        "top_k 50": (0.6, 50, 1.0, 0.0),
        "top_p 0.9": (0.6, 0, 0.9, 0.0),
        "min_p 0.05": (0.6, 0, 1.0, 0.05),
        "top_k 50, top_p 0.9": (0.6, 50, 0.9, 0.0),
    }
    for count in (1, 64, 256, 512):
        logits = torch.randn(count, VOCAB, device=card.device) * 3
        for name, (temperature, top_k, top_p, min_p) in settings.items():
            rows = SampleRows(
                torch.full((count,), temperature, device=card.device),
                torch.full((count,), top_k, dtype=torch.int32, device=card.device),
                torch.full((count,), top_p, device=card.device),
                torch.full((count,), min_p, device=card.device),
                torch.randint(0, 1 << 60, (count,), device=card.device),
                torch.randint(0, 1 << 10, (count,), device=card.device),
                filtered=(top_k, top_p, min_p) != (0, 1.0, 0.0),
            )
            time = graph_time([lambda r=rows, x=logits: ops.sample(x, r)] * 4)
            yield "sample", f"{name}, {count} rows", time, card.percent(logits.numel() * 4, time)


GROUPS = (decode, prefill, products, chain, small, sampling)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="groups whose function's name holds this word")
    parser.add_argument("--json", type=Path, help="file for the rows, one a line")
    options = parser.parse_args()
    card = Card()
    print(card.title)
    lines = []
    with torch.inference_mode():
        for group in GROUPS:
            if options.only not in group.__name__:
                continue
            for word, case, time, reached in group(card):
                print(f"{word:12} {case:42} {time:9.1f} us  {reached}", flush=True)
                row = {"group": word, "case": case, "us": round(time, 2), "reached": reached}
                lines.append(json.dumps(row))
    if options.json is not None:
        options.json.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
