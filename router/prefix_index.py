"""Which worker holds which prefix: block hashes, each with a bit for every worker that said it has the block.

A hash covers its block and all before it, so a prompt is matched by walking its hashes while anybody remains: the work
is that of the blocks matched, however many workers there are. Pure; fed by `CacheChanges`, and exact as of the last of
them: where one is missing, nothing is claimed for that worker until it has dumped its cache.

A block takes about 100 bytes, or 250 in a fleet of a thousand, whose bits are many, and no more if others hold it too.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from model.block_pool import BlockHash
from router.cache_changes import CacheChanges
from router.candidate import WorkerId

_REMEMBERED = 4096  # processes that have left: what comes late of them is known as such if they return
_NUM_SHARDS = 4096  # by the first 12 bits
_SWEPT_AT_ONCE = 4096  # blocks, with each message, while something is left of workers that have gone: 0.3 ms


@dataclass(frozen=True, slots=True)
class Slots:
    """Which worker a bit stands for. A bit goes to another worker only when no block has it any more."""

    workers: tuple[WorkerId | None, ...] = ()
    of: Mapping[WorkerId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefixMatches:
    """How many blocks of one prompt each worker holds, counted from the first.

    `runs`: longest first, each with the bits of the workers that hold just so many.
    """

    runs: Sequence[tuple[int, int]] = ()
    slots: Slots = Slots()

    def of(self, worker: WorkerId) -> int:
        slot = self.slots.of.get(worker) if self.runs else None
        if slot is not None:
            for num_blocks, holders in self.runs:
                if holders >> slot & 1:
                    return num_blocks
        return 0

    def longest(self, rng: random.Random, at_most: int) -> list[tuple[WorkerId, int]]:
        """Workers that hold something and their blocks: those with most first, and equals from a random one on."""
        found: list[tuple[WorkerId, int]] = []
        for num_blocks, holders in self.runs:
            for slot in _bits_from(holders, int(rng.random() * len(self.slots.workers))):
                worker = self.slots.workers[slot]
                if worker is not None:
                    found.append((worker, num_blocks))
                if len(found) == at_most:
                    return found
        return found


NO_MATCHES = PrefixMatches()


@dataclass(slots=True, eq=False)
class _Part:
    """What one worker said: `num_blocks` have its bit."""

    slot: int
    max_blocks: int
    last_number: int = 0
    num_blocks: int = 0
    is_dumping: bool = False
    is_whole: bool = False


class PrefixIndex:
    """The hashes are in many small dictionaries: a large one stops every stream when it is copied, having become too
    small, or when it is searched for what a worker has left behind."""

    def __init__(self) -> None:
        self._shards: list[dict[BlockHash, int]] = [{} for _ in range(_NUM_SHARDS)]  # hashes to bits of their holders
        self._parts: dict[WorkerId, _Part] = {}
        self._numbers_left: dict[WorkerId, int] = {}  # the last ones heard of who left, oldest first
        self._whole = 0  # bits of the workers whose part is
        self._slots = Slots()
        self._free: list[int] = []  # heap of slots that no block has the bit of
        self._left: deque[tuple[int, int]] = deque()  # slots given up, and how far to sweep until they are free
        self._left_bits = 0
        self._num_swept = 0  # shards

    def __len__(self) -> int:
        """Blocks, each counted once, those of workers that have just gone among them."""
        return sum(map(len, self._shards))

    def join(self, worker: WorkerId, max_blocks: int) -> None:
        """Nothing is known of it until it has dumped its cache, at most `max_blocks` blocks. Its other epochs end."""
        for other in [other for other in self._parts if other.name == worker.name]:
            self.leave(other)
        last_number = self._numbers_left.pop(worker, 0)
        self._parts[worker] = _Part(self._take_slot(worker), max_blocks, last_number)

    def leave(self, worker: WorkerId) -> None:
        """At once for those who ask; its bits go little by little."""
        part = self._parts.pop(worker, None)
        if part is not None:
            self._give_up(worker, part)
            self._numbers_left[worker] = part.last_number
            if len(self._numbers_left) > _REMEMBERED:
                del self._numbers_left[next(iter(self._numbers_left))]

    def apply(self, worker: WorkerId, changes: CacheChanges) -> bool:
        """Whether the worker is to be asked for a dump. What comes late, twice, or from a stranger is ignored."""
        part = self._parts.get(worker)
        if part is None or changes.number <= part.last_number:
            return False
        has_gap = changes.number != part.last_number + 1
        part.last_number = changes.number
        self._sweep()
        if changes.begins_dump or has_gap:
            self._forget(worker, part)
            if not changes.begins_dump:
                return True
            part.is_dumping = True
        if part.is_dumping or part.is_whole:
            self._take(part, changes)
            if part.num_blocks > part.max_blocks:  # not even in doubt: it cannot be
                self._forget(worker, part)
                return True
        return False

    def match(self, hashes: Sequence[BlockHash]) -> PrefixMatches:
        """Of the chained hashes of a prompt's full blocks."""
        runs: list[tuple[int, int]] = []
        left = self._whole
        for num_blocks, block_hash in enumerate(hashes):
            still = left & self._shard(block_hash).get(block_hash, 0)
            if still != left:
                if num_blocks:
                    runs.append((num_blocks, left & ~still))
                left = still
                if not left:
                    break
        if left and hashes:
            runs.append((len(hashes), left))
        return PrefixMatches(runs[::-1], self._slots)

    def num_blocks(self, worker: WorkerId) -> int | None:
        """Findable on the worker; None while that is not known."""
        part = self._parts.get(worker)
        return part.num_blocks if part is not None and part.is_whole else None

    def _shard(self, block_hash: BlockHash) -> dict[BlockHash, int]:
        return self._shards[block_hash[0] << 4 | block_hash[1] >> 4]

    def _take(self, part: _Part, changes: CacheChanges) -> None:
        bit = 1 << part.slot
        for block_hash in changes.stored:
            shard = self._shard(block_hash)
            bits = shard.get(block_hash, 0)
            if not bits & bit:
                shard[block_hash] = bits | bit
                part.num_blocks += 1
        for block_hash in changes.removed:
            shard = self._shard(block_hash)
            if shard.get(block_hash, 0) & bit:
                _clear(shard, block_hash, bit)
                part.num_blocks -= 1
        if changes.ends_dump and part.is_dumping:
            part.is_dumping, part.is_whole = False, True
            self._whole |= bit

    def _forget(self, worker: WorkerId, part: _Part) -> None:
        part.is_dumping = part.is_whole = False
        if part.num_blocks or self._whole >> part.slot & 1:
            self._give_up(worker, part)
            part.slot, part.num_blocks = self._take_slot(worker), 0

    def _take_slot(self, worker: WorkerId) -> int:
        slot = heapq.heappop(self._free) if self._free else len(self._slots.workers)
        workers = [*self._slots.workers, None] if slot == len(self._slots.workers) else [*self._slots.workers]
        workers[slot] = worker
        self._slots = Slots(tuple(workers), {**self._slots.of, worker: slot})
        return slot

    def _give_up(self, worker: WorkerId, part: _Part) -> None:
        self._whole &= ~(1 << part.slot)
        workers = tuple(None if slot == part.slot else other for slot, other in enumerate(self._slots.workers))
        self._slots = Slots(workers, {other: slot for other, slot in self._slots.of.items() if other != worker})
        if part.num_blocks:
            self._left.append((part.slot, self._num_swept + _NUM_SHARDS))
            self._left_bits |= 1 << part.slot
        else:
            heapq.heappush(self._free, part.slot)

    def _sweep(self) -> None:
        """A step on the way round the shards: takes out the bits of slots that have been given up."""
        num_looked_at = 0
        while self._left and num_looked_at < _SWEPT_AT_ONCE:
            shard = self._shards[self._num_swept % _NUM_SHARDS]
            for block_hash in [block_hash for block_hash, bits in shard.items() if bits & self._left_bits]:
                _clear(shard, block_hash, self._left_bits)
            num_looked_at += 1 + len(shard)
            self._num_swept += 1
            while self._left and self._left[0][1] == self._num_swept:
                slot, _ = self._left.popleft()
                self._left_bits &= ~(1 << slot)
                heapq.heappush(self._free, slot)


def _clear(shard: dict[BlockHash, int], block_hash: BlockHash, bits: int) -> None:
    left = shard[block_hash] & ~bits
    if left:
        shard[block_hash] = left
    else:
        del shard[block_hash]


def _bits_from(bits: int, start: int) -> Iterator[int]:
    """Numbers of the bits that are set, from `start` on and round."""
    high = bits >> start << start
    for part in (high, bits ^ high):
        while part:
            lowest = part & -part
            yield lowest.bit_length() - 1
            part ^= lowest
