"""Which block of the KV cache belongs to whom. Pure bookkeeping: it knows block ids, never memory.

A block is held by any number of references: a sequence, a write in flight and a lease each take one of their own, and
the block is free when the last has gone. A full block that was published under its content hash stays findable while
free and is evicted, least recently used first, when blank blocks run out. Not thread-safe: one owner, the event loop.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

BlockHash = bytes


class NoFreeBlocks(Exception):
    """The pool cannot give as many blocks as were asked for; nothing was allocated."""

    def __init__(self, num_wanted: int, num_free: int) -> None:
        super().__init__(f"{num_wanted} blocks wanted, {num_free} free")
        self.num_wanted = num_wanted
        self.num_free = num_free


def hash_blocks(token_ids: Sequence[int], block_size: int, known: Sequence[BlockHash] = ()) -> list[BlockHash]:
    """Chained hashes of the full blocks of `token_ids`: each covers its own tokens and everything before them.

    `known` are the hashes of the first blocks, if they were computed before. 128-bit BLAKE2b, so that nobody can craft
    a prompt that finds another's blocks.
    """
    hashes = list(known)
    parent = hashes[-1] if hashes else b""
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        content = array("q", token_ids[start : start + block_size]).tobytes()
        parent = hashlib.blake2b(parent + content, digest_size=16).digest()
        hashes.append(parent)
    return hashes


class BlockPool:
    """`on_release` is called whenever references were given back: somebody may be waiting for blocks.

    Each of `on_change` is told each hash that becomes findable (True) or ceases to be (False).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a pool needs at least 1")
        self.num_blocks = num_blocks
        self.on_release: Callable[[], None] = lambda: None
        self.on_change: list[Callable[[BlockHash, bool], None]] = []
        self._references = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._blank = list(range(num_blocks))  # heap: low ids first, so that a run of blocks is likely contiguous
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free but findable, least recently used first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give now: blank ones and cached ones that nobody holds."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Free blocks that a prefix may still find."""
        return len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, num_wanted: int) -> list[int]:
        """Blocks with one reference each and unknown content, in ascending order.

        Raises:
            NoFreeBlocks: fewer than `num_wanted` are free; none is taken.
        """
        if num_wanted > self.num_free:
            raise NoFreeBlocks(num_wanted, self.num_free)
        taken = [heapq.heappop(self._blank) for _ in range(min(num_wanted, len(self._blank)))]
        while len(taken) < num_wanted:
            block_id, _ = self._evictable.popitem(last=False)
            self._forget(block_id)
            taken.append(block_id)
        for block_id in taken:
            self._references[block_id] = 1
            self._generations[block_id] += 1
        return sorted(taken)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to blocks that somebody holds or a prefix found."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                if block_id not in self._evictable:
                    raise ValueError(f"block {block_id} is blank: it cannot be acquired, only allocated")
                del self._evictable[block_id]
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Gives back one reference to each block. The last blocks of a prefix become evictable first."""
        for block_id in reversed(block_ids):
            if self._references[block_id] == 0:
                raise ValueError(f"block {block_id} was released more often than it was acquired")
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                if self._hash_of[block_id] is None:
                    heapq.heappush(self._blank, block_id)
                else:
                    self._evictable[block_id] = None
        if block_ids:
            self.on_release()

    def publish(self, block_id: int, block_hash: BlockHash) -> None:
        """Makes a full, held block findable. A second block with the same content stays private."""
        if self._references[block_id] == 0:
            raise ValueError(f"block {block_id} is held by nobody: its content cannot be published")
        if self._hash_of[block_id] is None and block_hash not in self._block_of:
            self._hash_of[block_id] = block_hash
            self._block_of[block_hash] = block_id
            for told in self.on_change:
                told(block_hash, True)

    def match_prefix(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The longest run of cached blocks from the start, each with one more reference for the caller."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        self.acquire(found)
        return found

    def findable(self) -> list[BlockHash]:
        """What `match_prefix` would find now, in no order."""
        return list(self._block_of)

    def withdraw(self, block_ids: Iterable[int]) -> None:
        """Makes blocks unfindable: their content is in doubt."""
        for block_id in block_ids:
            self._forget(block_id)
            if block_id in self._evictable:
                del self._evictable[block_id]
                heapq.heappush(self._blank, block_id)

    def generation(self, block_id: int) -> int:
        """Counts the allocations of a block: a writer's ticket is void once it has changed."""
        return self._generations[block_id]

    def is_held(self, block_id: int) -> bool:
        return self._references[block_id] > 0

    def check_integrity(self) -> None:
        """Asserts that every block is in exactly one state; for tests and for a worker at rest."""
        blank, evictable = set(self._blank), set(self._evictable)
        assert len(blank) == len(self._blank), "a block is blank twice"
        for block_id in range(self.num_blocks):
            held = self._references[block_id] > 0
            states = held + (block_id in blank) + (block_id in evictable)
            assert states == 1, f"block {block_id} is in {states} states"
            assert (block_id in evictable) <= (self._hash_of[block_id] is not None)
        for block_hash, block_id in self._block_of.items():
            assert self._hash_of[block_id] == block_hash

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block_id] = None
            for told in self.on_change:
                told(block_hash, False)
