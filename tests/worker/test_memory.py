"""Sizing of the KV cache, and that it becomes resident only with use."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo.attention.base import AttentionNeed
from octavo.attention.mla_sdpa import LatentSdpaAttention
from octavo.device.cpu import CpuDevice
from octavo.errors import ConfigError
from octavo.forward import CacheLayout
from octavo.worker.cache import allocate_cache
from octavo.worker.memory import GIB, CacheRequest, cache_bytes_per_block, plan_cache, size_text

BASE = CacheRequest(
    block_size=16,
    bytes_per_block=1000,
    model_max_len=2048,
    max_model_len=None,
    max_num_seqs=8,
    free_bytes=100 * GIB,
    total_bytes=128 * GIB,
    budget_bytes=90 * GIB,
)


def test_bytes_are_exact() -> None:
    plan = plan_cache(replace(BASE, kv_cache_memory_bytes=200_999, num_blocks=7))
    assert (plan.num_blocks, plan.num_bytes, plan.max_model_len) == (200, 200_000, 2048)


def test_blocks_are_exact_if_no_bytes_are_given() -> None:
    assert plan_cache(replace(BASE, num_blocks=130)).num_blocks == 130


@pytest.mark.parametrize(
    ("change", "blocks", "words"),
    [
        ({}, 8 * 128, "all that 8 sequences can use"),
        ({"max_model_len": 100}, 8 * 7, "all that 8 sequences can use"),
        ({"free_bytes": 600_000}, 300, "half of the memory left"),
        ({"budget_bytes": 200_500}, 200, "the share of memory allowed"),
        ({"bytes_per_block": 8 * 2**20}, 512, "the default limit"),
    ],
)
def test_default_is_the_least_of_its_limits(
    change: dict[str, int], blocks: int, words: str
) -> None:
    plan = plan_cache(replace(BASE, **change))  # type: ignore[arg-type]
    assert plan.num_blocks == blocks
    assert words in plan.notes[0]


def test_length_is_fitted_to_the_memory() -> None:
    plan = plan_cache(replace(BASE, max_model_len=-1, kv_cache_memory_bytes=50_000))
    assert (plan.num_blocks, plan.max_model_len) == (50, 800)
    plan = plan_cache(replace(BASE, max_model_len=-1))
    assert plan.max_model_len == 2048


def test_a_sequence_that_cannot_fit_is_refused_with_what_would() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_cache(replace(BASE, kv_cache_memory_bytes=100_000))
    message = caught.value.message
    assert caught.value.option == "max_model_len"
    assert "max_model_len to 1600 or less" in message
    assert "kv_cache_memory_bytes to 128000 or more" in message
    # Both remedies work.
    plan_cache(replace(BASE, kv_cache_memory_bytes=100_000, max_model_len=1600))
    plan_cache(replace(BASE, kv_cache_memory_bytes=128_000))


def test_no_room_for_one_block_is_refused() -> None:
    for length in (None, -1, 1):
        with pytest.raises(ConfigError, match="kv_cache_memory_bytes to"):
            plan_cache(replace(BASE, kv_cache_memory_bytes=999, max_model_len=length))


@pytest.mark.parametrize("length", [0, -2, 2049])
def test_a_length_that_the_model_does_not_allow_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=f"max_model_len is {length}"):
        plan_cache(replace(BASE, max_model_len=length))


def test_more_than_all_memory_is_refused_and_more_than_free_is_noted() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_cache(replace(BASE, kv_cache_memory_bytes=129 * GIB))
    assert caught.value.option == "kv_cache_memory_bytes"
    with pytest.raises(ConfigError) as caught:
        plan_cache(replace(BASE, num_blocks=129 * GIB // 1000))
    assert caught.value.option == "num_blocks"
    plan = plan_cache(replace(BASE, kv_cache_memory_bytes=110 * GIB))
    assert "may run out" in plan.notes[1]


@pytest.mark.parametrize("seed", range(50))
def test_whatever_is_planned_holds_its_promises(seed: int) -> None:
    rng = random.Random(seed)
    request = CacheRequest(
        block_size=rng.choice([1, 7, 16, 256]),
        bytes_per_block=rng.randint(1, 10**7),
        model_max_len=rng.randint(1, 10**5),
        max_model_len=rng.choice([None, -1, rng.randint(1, 10**5)]),
        max_num_seqs=rng.randint(1, 200),
        free_bytes=rng.randint(0, 10**10),
        total_bytes=10**10,
        budget_bytes=rng.randint(-(10**9), 10**10),
        kv_cache_memory_bytes=rng.choice([None, rng.randint(1, 10**10)]),
        num_blocks=rng.choice([None, rng.randint(1, 10**5)]),
    )
    try:
        plan = plan_cache(request)
    except ConfigError:
        return
    assert 1 <= plan.max_model_len <= request.model_max_len
    assert plan.max_model_len <= plan.num_blocks * request.block_size
    assert plan.num_bytes == plan.num_blocks * request.bytes_per_block <= request.total_bytes
    if request.kv_cache_memory_bytes is not None:
        assert plan.num_bytes <= request.kv_cache_memory_bytes
    elif request.num_blocks is None:
        assert plan.num_bytes <= min(4 * GIB, request.free_bytes // 2)


def test_bytes_of_a_block_are_those_of_a_layout() -> None:
    shape = (1, 3, 16, 64)
    layout = CacheLayout(shape, shape, torch.bfloat16)
    assert layout.layer_bytes * 30 == cache_bytes_per_block(
        num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, item_bytes=2
    )


def test_a_latent_is_stored_once_for_all_heads() -> None:
    """Bytes of a token are (rank + rotated) x layers x item, whatever the number of heads."""
    need = AttentionNeed(
        num_heads=16,
        num_kv_heads=1,
        head_dim=512 + 64,
        scale=1.0,
        block_size=16,
        dtype=torch.bfloat16,
        cache_dtype=torch.bfloat16,
        device="cpu",
        latent=512,
    )
    found = LatentSdpaAttention().layout(need, 5).layer_bytes * 27
    assert found == 5 * 16 * (512 + 64) * 27 * 2
    assert found == 5 * cache_bytes_per_block(
        num_layers=27, num_kv_heads=1, head_dim=576, block_size=16, item_bytes=2, latent=True
    )


def test_sizes_are_readable() -> None:
    assert [size_text(n) for n in (5, 2048, 3 * 2**20, 4 * GIB)] == [
        "5 bytes",
        "2.00 KiB",
        "3.00 MiB",
        "4.00 GiB",
    ]


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_pages_become_resident_with_use_and_are_zero() -> None:
    blocks = 64 * 1024
    layout = CacheLayout((blocks, 1024), (blocks, 1024), torch.bfloat16)
    before = _resident()
    cache = allocate_cache(layout, num_layers=4, block_size=16, device=CpuDevice(1))
    assert _resident() - before < 64 * 2**20  # of 1 GiB
    assert len(cache.keys) == len(cache.values) == 4
    assert cache.keys[0].shape == (blocks, 1024)
    assert not cache.keys[3][-100:].any()
    cache.values[2][:16384].fill_(1)
    assert 16 * 2**20 < _resident() - before < 128 * 2**20
