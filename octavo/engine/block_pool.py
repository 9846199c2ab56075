"""Who owns which block of KV, and which block holds which tokens.

Blocks are numbers; the KV itself lives with the worker. A block is owned by any number of
sequences, or free. A free block keeps its hash, and so its use as a cached prefix, until it is
taken for other content; the least recently freed goes first. Hashes are chained: a block's hash
covers its own tokens and all before it, the cache salt and the adapter, so equal hashes mean
equal KV and no comparison of tokens is needed (128 bits: a collision is out of reach even on
purpose). Not for: block tables and lengths (see `sequence.py`). Next file: `policy.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from hashlib import blake2b

DIGEST_SIZE = 16  # bytes


def root_digest(salt: str, adapter: str, group: str) -> bytes:
    """Parent of a first block: sequences whose roots differ share nothing."""
    state = blake2b(digest_size=DIGEST_SIZE)
    for part in (salt, adapter, group):
        data = part.encode("utf-8", "surrogatepass")
        # The length keeps ("ab", "c") and ("a", "bc") apart.
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


def chain_digest(parent: bytes, tokens: bytes) -> bytes:
    """Hash of a block whose predecessor has the hash `parent`; tokens are packed i32."""
    return blake2b(parent + tokens, digest_size=DIGEST_SIZE).digest()


class BlockPool:
    """Blocks 0 to `num_blocks` - 1, with owners counted and contents named."""

    def __init__(self, num_blocks: int, block_size: int, *, keep: bool) -> None:
        """`keep`: blocks without owner stay usable as cached prefixes."""
        assert num_blocks > 0, f"num_blocks is {num_blocks}"
        assert 1 <= block_size <= 256, f"block_size is {block_size}"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.refs = [0] * num_blocks
        self.digest_of: dict[int, bytes] = {}
        self.block_of: dict[bytes, int] = {}
        # Next to be taken first. An OrderedDict takes out of its middle in constant time.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.num_cached = 0  # free blocks with a hash
        self.watch: Callable[[list[bytes]], None] | None = None  # told of hashes that are evicted
        self._keep = keep

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return len(self.free)

    @property
    def num_used(self) -> int:
        """Blocks with an owner."""
        return self.num_blocks - len(self.free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """Blocks of the longest prefix that is here."""
        blocks = []
        for digest in digests:
            block = self.block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def free_among(self, blocks: Iterable[int]) -> int:
        """How many of them have no owner."""
        return sum(not self.refs[block] for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Adds an owner to each of these matched blocks."""
        for block in blocks:
            if not self.refs[block]:
                del self.free[block]
                self.num_cached -= 1
            self.refs[block] += 1

    def take(self, count: int) -> list[int]:
        """Hands out free blocks; their old contents are forgotten. There must be enough."""
        blocks: list[int] = []
        evicted: list[bytes] = []
        for _ in range(count):
            block, _none = self.free.popitem(last=False)
            digest = self.digest_of.pop(block, None)
            if digest is not None:
                del self.block_of[digest]
                self.num_cached -= 1
                evicted.append(digest)
            self.refs[block] = 1
            blocks.append(block)
        if evicted and self.watch is not None:
            self.watch(evicted)
        return blocks

    def give(self, blocks: list[int]) -> None:
        """Removes an owner from each block of a table."""
        # From the tail, so that a prefix outlives what hangs on it.
        for block in reversed(blocks):
            assert self.refs[block] > 0, f"block {block} has no owner to give it back"
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            if not self._keep:
                self._unname(block)
            self.free[block] = None
            if block in self.digest_of:
                self.num_cached += 1
            else:
                self.free.move_to_end(block, last=False)

    def register(self, block: int, digest: bytes) -> None:
        """Names an owned block's content; the first block of equal content keeps the name."""
        if digest not in self.block_of:
            self.block_of[digest] = block
            self.digest_of[block] = digest

    def forget(self, blocks: Iterable[int]) -> None:
        """Makes the contents of these owned blocks unknown to later requests."""
        for block in blocks:
            self._unname(block)

    def forget_all(self) -> None:
        """Empties the prefix cache; owners keep their blocks."""
        self.digest_of.clear()
        self.block_of.clear()
        self.num_cached = 0

    def _unname(self, block: int) -> None:
        digest = self.digest_of.pop(block, None)
        if digest is not None:
            del self.block_of[digest]
