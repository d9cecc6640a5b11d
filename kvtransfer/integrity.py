"""Whether what lies in the blocks of a ticket is what its sender meant to write: which blocks are checked, and how.

The checksums are `model.block_sums`'s. Also the seal of a ticket, by which a record or a release shows that it comes
from whom the ticket was given to.
"""

from __future__ import annotations

import asyncio
import hmac
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtransfer import metrics
from kvtransfer.errors import CorruptBlocks
from model.block_sums import BlockSums

SAMPLED_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class Verification:
    """For the receiver. `share` of the blocks of each ticket, at least one, is checked."""

    sums: BlockSums
    share: float
    rng: Callable[[], float] = random.SystemRandom().random  # not to be foreseen by a sender

    def choose(self, num_blocks: int) -> tuple[int, ...]:
        """Which of a ticket's blocks, in ascending order."""
        if num_blocks == 0 or self.share >= 1:
            return tuple(range(num_blocks))
        chosen = tuple(index for index in range(num_blocks) if self.rng() < self.share)
        return chosen or (min(int(self.rng() * num_blocks), num_blocks - 1),)

    async def check(self, block_ids: Sequence[int], checksums: Sequence[int]) -> None:
        """In a thread. Raises CorruptBlocks if the content of a block has other checksums."""
        started = time.perf_counter()
        index = await asyncio.to_thread(self.first_difference, block_ids, checksums)
        metrics.CHECK_SECONDS.inc(time.perf_counter() - started)
        metrics.CHECKED_BYTES.inc(len(block_ids) * self.sums.block_bytes)
        if index is not None:
            raise CorruptBlocks(f"block {block_ids[index]} does not hold what was sent")

    def first_difference(self, block_ids: Sequence[int], checksums: Sequence[int]) -> int | None:
        """Index of the first of these blocks whose content has other checksums; None if none has. Takes its time."""
        running = self.sums.start(len(block_ids))
        running.add(self.sums.layers, block_ids, range(len(block_ids)))
        found = running.values()
        if len(checksums) != len(found):
            return 0
        differing = (
            index // 2 for index, (one, other) in enumerate(zip(found, checksums, strict=True)) if one != other
        )
        return next(differing, None)


def seal(
    key: bytes,
    ticket_id: str,
    sender_epoch: str,
    attempt_id: str,
    block_ids: Sequence[int],
    generations: Sequence[int],
) -> bytes:
    """HMAC-SHA256 over what makes a ticket this ticket."""
    content = repr((ticket_id, sender_epoch, attempt_id, tuple(block_ids), tuple(generations)))
    return hmac.digest(key, content.encode(), "sha256")


def is_seal(one: bytes, other: bytes) -> bool:
    """In a time that does not tell how much of them is equal."""
    return hmac.compare_digest(one, other)
