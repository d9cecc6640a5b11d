"""Who may take blocks of a simulated decode worker, by the rules of `kvtransfer.admission`: in the order in which they
were first refused, and never what those who decode there are about to need.
"""

from __future__ import annotations

from collections.abc import Sequence

from model.block_pool import BlockHash
from router.simulated_pool import Held
from router.simulated_worker import SimulatedWorker

RETRY_S = 0.05
_PLACE_S = 0.5


class SimulatedTickets:
    """Those of one worker."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker = worker
        self._line: dict[str, tuple[int, float]] = {}  # by sender: blocks, and until when it keeps its place

    def reserve(self, sender: str, num_tokens: int, groups: Sequence[BlockHash], now: float) -> Held | None:
        """Blocks for so many tokens, less what is found there; None if there is no room now."""
        worker, pool = self._worker, self._worker.pool
        worker.settle()
        found = groups[: pool.num_found(groups)]
        num_blocks = worker.layout.num_blocks(num_tokens)
        num_wanted = num_blocks - pool.group_blocks * len(found)
        num_idle = pool.num_idle_blocks(found)
        num_kept = self._num_blocks_before(sender, now)
        if pool.num_used + num_idle > pool.group_blocks * len(found):
            num_kept += worker.batch.num_wanted_blocks
        if num_wanted + num_idle > 0 and num_wanted + num_idle + num_kept > pool.num_free:
            self._line[sender] = (num_wanted + num_idle, now + _PLACE_S)
            return None
        self._line.pop(sender, None)
        return worker.reserve(found, num_blocks)

    def _num_blocks_before(self, sender: str, now: float) -> int:
        self._line = {name: place for name, place in self._line.items() if now < place[1]}
        total = 0
        for name, (num_blocks, _) in self._line.items():
            if name == sender:
                break
            total += num_blocks
        return total
