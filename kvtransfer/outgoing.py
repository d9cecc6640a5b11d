"""One sequence on its way to a decode worker: what has been written of it, and how it ends.

Each ends by exactly one `commit` or `abort`. Until every write has ended it holds a reference to each local block, the
in-flight owner's, whatever becomes of the sequence.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvtransfer import metrics
from kvtransfer.errors import IncompleteTransfer, TransferFailed
from kvtransfer.geometry import CacheSpan
from kvtransfer.packed_writes import PackedWrites
from kvtransfer.packing import Packing
from kvtransfer.peer import Peer
from kvtransfer.plain_writes import PlainWrites
from kvtransfer.runs import Arrived, Part, Run
from kvtransfer.ticket import HandoverRecord, Reservation, SendStats, Ticket
from kvtransfer.transfer_thread import TransferThread, WriteStream
from model.block_pool import BlockPool
from model.block_sums import RunningSums
from protos.errors import ServiceError


class State(enum.Enum):
    OPEN = "open"  # writes are posted
    COMMITTING = "committing"  # all are posted; the record is sent when they have ended
    ENDING = "ending"  # given up: nothing more is posted; the ticket is given back when what was posted has ended
    ENDED = "ended"  # nothing of ours is written from or to any more


MAY_BECOME = {
    State.OPEN: {State.COMMITTING, State.ENDING},
    State.COMMITTING: {State.ENDING, State.ENDED},
    State.ENDING: {State.ENDED},
    State.ENDED: set[State](),
}


class Outgoing:
    """`write` and `write_all_layers` are called from any thread, everything else on the event loop."""

    def __init__(
        self,
        reservation: Reservation,
        ticket: Ticket,
        *,
        peer: Peer,
        pool: BlockPool,
        local: CacheSpan,
        thread: TransferThread,
        sums: RunningSums | None,
        packing: Packing | None,
        own: Callable[[asyncio.Task[None]], None],
        ended: Callable[[Outgoing], None],
    ) -> None:
        self._reservation = reservation
        self._ticket = ticket
        self._peer = peer
        self._pool = pool
        self._local = local
        self._thread = thread
        self._sums = sums  # of the blocks that the ticket wants checked; not touched here until the thread has drained
        self._own = own
        self._ended = ended
        self._run: Run | None = None  # the last one: its layers come one after the other
        self._writes = self._new_writes(packing)
        self._arrived = Arrived(local.layout.num_layers)
        self._stream = self._new_stream()
        self._held: set[int] = set()
        self._written = [0] * local.layout.num_layers  # bit i of layer l: ticket block i was queued
        self._state = State.OPEN
        self._ending: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        peer.add(ticket, self.fail)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose KV the decode worker holds already: they are not sent."""
        return self._ticket.num_cached_tokens

    @property
    def failed(self) -> Exception | None:
        """Why this sequence cannot be handed over any more. Nothing is posted once it is set."""
        return self._error

    def hold(self, block_ids: Sequence[int]) -> None:
        """Takes a reference to each local block that will be written from, unless it has one already or is over."""
        if self._state is not State.OPEN:
            return
        new = [block_id for block_id in dict.fromkeys(block_ids) if block_id not in self._held]
        self._pool.acquire(new)
        self._held.update(new)

    def write(self, layer: int, first_block: int, local_block_ids: Sequence[int]) -> None:
        """Queues one layer of consecutive blocks of the sequence, `first_block` being the index of the first.

        Blocks that the decode worker holds already are left out. The local blocks must be held.
        """
        self._queue(range(layer, layer + 1), first_block, local_block_ids)

    def write_all_layers(self, first_block: int, local_block_ids: Sequence[int]) -> None:
        """The same for blocks whose layers are all computed, such as those found in the prefix cache."""
        self._queue(range(self._local.layout.num_layers), first_block, local_block_ids)

    async def commit(self, first_token_id: int, num_tokens: int, drafting: bytes = b"") -> SendStats:
        """Waits for the writes and hands the sequence over: `num_tokens` tokens, the first token not among them.

        Raises a ServiceError if it was not, or may not have been, handed over; then all is let go as by `abort`.
        """
        started = time.perf_counter()
        if not self._become(State.COMMITTING):
            raise self._has_ended()
        try:
            await self._drained()
            self._check_complete(num_tokens)
            await self._peer.commit(self._record(first_token_id, drafting))
        except BaseException as error:  # also if the caller is cancelled: what was posted still needs its owner
            self._start_ending(f"the commit failed: {error!r}", error)
            raise
        if self._state is State.COMMITTING:  # or it was aborted while the record was under way, and ends by itself
            self._peer.remove(self._ticket.ticket_id)
            self._error = None  # a heartbeat may have crossed the commit
            metrics.HANDOVERS.labels("ok").inc()
            self._finish()
        metrics.observe_exposed(time.perf_counter() - started)
        return SendStats(num_tokens - self.num_cached_tokens, self._stream.sent_bytes)

    async def abort(self, reason: str) -> None:
        """Stops posting, waits until what was posted has ended, and gives the ticket back. No-op once it has ended."""
        self._start_ending(reason, self._error)
        if self._ending is not None:
            await asyncio.shield(self._ending)

    def fail(self, error: Exception) -> None:
        """The ticket has ended or the peer is lost: posts nothing more. A commit under way is decided by its answer."""
        if self._error is None and self._state is not State.ENDED:
            self._error = error
            self._stream.stopped = True

    def _write_failed(self, error: Exception) -> None:
        self.fail(error)
        self._peer.lose(error)

    def _queue(self, layers: range, first_block: int, local_block_ids: Sequence[int]) -> None:
        if self._stream.stopped:
            return
        num_cached_blocks = self.num_cached_tokens // self._local.layout.block_size
        local_ids = tuple(local_block_ids[max(0, num_cached_blocks - first_block) :])
        start = max(first_block, num_cached_blocks) - num_cached_blocks
        if not local_ids:
            return
        run = self._run
        if run is None or run.start != start or run.local_ids != local_ids:
            run = self._run = self._new_run(start, local_ids)
        for layer in layers:  # each a part, so that other sequences have their turn in between
            self._written[layer] |= ((1 << len(local_ids)) - 1) << start
            self._thread.post(self._stream, self._writes.parts(run, layer))

    def _new_run(self, start: int, local_ids: tuple[int, ...]) -> Run:
        remote_ids = self._ticket.block_ids[start : start + len(local_ids)]
        if len(remote_ids) != len(local_ids):
            raise ValueError(f"blocks {start} to {start + len(local_ids)} reach beyond the ticket's")
        if not self._held.issuperset(local_ids):
            raise ValueError("a local block is written from that is not held")
        return Run(start, local_ids, np.array(local_ids, np.int32), np.array(remote_ids, np.int32))

    def _new_writes(self, packing: Packing | None) -> PlainWrites | PackedWrites:
        if packing is None:
            return PlainWrites(self._local, self._peer, self._ticket, self._sums)
        num_tokens = self._reservation.num_tokens - self.num_cached_tokens
        return PackedWrites(packing, self._peer, self._ticket, num_tokens, self._sums)

    def _new_stream(self) -> WriteStream[Part]:
        writes, is_checked = self._writes, self._sums is not None
        return WriteStream(
            self._peer.agent_name,
            self._write_failed,
            writes.work_out,
            beside=writes.beside if is_checked else None,
            arrived=self._tell_arrived if is_checked else None,
            ended=writes.ended,
            has_room=writes.has_room,
            coding=self._ticket.coding,
        )

    def _tell_arrived(self, parts: Sequence[Part]) -> None:
        """Which blocks the peer may check already. On the transfer thread."""
        if self._arrived.add(parts):
            self._peer.written(self._ticket.ticket_id, self._arrived.num_blocks)

    async def _drained(self) -> None:
        await self._thread.drain(self._stream)
        if self._error is not None:
            raise self._error
        if self._state is not State.COMMITTING:
            raise self._has_ended()

    def _check_complete(self, num_tokens: int) -> None:
        if num_tokens != self._reservation.num_tokens:
            raise IncompleteTransfer(f"{num_tokens} tokens committed, {self._reservation.num_tokens} reserved")
        everything = (1 << len(self._ticket.block_ids)) - 1
        missing = [layer for layer, written in enumerate(self._written) if written != everything]
        if missing:
            raise IncompleteTransfer(f"layers {missing} of attempt {self._reservation.attempt_id!r} lack blocks")

    def _record(self, first_token_id: int, drafting: bytes) -> HandoverRecord:
        return HandoverRecord(
            ticket_id=self._ticket.ticket_id,
            attempt_id=self._reservation.attempt_id,
            epoch=self._ticket.epoch,
            sender_epoch=self._reservation.sender.epoch,
            layout_fingerprint=self._reservation.layout_fingerprint,
            generations=self._ticket.generations,
            num_tokens=self._reservation.num_tokens,
            first_token_id=first_token_id,
            sent_tokens=self._reservation.num_tokens - self.num_cached_tokens,
            sent_bytes=self._stream.sent_bytes,
            drafting=drafting,
            checksums=() if self._sums is None else self._sums.values(),
            mac=self._ticket.mac,
            coding=self._ticket.coding,
        )

    def _has_ended(self) -> TransferFailed:
        return TransferFailed(f"attempt {self._reservation.attempt_id!r} has ended: {self._error or 'it was aborted'}")

    def _become(self, state: State) -> bool:
        """Whether that may follow; if not, nothing changes."""
        if state not in MAY_BECOME[self._state]:
            return False
        self._state = state
        return True

    def _start_ending(self, reason: str, error: BaseException | None) -> None:
        if self._become(State.ENDING):
            outcome = error.reason.lower() if isinstance(error, ServiceError) else "aborted"
            metrics.HANDOVERS.labels(outcome).inc()
            self._stream.stopped = True
            self._ending = asyncio.create_task(self._end(reason))
            self._own(self._ending)

    async def _end(self, reason: str) -> None:
        await self._thread.drain(self._stream)
        self._peer.release(self._ticket, reason)
        self._finish()

    def _finish(self) -> None:
        self._become(State.ENDED)
        self._pool.release(sorted(self._held))
        self._held.clear()
        self._ended(self)
