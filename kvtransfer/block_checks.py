"""The checks of what is written under tickets, which go on while the rest is on its way.

A sender says from time to time how many of a ticket's blocks are written; their sums are added up at once, in threads,
so that little is left to do when the record comes. Event loop only.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Mapping

from kvtransfer import metrics
from kvtransfer.errors import CorruptBlocks
from kvtransfer.integrity import Verification
from kvtransfer.ticket import Ticket


class BlockChecks:
    """By ticket. `verifications` are by the coding that KV comes in: what comes in none of them is not checked."""

    def __init__(self, verifications: Mapping[str, Verification]) -> None:
        self._verifications = verifications
        self._checks: dict[str, _Check] = {}

    def __len__(self) -> int:
        return len(self._checks)

    def start(self, ticket: Ticket) -> None:
        if ticket.checked:
            self._checks[ticket.ticket_id] = _Check(self._verifications[ticket.coding], ticket)

    def written(self, ticket_id: str, num_blocks: int) -> None:
        """So many of the ticket's blocks, from the first on, are as they shall be. Too much said is taken for all."""
        if (check := self._checks.get(ticket_id)) is not None:
            check.written(num_blocks)

    async def finish(self, ticket_id: str, checksums: tuple[int, ...]) -> bool:
        """Returns once all that is to be checked has been: True; or the ticket has been dropped meanwhile: False.

        Raises CorruptBlocks if a block has other checksums."""
        check = self._checks.get(ticket_id)
        return check is None or await check.finish(checksums)

    def drop(self, ticket_id: str) -> None:
        """What of it is being added up ends by itself, soon."""
        if (check := self._checks.pop(ticket_id, None)) is not None:
            check.stop()


class _Check:
    def __init__(self, verification: Verification, ticket: Ticket) -> None:
        self._sums, self._run = verification.sums, verification.run
        self._indices = ticket.checked
        self._block_ids = [ticket.block_ids[index] for index in ticket.checked]
        self._running = self._sums.start(len(self._block_ids))
        self._num_written = 0  # of those that are checked
        self._num_added = 0
        self._is_over = False
        self._adding: asyncio.Task[None] | None = None

    def written(self, num_blocks: int) -> None:
        self._num_written = max(self._num_written, bisect_left(self._indices, num_blocks))
        if self._num_written > self._num_added and self._may_add:
            self._adding = asyncio.create_task(self._add_what_is_written())
            self._adding.add_done_callback(_seen)

    @property
    def _may_add(self) -> bool:
        """Nobody does, and nobody has failed: nobody knows what had been added by then."""
        adding = self._adding
        return adding is None or (adding.done() and not adding.cancelled() and adding.exception() is None)

    async def finish(self, checksums: tuple[int, ...]) -> bool:
        self.written(self._indices[-1] + 1)
        if self._adding is not None:
            await asyncio.shield(self._adding)
        if self._is_over:
            return False
        found = await self._run(self._running.values)
        if len(found) != len(checksums):
            raise CorruptBlocks(f"{len(checksums)} checksums came for {len(self._block_ids)} blocks")
        for index, (one, other) in enumerate(zip(found, checksums, strict=True)):
            if one != other:
                raise CorruptBlocks(f"block {self._block_ids[index // 2]} does not hold what was sent")
        return True

    def stop(self) -> None:
        self._is_over = True

    async def _add_what_is_written(self) -> None:
        """One step after the other: sums are not for two threads at once."""
        while not self._is_over and (start := self._num_added) < (stop := self._num_written):
            await self._run(self._add_up, start, stop)
            self._num_added = stop

    def _add_up(self, start: int, stop: int) -> None:
        """In a thread."""
        started = time.perf_counter()
        self._running.add(self._sums.layers, self._block_ids[start:stop], range(start, stop))
        metrics.CHECK_SECONDS.inc(time.perf_counter() - started)
        metrics.CHECKED_BYTES.inc((stop - start) * self._sums.block_bytes)


def _seen(adding: asyncio.Task[None]) -> None:
    """What it raised is for `finish`, should the record ever come."""
    if not adding.cancelled():
        adding.exception()
