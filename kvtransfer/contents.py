"""What lies in the blocks of a ticket once its record has come: it is compared with the record, and taken out of its
coding. Both in a thread.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from kvtransfer import metrics
from kvtransfer.block_checks import BlockChecks
from kvtransfer.integrity import Verification
from kvtransfer.ticket import AS_IS, HandoverRecord, Ticket
from kvtransfer.unpacking import Unpacking
from model.block_pool import BlockPool


class Contents:
    """Event loop only. Without an `unpacking` KV is taken as it is alone."""

    def __init__(self, pool: BlockPool, verification: Verification | None, unpacking: Unpacking | None) -> None:
        self._pool = pool
        self._unpacking = unpacking
        self._tasks: set[asyncio.Task[None]] = set()
        verifications = {} if verification is None else {AS_IS: verification}
        if verification is not None and unpacking is not None:
            for coding in unpacking.codings:
                verifications[coding] = replace(verification, sums=unpacking.sums(coding))
        self._checks = BlockChecks(verifications)

    @property
    def codings(self) -> tuple[str, ...]:
        return () if self._unpacking is None else self._unpacking.codings

    def start(self, ticket: Ticket) -> None:
        """It is about to be written under."""
        self._checks.start(ticket)

    def written(self, ticket_id: str, num_blocks: int) -> None:
        """So many of its blocks, from the first on, are as they shall be."""
        self._checks.written(ticket_id, num_blocks)

    def drop(self, ticket_id: str) -> None:
        """It is over."""
        self._checks.drop(ticket_id)

    async def make_ready(self, ticket: Ticket, record: HandoverRecord) -> None:
        """Returns when the blocks can be decoded from. Raises CorruptBlocks if they do not hold what was sent."""
        if self._unpacking is None or ticket.coding == AS_IS:
            await self._checks.finish(ticket.ticket_id, record.checksums)
            return
        # The thread writes into the blocks. So that nobody else gets them before it has left them, whatever becomes of
        # the ticket and of this call, they have an owner more until then.
        self._pool.acquire(ticket.block_ids)
        task = asyncio.create_task(self._check_and_unpack(self._unpacking, ticket, record))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._pool.release(ticket.block_ids))
        await asyncio.shield(task)

    async def _check_and_unpack(self, unpacking: Unpacking, ticket: Ticket, record: HandoverRecord) -> None:
        if not await self._checks.finish(ticket.ticket_id, record.checksums):
            return
        started = time.perf_counter()
        await asyncio.to_thread(unpacking.unpack, ticket.coding, ticket.block_ids)
        metrics.UNPACK_SECONDS.inc(time.perf_counter() - started)
