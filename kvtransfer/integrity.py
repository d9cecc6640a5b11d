"""Which blocks of a ticket are checked, by the checksums of `model.block_sums`; `kvtransfer.block_checks` does so.

Also the seal of a ticket, by which a record or a release shows that it comes from whom the ticket was given to.
"""

from __future__ import annotations

import asyncio
import hmac
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from model.block_sums import BlockSums

SAMPLED_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class Verification:
    """For the receiver. `share` of the blocks of each ticket, at least one, is checked."""

    sums: BlockSums
    share: float
    rng: Callable[[], float] = random.SystemRandom().random  # not to be foreseen by a sender
    run: Callable[..., Awaitable[Any]] = asyncio.to_thread  # what adds up checksums: it takes too long for the loop

    def choose(self, num_blocks: int) -> tuple[int, ...]:
        """Which of a ticket's blocks, in ascending order."""
        if num_blocks == 0 or self.share >= 1:
            return tuple(range(num_blocks))
        chosen = tuple(index for index in range(num_blocks) if self.rng() < self.share)
        return chosen or (min(int(self.rng() * num_blocks), num_blocks - 1),)


def seal(
    key: bytes,
    ticket_id: str,
    sender_epoch: str,
    attempt_id: str,
    block_ids: Sequence[int],
    generations: Sequence[int],
    coding: str,
) -> bytes:
    """HMAC-SHA256 over what makes a ticket this ticket."""
    content = repr((ticket_id, sender_epoch, attempt_id, tuple(block_ids), tuple(generations), coding))
    return hmac.digest(key, content.encode(), "sha256")


def is_seal(one: bytes, other: bytes) -> bool:
    """In a time that does not tell how much of them is equal."""
    return hmac.compare_digest(one, other)
