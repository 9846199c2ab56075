"""Native attention against plain attention in f64; every block size; the same bits however cut.

Pages start as NaN: a cell that is read before it was written shows.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.attention.base import AttentionNeed
from octavo.attention.native import NativeAttention
from octavo.forward import ForwardBatch, KVCache
from tests.kernels.native_parts import DTYPES, native_library

# Of the result, whose values are of size 1: rounding of weights and of the result.
ERROR = {torch.float32: 5e-6, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def seed() -> None:
    value = secrets.randbits(31)
    print(f"seed {value}")
    torch.manual_seed(value)
    random.seed(value)


def need_of(dtype: torch.dtype, **changes: Any) -> AttentionNeed:
    need = AttentionNeed(6, 2, 64, 0.125, 16, dtype, dtype, "cpu")
    return replace(need, **changes)


@dataclass
class Sequence:
    """q [L, Q, D], k and v [L, K, D], its pages, and how much is stored."""

    q: Tensor
    k: Tensor
    v: Tensor
    pages: list[int]
    done: int = 0


class Cache:
    """Pages for some sequences, and steps over any cut of them."""

    def __init__(self, need: AttentionNeed, lengths: list[int], threads: int = 2) -> None:
        self.need = need
        self.attention = NativeAttention(native_library(threads))
        size = need.block_size
        counts = [-(-length // size) for length in lengths]
        free = list(range(sum(counts) + 3))
        random.shuffle(free)
        self.sequences = [
            Sequence(
                torch.randn(length, need.num_heads, need.head_dim).to(need.dtype),
                torch.randn(length, need.num_kv_heads, need.head_dim).to(need.dtype),
                torch.randn(length, need.num_kv_heads, need.head_dim).to(need.dtype),
                [free.pop() for _ in range(count)],
            )
            for length, count in zip(lengths, counts, strict=True)
        ]
        layout = self.attention.layout(need, sum(counts) + 3)
        self.kv = KVCache(
            (nans(layout.key, layout.dtype),), (nans(layout.value, layout.dtype),), size
        )

    def step(self, work: list[tuple[int, int]]) -> list[Tensor]:
        """Stores and attends the next n tokens of each (sequence, n)."""
        need, size = self.need, self.need.block_size
        positions, slots, indptr, lens, parts = [], [], [0], [], []
        width = max(len(self.sequences[index].pages) for index, _ in work) + 1
        table = torch.full((len(work), width), 2**30, dtype=torch.int32)
        for row, (index, count) in enumerate(work):
            sequence = self.sequences[index]
            span = range(sequence.done, sequence.done + count)
            positions += span
            slots += [sequence.pages[p // size] * size + p % size for p in span]
            indptr.append(indptr[-1] + count)
            lens.append(span.stop)
            table[row, : len(sequence.pages)] = torch.tensor(sequence.pages)
            parts.append(slice(span.start, span.stop))
            sequence.done = span.stop
        chosen = [
            (self.sequences[index], part) for (index, _), part in zip(work, parts, strict=True)
        ]
        batch = ForwardBatch(
            num_rows=len(work),
            num_tokens=len(positions),
            num_decodes=0,
            positions=torch.tensor(positions, dtype=torch.int32),
            slot_map=torch.tensor(slots, dtype=torch.int32),
            q_indptr=torch.tensor(indptr, dtype=torch.int32),
            kv_lens=torch.tensor(lens, dtype=torch.int32),
            block_table=table,
            sample_rows=torch.tensor([], dtype=torch.int32),
            max_q=0,
            max_kv=max(lens),
            kv=self.kv,
        )
        out = self.attention.forward(
            torch.cat([sequence.q[part] for sequence, part in chosen]),
            torch.cat([sequence.k[part] for sequence, part in chosen]),
            torch.cat([sequence.v[part] for sequence, part in chosen]),
            0,
            need,
            batch,
        )
        return list(out.split([count for _, count in work]))

    def expected(self, index: int) -> Tensor:
        """f64[L, Q * D] of a whole sequence."""
        need, sequence = self.need, self.sequences[index]
        length, group = len(sequence.q), need.num_heads // need.num_kv_heads
        q = sequence.q.double().transpose(0, 1)
        keys = stored(sequence.k, need.cache_dtype, need.key_scale)
        values = stored(sequence.v, need.cache_dtype, need.value_scale)
        k = keys.double().repeat_interleave(group, 1).transpose(0, 1)
        v = values.double().repeat_interleave(group, 1).transpose(0, 1)
        scores = q @ k.transpose(1, 2) * need.scale
        if need.soft_cap:
            scores = need.soft_cap * torch.tanh(scores / need.soft_cap)
        at = torch.arange(length)
        mask = at[None, :] <= at[:, None]
        if need.window:
            mask &= at[None, :] > at[:, None] - need.window
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return (weights @ v).transpose(0, 1).reshape(length, -1)


def nans(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Every bit set is NaN in all formats."""
    return torch.full((*shape, dtype.itemsize), 255, dtype=torch.uint8).view(dtype).squeeze(-1)


def stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """What a cache of `dtype` gives back."""
    if dtype.itemsize > 1:
        return x
    most = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-most, most).to(dtype).float() * scale


def check(cache: Cache, index: int, found: Tensor) -> None:
    error = (found.double() - cache.expected(index)[: len(found)]).abs().max().item()
    assert error < ERROR[cache.need.dtype]  # false for NaN too


BLOCKS = [1, 2, 3, 7, 8, 15, 16, 17, 24, 32, 33, 64, 100, 255, 256]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_size(dtype: torch.dtype, block: int) -> None:
    lengths = [random.randint(1, 40), random.randint(200, 700)]
    cache = Cache(need_of(dtype, block_size=block), lengths)
    first, second = cache.step([(0, lengths[0]), (1, lengths[1])])
    check(cache, 0, first)
    check(cache, 1, second)


HEADS = [
    (1, 1, 16),
    (4, 4, 32),
    (9, 3, 64),
    (8, 1, 80),
    (5, 1, 96),
    (7, 1, 112),
    (40, 1, 128),
    (2, 1, 256),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "keys", "size"), HEADS)
def test_heads(dtype: torch.dtype, queries: int, keys: int, size: int) -> None:
    need = need_of(dtype, num_heads=queries, num_kv_heads=keys, head_dim=size, scale=size**-0.5)
    cache = Cache(need, [150])
    check(cache, 0, cache.step([(0, 150)])[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "changes",
    [
        {"window": 1},
        {"window": 20},
        {"window": 600},
        {"soft_cap": 3.0},
        {"soft_cap": 1.0, "window": 70},
    ],
)
def test_windows_and_soft_caps(dtype: torch.dtype, changes: dict[str, float]) -> None:
    cache = Cache(need_of(dtype, **changes), [1300])
    parts = [cache.step([(0, count)])[0] for count in (700, 1, 1, 598)]
    check(cache, 0, torch.cat(parts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 5, 16, 256])
@pytest.mark.parametrize("window", [0, 33])
def test_any_cut_gives_the_same_bits(dtype: torch.dtype, block: int, window: int) -> None:
    lengths = [1100, 90, 513]
    need = need_of(dtype, block_size=block, window=window)
    state = torch.get_rng_state()
    whole = Cache(need, lengths, threads=1)
    expected = [whole.step([(index, length)])[0] for index, length in enumerate(lengths)]
    check(whole, 0, expected[0])

    torch.set_rng_state(state)
    cut = Cache(need, lengths, threads=3)
    parts: list[list[Tensor]] = [[] for _ in lengths]
    while True:
        left = [length - s.done for length, s in zip(lengths, cut.sequences, strict=True)]
        work = [
            (index, random.choice([1, 1, 1, min(n, 5), min(n, 200)]))
            for index, n in enumerate(left)
            if n and random.random() < 0.8
        ]
        if not any(left):
            break
        if not work:
            continue
        for (index, _), part in zip(work, cut.step(work), strict=True):
            parts[index].append(part)
    for index, wanted in enumerate(expected):
        assert torch.equal(torch.cat(parts[index]), wanted), index


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_long_decode_is_split_over_threads_without_a_trace(dtype: torch.dtype) -> None:
    need = need_of(dtype)
    state = torch.get_rng_state()
    results = []
    for threads in (1, 2, 3):
        torch.set_rng_state(state)
        cache = Cache(need, [3001], threads)
        cache.step([(0, 3000)])
        results.append(cache.step([(0, 1)])[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    error = (results[0].double() - cache.expected(0)[-1:]).abs().max().item()
    assert error < ERROR[dtype]


def test_rows_share_pages_that_this_step_fills() -> None:
    cache = Cache(need_of(torch.float32), [64, 96])
    first, second = cache.sequences
    second.pages[:4] = first.pages
    for name in ("k", "v"):
        getattr(second, name)[:64] = getattr(first, name)
    second.done = 64
    cache_out = cache.step([(1, 32), (0, 64)])
    check(cache, 0, cache_out[1])
    error = (cache_out[0].double() - cache.expected(1)[64:]).abs().max().item()
    assert error < ERROR[torch.float32]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 20}, "heads of 20"),
        ({"head_dim": 272}, "heads of 272"),
        ({"block_size": 257}, "blocks of 257"),
        ({"dtype": torch.float16, "cache_dtype": torch.float16}, "float16"),
        ({"cache_dtype": torch.bfloat16}, "a cache of torch.bfloat16"),
        ({"device": "cuda"}, "cuda"),
        ({"num_heads": 5}, "do not divide"),
    ],
)
def test_what_it_cannot_do_it_says(changes: dict[str, Any], reason: str) -> None:
    attention = NativeAttention(native_library())
    assert attention.supports(need_of(torch.float32)) is None
    assert reason in (attention.supports(replace(need_of(torch.float32), **changes)) or "")


FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", FP8)
@pytest.mark.parametrize("block", [1, 7, 16, 24, 33, 64])
def test_pages_in_8_bits(dtype: torch.dtype, cache_dtype: torch.dtype, block: int) -> None:
    """Rounded to nearest as torch rounds, with scales, in half the memory."""
    need = need_of(dtype, block_size=block, cache_dtype=cache_dtype)
    need = replace(need, key_scale=random.uniform(0.01, 3), value_scale=random.uniform(0.01, 3))
    cache = Cache(need, [37, 600])
    assert cache.kv.keys[0].element_size() == 1
    first, *parts = (cache.step(work)[0] for work in ([(0, 37)], [(1, 400)], [(1, 1)], [(1, 199)]))
    check(cache, 0, first)
    check(cache, 1, torch.cat(parts))


@pytest.mark.parametrize("cache_dtype", FP8)
def test_numbers_in_8_bits_round_as_torch_rounds(cache_dtype: torch.dtype) -> None:
    """One key whose value is looked up: every code, what lies between, too large, tiny, NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(cache_dtype).float()
    codes = codes[codes.isfinite()].sort().values
    between = (codes[1:] + codes[:-1]) / 2
    most = torch.finfo(cache_dtype).max
    values = torch.cat((codes, between, torch.tensor([1e9, -1e9, 1e-9, -1e-9, 0.0])))
    values = torch.cat((values, torch.zeros(-len(values) % 64))).view(-1, 1, 64)
    need = need_of(torch.float32, num_heads=1, num_kv_heads=1, cache_dtype=cache_dtype)
    cache = Cache(need, [1] * len(values))
    for sequence, value in zip(cache.sequences, values, strict=True):
        sequence.v = value.view(1, 1, 64)
    found = torch.cat(cache.step([(i, 1) for i in range(len(values))]))
    wanted = values.view(-1, 64).clamp(-most, most).to(cache_dtype).float()
    assert torch.equal(found, wanted)
    cache.sequences[0].v = torch.full((1, 1, 64), torch.nan)
    cache.sequences[0].done = 0
    assert cache.step([(0, 1)])[0].isnan().all()
