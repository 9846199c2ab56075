"""Times each native kernel and the whole stack on SmolLM2-135M's shapes, random weights.

    python benchmarks/kernels.py [--threads 1 2] [--only stack] [--seconds 1.0]

Prints the median of each case beside what it moves (GB/s) or computes (GFLOP/s). With one thread
times are CPU time, which a busy machine disturbs least; with more they are wall time. Limits of
the machine are measured first, in the same way. Not for: whole engines.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from octavo.attention.base import AttentionNeed
from octavo.attention.native import NativeAttention
from octavo.forward import ForwardBatch, KVCache
from octavo.kernels.cpu.binding import load
from octavo.kernels.cpu.native import NativeOps
from octavo.kernels.ops import Ops, SampleRows
from octavo.kernels.stack import StackBlock, StackModel

HIDDEN, INNER, QUERIES, KEYS, HEAD, VOCABULARY, LAYERS = 576, 1536, 9, 3, 64, 49152, 30
PAGE = 16
DTYPE = torch.bfloat16


class Timer:
    """Medians over about `seconds` of repeats, after one to warm up."""

    def __init__(self, threads: int, seconds: float) -> None:
        self.clock = time.process_time if threads == 1 else time.perf_counter
        self.threads = threads
        self.seconds = seconds

    def measure(self, work: Callable[[], object]) -> tuple[float, float]:
        """(median, least) seconds."""
        work()
        times: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(times) < 5 or (time.perf_counter() < end and len(times) < 5000):
            start = self.clock()
            work()
            times.append(self.clock() - start)
        return statistics.median(times), min(times)

    def show(
        self, name: str, work: Callable[[], object], *, bytes_: float = 0, flops: float = 0
    ) -> None:
        seconds, best = self.measure(work)
        line = f"{self.threads} thread{'s' * (self.threads > 1):1} {name:36} "
        line += f"{seconds * 1e3:9.3f} ms (best {best * 1e3:9.3f})"
        if bytes_:
            line += f" {bytes_ / seconds / 1e9:8.1f} GB/s"
        if flops:
            line += f" {flops / seconds / 1e9:8.0f} GFLOP/s"
        print(line, flush=True)


def linears(ops: Ops, timer: Timer) -> None:
    for columns, rows in ((HIDDEN, 2 * INNER), (INNER, HIDDEN), (HIDDEN, VOCABULARY)):
        copies = max(1, (96 << 20) // (rows * columns * 2))  # out of all caches
        weights = [ops.pack(torch.randn(rows, columns).to(DTYPE)) for _ in range(copies)]
        for tokens in (1, 8, 32, 256):
            if rows == VOCABULARY and tokens > 32:
                continue
            x = torch.randn(tokens, columns).to(DTYPE)
            turn = iter(range(10**9))

            def work(x: torch.Tensor = x, weights: list = weights, turn: object = turn) -> None:
                ops.linear(x, weights[next(turn) % len(weights)], None, None)

            timer.show(
                f"linear {columns}->{rows} T={tokens}",
                work,
                bytes_=rows * columns * 2,
                flops=2 * rows * columns * tokens,
            )


def rows_of(lengths: list[int], tokens: list[int], kv: KVCache) -> ForwardBatch:
    """A batch of rows with these lengths, the last `tokens[r]` of which are computed."""
    width = max(-(-length // PAGE) for length in lengths)
    pages = torch.randperm(kv.keys[0].shape[0])[: len(lengths) * width].int().view(-1, width)
    positions, slots, indptr = [], [], [0]
    for row, (length, count) in enumerate(zip(lengths, tokens, strict=True)):
        span = torch.arange(length - count, length)
        positions.append(span)
        slots.append(pages[row][span // PAGE] * PAGE + span % PAGE)
        indptr.append(indptr[-1] + count)
    return ForwardBatch(
        num_rows=len(lengths),
        num_tokens=indptr[-1],
        num_decodes=sum(count == 1 for count in tokens),
        positions=torch.cat(positions).int(),
        slot_map=torch.cat(slots).int(),
        q_indptr=torch.tensor(indptr, dtype=torch.int32),
        kv_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=pages.contiguous(),
        sample_rows=torch.tensor(indptr[1:], dtype=torch.int32) - 1,
        max_q=max(tokens),
        max_kv=max(lengths),
        kv=kv,
    )


def cache(attention: NativeAttention, need: AttentionNeed, layers: int, blocks: int) -> KVCache:
    layout = attention.layout(need, blocks)

    def pages() -> torch.Tensor:
        return (torch.randn(layout.key) * 0.5).to(DTYPE)

    return KVCache(
        tuple(pages() for _ in range(layers)), tuple(pages() for _ in range(layers)), PAGE
    )


def attentions(attention: NativeAttention, need: AttentionNeed, timer: Timer) -> None:
    layers = 6  # in turn, so that pages come from memory
    kv = cache(attention, need, layers, 1200)
    cases = [
        ("1 x 512", [512], [1]),
        ("32 x 512", [512] * 32, [1] * 32),
        ("1 x 8192", [8192], [1]),
        ("prefill 256", [256], [256]),
        ("prefill 1024", [1024], [1024]),
        ("prefill last 512 of 8192", [8192], [512]),
    ]
    for name, lengths, tokens in cases:
        batch = rows_of(lengths, tokens, kv)
        count = sum(tokens)
        q = torch.randn(count, QUERIES, HEAD).to(DTYPE)
        k, v = torch.randn(2, count, KEYS, HEAD).to(DTYPE)
        turn = iter(range(10**9))

        def work(batch: object = batch, q=q, k=k, v=v, turn: object = turn) -> None:
            attention.forward(q, k, v, next(turn) % layers, need, batch)

        pairs = sum(n * (2 * length - n + 1) / 2 for length, n in zip(lengths, tokens, strict=True))
        decode = count == len(lengths)
        timer.show(
            f"attention {name}",
            work,
            bytes_=sum(lengths) * 2 * KEYS * HEAD * 2 if decode else 0,
            flops=4 * pairs * QUERIES * HEAD,
        )


def samples(ops: Ops, timer: Timer) -> None:
    count = 32
    logits = torch.randn(count, VOCABULARY) * 3
    plain = SampleRows(
        temperature=torch.ones(count),
        top_k=torch.zeros(count, dtype=torch.int32),
        top_p=torch.ones(count),
        min_p=torch.zeros(count),
        seed=torch.arange(count),
        position=torch.arange(count),
    )
    cases = {
        "greedy": replace(plain, temperature=torch.zeros(count)),
        "temperature": plain,
        "top_k 50": replace(plain, top_k=torch.full((count,), 50, dtype=torch.int32)),
        "top_p 0.9": replace(plain, top_p=torch.full((count,), 0.9)),
        "min_p 0.05": replace(plain, min_p=torch.full((count,), 0.05)),
        "hot, top_p 0.95": replace(
            plain, temperature=torch.full((count,), 5.0), top_p=torch.full((count,), 0.95)
        ),
    }
    for name, rows in cases.items():
        timer.show(f"sample {count} rows, {name}", lambda rows=rows: ops.sample(logits, rows))


def random_model(ops: Ops, need: AttentionNeed) -> StackModel:
    def weight(rows: int, columns: int):
        return ops.pack((torch.randn(rows, columns) * columns**-0.5).to(DTYPE))

    norm = torch.ones(HIDDEN, dtype=DTYPE)
    blocks = tuple(
        StackBlock(
            norm=norm,
            qkv=weight((QUERIES + 2 * KEYS) * HEAD, HIDDEN),
            qkv_bias=None,
            query_norm=None,
            key_norm=None,
            output=weight(HIDDEN, HIDDEN),
            output_bias=None,
            mlp_norm=norm,
            gate_up=weight(2 * INNER, HIDDEN),
            gate_up_bias=None,
            down=weight(HIDDEN, INNER),
            down_bias=None,
            window=0,
        )
        for _ in range(LAYERS)
    )
    embedding = weight(VOCABULARY, HIDDEN)
    angles = torch.arange(8192).unsqueeze(1) * 1e-4 ** (torch.arange(HEAD // 2) / (HEAD // 2))
    return StackModel(
        blocks=blocks,
        embedding=embedding,
        norm=norm,
        head=embedding,
        cos_sin=torch.cat((angles.cos(), angles.sin()), 1).contiguous(),
        num_heads=QUERIES,
        num_kv_heads=KEYS,
        head_dim=HEAD,
        block_size=PAGE,
        eps=1e-5,
        scale=need.scale,
        soft_cap=0.0,
    )


def stacks(ops: Ops, attention: NativeAttention, need: AttentionNeed, timer: Timer) -> None:
    assert ops.stack is not None
    stack = ops.stack(random_model(ops, need))
    kv = cache(attention, need, LAYERS, 2200)
    weights = 134.5e6
    cases = [
        ("decode 1 at 128", [128], [1]),
        ("decode 8 at 128", [128] * 8, [1] * 8),
        ("decode 32 at 128", [128] * 32, [1] * 32),
        ("decode 32 at 512", [512] * 32, [1] * 32),
        ("decode 64 at 200", [200] * 64, [1] * 64),
        ("prefill 32", [32], [32]),
        ("prefill 256", [256], [256]),
        ("prefill 1024", [1024], [1024]),
        ("32 decodes at 200, 128 of prefill", [200] * 33, [1] * 32 + [128]),
    ]
    for name, lengths, tokens in cases:
        batch = rows_of(lengths, tokens, kv)
        ids = torch.randint(0, VOCABULARY, (sum(tokens),), dtype=torch.int32)
        computed = 2 * (weights - HIDDEN * VOCABULARY) * sum(tokens)
        computed += 2 * HIDDEN * VOCABULARY * len(lengths)
        timer.show(
            f"stack {name}",
            lambda ids=ids, batch=batch: stack.logits(ids, batch),
            bytes_=weights * 2,
            flops=computed,
        )


def limits(timer: Timer) -> None:
    torch.set_num_threads(timer.threads)
    data = torch.ones(256 << 18)
    timer.show("limit: read 256 MiB (torch sum)", lambda: data.sum(), bytes_=256 << 20)
    a, b = torch.randn(2, 1024, 1024).to(DTYPE)
    timer.show("limit: bf16 1024^3 (torch)", lambda: a @ b, flops=2 * 1024**3)
    torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each case")
    parser.add_argument("--only", default="", help="limits, linears, attentions, samples or stacks")
    parser.add_argument("--cache", type=Path, default=None, help="folder of built kernels")
    options = parser.parse_args()
    need = AttentionNeed(QUERIES, KEYS, HEAD, HEAD**-0.5, PAGE, DTYPE, DTYPE, "cpu")
    for threads in options.threads:
        library = load(options.cache, threads)
        if isinstance(library, str):
            raise SystemExit(f"no native kernels: {library}")
        ops = NativeOps(library, DTYPE).table("")
        attention = NativeAttention(library)
        timer = Timer(threads, options.seconds)
        parts: dict[str, Callable[[], None]] = {
            "limits": lambda timer=timer: limits(timer),
            "linears": lambda ops=ops, timer=timer: linears(ops, timer),
            "attentions": lambda attention=attention, timer=timer: attentions(
                attention, need, timer
            ),
            "samples": lambda ops=ops, timer=timer: samples(ops, timer),
            "stacks": lambda ops=ops, attention=attention, timer=timer: stacks(
                ops, attention, need, timer
            ),
        }
        torch.set_num_threads(1)  # torch's own threads would stand in the way of the pool's
        for name, part in parts.items():
            if options.only in ("", name):
                part()


if __name__ == "__main__":
    main()
