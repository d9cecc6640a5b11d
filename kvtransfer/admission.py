"""Who may take blocks of the decode worker's pool now, and in which order those come who found no room. Pure policy.

A prefill worker that is refused gets a place in a line and keeps it while it goes on asking. Nobody takes blocks that
those before it wait for: or small prompts of one prefill worker could for ever take what a large one of another needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.block_pool import BlockHash, BlockPool, NoFreeBlocks


@dataclass(frozen=True, slots=True)
class _Place:
    num_blocks: int
    expires_at: float


class Admission:
    """`headroom` tells how many blocks must stay free for sequences that run here already to grow.

    One place for each sender, not for each prompt: which of its prompts goes first is the sender's own decision.
    A place lasts `place_s` from the last refusal.
    """

    def __init__(
        self, pool: BlockPool, *, headroom: Callable[[], int], place_s: float, clock: Callable[[], float]
    ) -> None:
        self._pool = pool
        self._headroom = headroom
        self._place_s = place_s
        self._clock = clock
        self._line: dict[str, _Place] = {}  # by sender epoch, first come first

    def allocate(
        self, sender_epoch: str, num_blocks: int, block_hashes: Sequence[BlockHash]
    ) -> tuple[list[int], list[int]]:
        """The blocks of a sequence: those that hold its first tokens already, and new ones, with a reference to each.

        Raises NoFreeBlocks, and then nothing is taken: the sender has a place in the line from here on.
        """
        num_free = self._pool.num_free
        prefix = self._pool.match_prefix(block_hashes)
        num_wanted = num_blocks - len(prefix)
        num_taken = num_wanted + num_free - self._pool.num_free  # a prefix that nobody held was free too
        num_kept = self._num_blocks_before(sender_epoch)
        if self._pool.num_used > len(prefix):  # somebody else is here who could want to grow
            num_kept += self._headroom()
        if num_taken > 0 and num_wanted + num_kept > self._pool.num_free:
            num_to_give = max(0, self._pool.num_free - num_kept)
            self._pool.release(prefix)
            self._line[sender_epoch] = _Place(num_taken, self._clock() + self._place_s)  # where it was, if it was there
            raise NoFreeBlocks(num_wanted, num_to_give)
        self._line.pop(sender_epoch, None)
        return prefix, self._pool.allocate(num_wanted)

    def leave(self, sender_epoch: str) -> None:
        """This sender will not ask again."""
        self._line.pop(sender_epoch, None)

    def _num_blocks_before(self, sender_epoch: str) -> int:
        """What those wait for who came before this sender: everybody, if it has no place."""
        now = self._clock()
        self._line = {epoch: place for epoch, place in self._line.items() if now < place.expires_at}
        total = 0
        for epoch, place in self._line.items():
            if epoch == sender_epoch:
                break
            total += place.num_blocks
        return total
