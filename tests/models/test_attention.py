"""Paged attention against a plain one over each sequence's whole history, and its selection."""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from octavo.attention import sdpa
from octavo.attention.base import AttentionBackend, AttentionNeed
from octavo.attention.sdpa import SdpaAttention
from octavo.attention.select import CANDIDATES, Candidate, select
from octavo.errors import ConfigError
from octavo.forward import ForwardBatch, KVCache
from tests.models.driver import i32

NEED = AttentionNeed(
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    scale=0.25,
    block_size=4,
    dtype=torch.float32,
    cache_dtype=torch.float32,
    device="cpu",
)
BLOCKS = 300
# One rounding of keys, values and weights: 2^-9 for bf16, 2^-12 for f16, of values of about one.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class Case:
    """Random sequences, each with a history and some new tokens."""

    batch: ForwardBatch
    fresh: tuple[Tensor, Tensor, Tensor]  # q, k, v of the new tokens
    keys: list[Tensor]  # a row: [kv_len, K, D]
    values: list[Tensor]
    sinks: Tensor | None  # f32[Q]


def make_case(
    need: AttentionNeed, backend: AttentionBackend, lengths: list[tuple[int, int]]
) -> Case:
    """`lengths` are (kv_len, q_len) by row; rows of one token must stand first."""
    size = need.block_size
    layout = backend.layout(need, BLOCKS)
    kv = KVCache(
        (torch.full(layout.key, torch.nan, dtype=layout.dtype),),
        (torch.full(layout.value, torch.nan, dtype=layout.dtype),),
        size,
    )
    free = random.sample(range(BLOCKS), BLOCKS)
    heads = (need.num_kv_heads, need.head_dim)
    keys = [torch.randn(n, *heads).to(need.dtype) for n, _ in lengths]
    values = [torch.randn(n, *heads).to(need.dtype) for n, _ in lengths]
    tables = [[free.pop() for _ in range(-(-n // size))] for n, _ in lengths]

    def batch_of(spans: list[range], decodes: int) -> ForwardBatch:
        width = max(map(len, tables)) + 2
        positions = [p for span in spans for p in span]
        slots = [
            table[p // size] * size + p % size
            for table, span in zip(tables, spans, strict=True)
            for p in span
        ]
        indptr = [0]
        for span in spans:
            indptr.append(indptr[-1] + len(span))
        batch = ForwardBatch(
            num_rows=len(spans),
            num_tokens=len(positions),
            num_decodes=decodes,
            positions=i32(positions),
            slot_map=i32(slots),
            q_indptr=i32(indptr),
            kv_lens=i32([span.stop for span in spans]),
            block_table=torch.tensor(
                [table + [0] * (width - len(table)) for table in tables], dtype=torch.int32
            ),
            sample_rows=i32([0]),
            max_q=max(len(span) for span in spans),
            max_kv=max(span.stop for span in spans),
            kv=kv,
        )
        return replace(batch, attn=backend.plan(batch))

    history = [range(n - new) for n, new in lengths]
    old = batch_of(history, 0)
    if old.num_tokens:
        k = torch.cat([k[: len(span)] for k, span in zip(keys, history, strict=True)])
        v = torch.cat([v[: len(span)] for v, span in zip(values, history, strict=True)])
        q = torch.zeros(len(k), need.num_heads, need.head_dim, dtype=need.dtype)
        backend.forward(q, k, v, 0, need, old)
    spans = [range(n - new, n) for n, new in lengths]
    decodes = next((i for i, (_, new) in enumerate(lengths) if new > 1), len(lengths))
    k = torch.cat([k[span.start :] for k, span in zip(keys, spans, strict=True)])
    v = torch.cat([v[span.start :] for v, span in zip(values, spans, strict=True)])
    q = torch.randn(len(k), need.num_heads, need.head_dim).to(need.dtype)
    sinks = torch.randn(need.num_heads) * 2 if need.sinks else None
    return Case(batch_of(spans, decodes), (q, k, v), keys, values, sinks)


def plain_attention(case: Case, need: AttentionNeed) -> Tensor:
    """One query and one head at a time, in f64."""
    starts = case.batch.q_indptr.tolist()
    rows = []
    for row, (key, value) in enumerate(zip(case.keys, case.values, strict=True)):
        for token in range(starts[row], starts[row + 1]):
            stop = len(key) - (starts[row + 1] - token) + 1
            low = max(0, stop - need.window) if need.window else 0
            heads = []
            for head in range(need.num_heads):
                shared = head // (need.num_heads // need.num_kv_heads)
                query = case.fresh[0][token, head].double()
                scores = key[low:stop, shared].double() @ query * need.scale
                if need.soft_cap:
                    scores = torch.tanh(scores / need.soft_cap) * need.soft_cap
                if case.sinks is not None:
                    scores = torch.cat([scores, case.sinks[head : head + 1].double()])
                weights = scores.softmax(0)[: stop - low]
                heads.append(weights @ value[low:stop, shared].double())
            rows.append(torch.cat(heads))
    return torch.stack(rows)


def seeded() -> None:
    seed = secrets.randbits(31)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    random.seed(seed)


MIXED = [(1, 1), (40, 1), (9, 1), (17, 1), (5, 5), (30, 12), (33, 2)]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"block_size": 1},
        {"block_size": 7},
        {"block_size": 64},
        {"num_kv_heads": 1},
        {"num_kv_heads": 6},
        {"head_dim": 20, "scale": 1.0},
        {"window": 1},
        {"window": 8},
        {"window": 100},
        {"soft_cap": 0.5},
        {"soft_cap": 2.0, "window": 6},
        {"sinks": True},
        {"sinks": True, "soft_cap": 2.0, "window": 6},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sdpa_equals_plain_attention(change: dict[str, float], dtype: torch.dtype) -> None:
    seeded()
    need = replace(NEED, dtype=dtype, cache_dtype=dtype, **change)
    check(need, SdpaAttention(), MIXED)


def check(need: AttentionNeed, backend: AttentionBackend, lengths: list[tuple[int, int]]) -> None:
    assert backend.supports(need) is None
    case = make_case(need, backend, lengths)
    found = backend.forward(*case.fresh, 0, need, case.batch, sinks=case.sinks)
    assert found.dtype == need.dtype
    expected = plain_attention(case, need)
    torch.testing.assert_close(
        found.double(), expected, rtol=TOLERANCE[need.dtype], atol=TOLERANCE[need.dtype]
    )


@pytest.mark.parametrize("lengths", [[(3, 1)], [(20, 20)], [(1, 1), (2, 2)], [(8, 1)] * 5])
def test_batches_of_one_kind(lengths: list[tuple[int, int]]) -> None:
    seeded()
    check(NEED, SdpaAttention(), lengths)


def test_decode_groups_and_query_blocks_may_be_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits only bound memory: with tiny ones the result is the same."""
    seeded()
    monkeypatch.setattr(sdpa, "GROUP_SLOTS", 45)
    monkeypatch.setattr(sdpa, "QUERY_BLOCK", 3)
    check(NEED, SdpaAttention(), MIXED)
    check(replace(NEED, window=5), SdpaAttention(), MIXED)


def test_cache_of_another_type() -> None:
    """Keys and values are rounded once, when they are stored."""
    seeded()
    need = replace(NEED, cache_dtype=torch.bfloat16)
    case = make_case(need, SdpaAttention(), MIXED)
    case.keys = [key.bfloat16() for key in case.keys]
    case.values = [value.bfloat16() for value in case.values]
    found = SdpaAttention().forward(*case.fresh, 0, need, case.batch)
    torch.testing.assert_close(found.double(), plain_attention(case, need), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cache_of_bytes_has_scales(cache: torch.dtype) -> None:
    """Stored divided by the scale, used times it; beyond the largest number is the largest."""
    seeded()
    need = replace(NEED, cache_dtype=cache, key_scale=0.5, value_scale=0.003)
    case = make_case(need, SdpaAttention(), MIXED)

    def rounded(cells: list[Tensor], scale: float) -> list[Tensor]:
        largest = torch.finfo(cache).max
        return [(x / scale).clamp(-largest, largest).to(cache).float() * scale for x in cells]

    case.keys = rounded(case.keys, need.key_scale)
    case.values = rounded(case.values, need.value_scale)
    found = SdpaAttention().forward(*case.fresh, 0, need, case.batch)
    torch.testing.assert_close(found.double(), plain_attention(case, need), rtol=1e-5, atol=1e-5)


def test_what_sdpa_refuses() -> None:
    refused = SdpaAttention().supports(replace(NEED, cache_dtype=torch.int8))
    assert refused is not None
    assert "int8" in refused
    assert SdpaAttention().supports(replace(NEED, key_scale=2.0)) is not None
    assert SdpaAttention().supports(replace(NEED, num_kv_heads=4)) is not None


class Refuses(SdpaAttention):
    """A backend that never can."""

    name = "refuses"

    def supports(self, need: AttentionNeed) -> str | None:
        return "it is Monday"


def broken() -> AttentionBackend:
    raise ImportError("no compiler here")


FAKES = (
    Candidate("broken", broken),
    Candidate("refuses", Refuses),
    Candidate("sdpa", SdpaAttention),
)


def test_select_takes_the_first_that_can_and_notes_the_rest() -> None:
    backend, notes = select(NEED, candidates=FAKES)
    assert type(backend) is SdpaAttention
    assert notes == (
        "attention: not broken: no compiler here",
        "attention: not refuses: it is Monday",
        "attention: sdpa, the first that can",
    )


def test_select_by_name_takes_or_refuses() -> None:
    backend, notes = select(NEED, "sdpa")
    assert backend.name == "sdpa"
    assert notes == ("attention: sdpa, as asked",)
    for want, reason in (("refuses", "Monday"), ("broken", "compiler"), ("fast", "not known")):
        with pytest.raises(ConfigError, match=reason) as caught:
            select(NEED, want, FAKES)
        assert caught.value.option == "attention_backend"


def test_some_are_taken_only_by_name() -> None:
    candidates = (Candidate("library", SdpaAttention, asked=True), FAKES[2])
    assert select(NEED, candidates=candidates)[1] == ("attention: sdpa, the first that can",)
    assert select(NEED, "library", candidates)[1] == ("attention: library, as asked",)
    assert [one.name for one in CANDIDATES if one.asked] == ["fa3", "flashinfer"]


@pytest.mark.parametrize("name", ["fa3", "flashinfer"])
def test_a_library_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"attention: not {name}: "):
        select(NEED, name)


def test_select_fails_if_none_can() -> None:
    with pytest.raises(ConfigError, match=r"broken.*refuses"):
        select(NEED, candidates=FAKES[:2])
    names = [candidate.name for candidate in CANDIDATES]
    assert (names[0], names[-1]) == ("native", "sdpa")
