"""How large the KV cache becomes, and how long a sequence may then be. Pure arithmetic.

Knows neither torch nor the device, so that the same numbers can be forecast before anything is
loaded. Not for: taking the memory (`cache.py`). Next file: `cache.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.errors import ConfigError

GIB = 2**30
DEFAULT_BYTES = 4 * GIB
GRAPH_BYTES = 2**29  # of the memory that captured graphs share
FIT = -1  # of max_model_len: the longest that the cache holds


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """What was asked of the cache, and what there is. Sizes in bytes, lengths in tokens."""

    block_size: int
    bytes_per_block: int
    model_max_len: int  # of the checkpoint
    max_model_len: int | None  # None: the checkpoint's; FIT: as the memory allows
    max_num_seqs: int
    free_bytes: int  # after the weights are loaded
    total_bytes: int
    budget_bytes: int  # what is left of the share of memory that weights and cache may take
    kv_cache_memory_bytes: int | None = None
    num_blocks: int | None = None
    own_memory: bool = False  # nobody else needs the device's memory: all of the budget is taken


@dataclass(frozen=True, slots=True)
class Room:
    """A device's memory in bytes: all of it, what was free at the start, and what is free now."""

    total: int
    free_at_start: int
    free: int
    own: bool  # nobody else needs it

    def after(self, num_bytes: int) -> Room:
        """With so much more taken."""
        return replace(self, free=max(0, self.free - num_bytes))


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The cache to be made."""

    num_blocks: int
    num_bytes: int
    max_model_len: int
    notes: tuple[str, ...]


def cache_bytes_per_block(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    item_bytes: int,
    latent: bool = False,
) -> int:
    """Bytes of one block's keys and values over all layers; of `latent` attention, of keys alone.

    There `head_dim` is the latent's rank and the rotated dimensions, and there is one head.
    """
    return (1 if latent else 2) * num_layers * num_kv_heads * head_dim * block_size * item_bytes


def budget_of(room: Room, fraction: float, peak: int = 0) -> int:
    """Bytes that the cache may take, if weights and cache may have `fraction` of the memory.

    `peak` is what a step takes for a while. On a device of its own, graphs get a part too.
    """
    if room.own:
        return int(fraction * room.total) - (room.total - room.free) - peak - GRAPH_BYTES
    return int(fraction * room.free_at_start) - max(0, room.free_at_start - room.free)


def plan_cache(request: CacheRequest) -> CachePlan:
    """Decides the number of blocks and the longest sequence.

    `kv_cache_memory_bytes` goes before `num_blocks`, and that before the default. Raises
    ConfigError if one sequence of the length asked for would not fit, saying what would.
    """
    longest = _wanted_length(request)
    num_blocks, how = _num_blocks(request, longest)
    num_bytes = num_blocks * request.bytes_per_block
    if num_bytes > request.total_bytes:
        option = "kv_cache_memory_bytes" if request.num_blocks is None else "num_blocks"
        raise ConfigError(
            f"A KV cache of {size_text(num_bytes)} ({how}) is more than the "
            f"{size_text(request.total_bytes)} of memory that this process may have; ask for less.",
            option,
        )
    if request.own_memory and num_bytes > request.free_bytes:
        raise ConfigError(
            f"A KV cache of {size_text(num_bytes)} ({how}) does not fit into the "
            f"{size_text(request.free_bytes)} that are free on the device; ask for less.",
            "kv_cache_memory_bytes" if request.num_blocks is None else "num_blocks",
        )
    room = num_blocks * request.block_size
    if request.max_model_len == FIT:
        longest = min(longest, room)
    if longest > room or room == 0:
        raise _does_not_fit(request, max(longest, request.block_size), num_blocks, how)
    notes = [
        f"kv cache: {size_text(num_bytes)}, {num_blocks} blocks of {request.block_size} tokens, "
        f"{how}; {room / longest:.1f} sequences of {longest} tokens"
    ]
    if num_bytes > request.free_bytes:
        notes.append(
            f"kv cache: larger than the {size_text(request.free_bytes)} free now; "
            "memory is taken as blocks are first used, and may run out"
        )
    return CachePlan(num_blocks, num_bytes, longest, tuple(notes))


def _wanted_length(request: CacheRequest) -> int:
    """The length asked for, within what the checkpoint allows."""
    wanted = request.max_model_len
    if wanted is None or wanted == FIT:
        return request.model_max_len
    if wanted < 1 or wanted > request.model_max_len:
        raise ConfigError(
            f"max_model_len is {wanted}: the model allows 1 to {request.model_max_len} tokens; "
            "choose one of these, or leave it out to take the model's.",
            "max_model_len",
        )
    return wanted


def _num_blocks(request: CacheRequest, longest: int) -> tuple[int, str]:
    """Blocks, and in words what decided their number."""
    asked = request.kv_cache_memory_bytes
    if asked is not None:
        return asked // request.bytes_per_block, "kv_cache_memory_bytes"
    if request.num_blocks is not None:
        return request.num_blocks, "number of blocks as set"
    if request.own_memory:
        budget = max(0, request.budget_bytes)
        return budget // request.bytes_per_block, "the share of memory left after weights and steps"
    limits = {
        "the default limit": DEFAULT_BYTES,
        "half of the memory left after weights": request.free_bytes // 2,
        "the share of memory allowed": max(0, request.budget_bytes),
    }
    how = min(limits, key=lambda name: limits[name])
    affordable = limits[how] // request.bytes_per_block
    useful = request.max_num_seqs * _blocks_of(request, longest)
    if useful <= affordable:
        return useful, f"all that {request.max_num_seqs} sequences can use"
    return affordable, how


def _blocks_of(request: CacheRequest, tokens: int) -> int:
    return -(-tokens // request.block_size)


def _does_not_fit(request: CacheRequest, longest: int, num_blocks: int, how: str) -> ConfigError:
    needed = _blocks_of(request, longest) * request.bytes_per_block
    available = num_blocks * request.bytes_per_block
    fits = num_blocks * request.block_size
    shorter = f"lower max_model_len to {fits} or less, or " if fits else ""
    return ConfigError(
        f"One sequence of {longest} tokens needs {size_text(needed)} of KV cache, but there is "
        f"{size_text(available)} ({how}): {shorter}set kv_cache_memory_bytes to {needed} or more.",
        "max_model_len",
    )


def size_text(count: int) -> str:
    """Bytes in the largest unit that keeps the number above 1."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"
