"""What the router is told of this worker's prefix cache: changes as they come, and all of it when that is asked for.

Pure bookkeeping beside the block pool: it sends nothing, and waits for nobody. Event loop only, as the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from model.block_pool import BlockHash, BlockPool

_MAX_HASHES = 1024  # in one message: 16 KB, which take a router half a millisecond
_MAX_PENDING = 65536  # changes that nobody has fetched


@dataclass(frozen=True, slots=True)
class CacheNews:
    """One message of the feed; `number` is one more than that of the message before."""

    number: int
    stored: Sequence[BlockHash] = ()
    removed: Sequence[BlockHash] = ()
    begins_dump: bool = False
    ends_dump: bool = False


class CacheFeed:
    """Listens to `pool` from the first dump on. Only the latest state of a hash is kept, until it is fetched by `next`.

    Where more than `max_pending` changes would pile up they are dropped, and a dump takes their place.
    """

    def __init__(self, pool: BlockPool, *, max_hashes: int = _MAX_HASHES, max_pending: int = _MAX_PENDING) -> None:
        self._pool = pool
        self._max_hashes = max_hashes
        self._max_pending = max_pending
        self._number = 0
        self._pending: dict[BlockHash, bool] = {}  # to whether it is findable
        self._dump: list[BlockHash] | None = None  # one that has begun; what is left of it
        self._wants_dump = False

    def dump(self) -> None:
        """The next message begins a dump. One that is under way is given up, and what was pending is in the new one."""
        self._wants_dump = True
        self._dump = None
        self._pending.clear()
        self.close()

    def close(self) -> None:
        """It listens no longer, unless another dump begins."""
        if self._changed in self._pool.on_change:
            self._pool.on_change.remove(self._changed)

    def next(self) -> CacheNews | None:
        """What is to be said next; None if nothing is."""
        if self._wants_dump or self._dump is not None:
            return self._next_of_dump()
        if not self._pending:
            return None
        hashes = list(islice(self._pending, self._max_hashes))
        changes = [(block_hash, self._pending.pop(block_hash)) for block_hash in hashes]
        self._number += 1
        return CacheNews(
            self._number,
            stored=[block_hash for block_hash, is_findable in changes if is_findable],
            removed=[block_hash for block_hash, is_findable in changes if not is_findable],
        )

    def _next_of_dump(self) -> CacheNews:
        begins = self._wants_dump
        if begins:
            self._wants_dump = False
            self._dump = self._pool.findable()
            self._pool.on_change.append(self._changed)
        left = self._dump or []
        part = left[-self._max_hashes :]
        del left[-self._max_hashes :]
        if not left:
            self._dump = None
        self._number += 1
        return CacheNews(self._number, stored=part, begins_dump=begins, ends_dump=self._dump is None)

    def _changed(self, block_hash: BlockHash, is_findable: bool) -> None:
        self._pending[block_hash] = is_findable
        if len(self._pending) > self._max_pending:
            self.dump()
