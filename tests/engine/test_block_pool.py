"""Order of reuse and names of blocks; the rest is checked by the workloads."""

from __future__ import annotations

import pytest

from octavo.engine.block_pool import BlockPool, chain_digest, root_digest


def test_least_recently_freed_goes_first_and_tails_before_prefixes() -> None:
    pool = BlockPool(6, 4, keep=True)
    first, second = pool.take(2), pool.take(2)
    for block in first + second:
        pool.register(block, bytes([block]) * 16)
    pool.give(first)
    pool.give(second)
    assert pool.num_cached == 4
    assert pool.take(6) == [4, 5, *reversed(first), *reversed(second)]
    assert pool.num_cached == 0
    assert pool.block_of == {}


def test_blocks_without_a_name_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3, 4, keep=True)
    named, plain = pool.take(2)
    pool.take(1)
    pool.register(named, b"n" * 16)
    pool.give([named])
    pool.give([plain])
    assert pool.take(1) == [plain]
    assert pool.match([b"n" * 16]) == [named]


def test_a_shared_block_is_free_when_its_last_owner_leaves() -> None:
    pool = BlockPool(2, 4, keep=True)
    (block,) = pool.take(1)
    pool.register(block, b"n" * 16)
    pool.share([block])
    pool.give([block])
    assert pool.num_free == 1
    assert pool.free_among([block]) == 0
    pool.give([block])
    assert pool.num_free == 2
    assert pool.free_among([block]) == 1
    pool.share([block])
    assert (pool.num_free, pool.num_cached) == (1, 0)


def test_match_ends_at_the_first_gap() -> None:
    pool = BlockPool(3, 4, keep=True)
    blocks = pool.take(3)
    for block, digest in zip(blocks, "abc", strict=True):
        pool.register(block, digest.encode() * 16)
    pool.forget([blocks[1], blocks[1]])
    assert pool.match([b"a" * 16, b"b" * 16, b"c" * 16]) == blocks[:1]


def test_roots_keep_their_parts_apart() -> None:
    roots = {root_digest(*parts) for parts in (("ab", "c", ""), ("a", "bc", ""), ("", "abc", ""))}
    roots |= {root_digest("\udc80", "", "")}  # a lone surrogate is text too
    assert len(roots) == 4
    assert chain_digest(b"a" * 16, b"1234") != chain_digest(b"b" * 16, b"1234")


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0), (4, 257)])
def test_impossible_sizes(num_blocks: int, block_size: int) -> None:
    with pytest.raises(AssertionError):
        BlockPool(num_blocks, block_size, keep=True)
