"""The decode side of a hand-over: grants tickets over the block pool, takes committed sequences, ends what went wrong.

Event loop only; it knows nothing of gRPC or of the transport. It turns messages and time into events of a ticket, and
does what `kvtransfer.ownership` says comes of them; blocks have up to three owners (`model.block_pool`), of which a
ticket's lease is one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from kvtransfer import metrics
from kvtransfer.admission import Admission
from kvtransfer.attempts import EndedAttempts, again
from kvtransfer.checks import check_reservation, misfit
from kvtransfer.coding import ticket_bytes
from kvtransfer.contents import Contents
from kvtransfer.errors import (
    AttemptEnded,
    CorruptBlocks,
    DuplicateAttempt,
    LeaseExpired,
    SenderGone,
    SenderNotAttached,
    TicketEnded,
    UnknownTicket,
)
from kvtransfer.granting import Granting
from kvtransfer.integrity import Verification, is_seal
from kvtransfer.leases import Leases
from kvtransfer.ownership import TRANSITIONS, Effect, Event, Lease, State
from kvtransfer.receiver_options import ReceiverOptions
from kvtransfer.ticket import HandoverRecord, ReceivedSequence, Reservation, SenderIdentity, Ticket
from kvtransfer.unpacking import Unpacking
from model.block_pool import BlockPool
from model.kv_layout import KVLayout
from protos.errors import ServiceError

logger = logging.getLogger(__name__)

_IGNORED = {Event.RECORD: "commit", Event.MISFIT: "record", Event.RELEASE: "release"}  # as metrics call the messages

FailedListener = Callable[[str, ServiceError], None]
"""Called with (attempt id, error) when a ticket ends before it was committed, unless our own side aborted it."""


class Receiver:
    """`headroom` tells how many blocks must stay free for sequences that run here already to grow."""

    def __init__(
        self,
        pool: BlockPool,
        layout: KVLayout,
        epoch: str,
        *,
        options: ReceiverOptions | None = None,
        failed: FailedListener | None = None,
        headroom: Callable[[], int] = lambda: 0,
        verification: Verification | None = None,
        unpacking: Unpacking | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._layout = layout
        self._options = options or ReceiverOptions()
        self._failed = failed
        self._clock = clock
        self._contents = Contents(pool, verification, unpacking)
        self._admission = Admission(pool, headroom=headroom, place_s=self._options.place_s, clock=clock)
        self._granting = Granting(
            pool,
            layout,
            epoch,
            admission=self._admission,
            verification=verification,
            lease_s=self._options.lease_s,
            grace_s=self._options.quarantine_grace_s,
            retry_after_s=self._options.retry_after_s,
        )
        self.leases = Leases()
        self._streams: dict[str, int] = {}  # Attach streams by sender epoch
        self._ended = EndedAttempts(self._options.num_remembered_attempts)

    @property
    def now(self) -> float:
        """An instant to send along with an answer to a heartbeat; see `heartbeat`."""
        return self._clock()

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that a live ticket lets a sender write."""
        return self.leases.num_reserved_blocks()

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of ended tickets that a sender may still be writing."""
        return self.leases.num_quarantined_blocks()

    @property
    def oldest_quarantine_s(self) -> float:
        """Age of the oldest quarantine; 0 if there is none."""
        oldest = self.leases.oldest_end()
        return 0.0 if oldest is None else self._clock() - oldest

    def sender_attached(self, sender_epoch: str) -> None:
        """One more Attach stream of this sender. Its end is told by `sender_gone`."""
        self._streams[sender_epoch] = self._streams.get(sender_epoch, 0) + 1

    def reserve(self, reservation: Reservation) -> Ticket:
        """Grants room for the KV of a sequence's tokens, less the full blocks held here already.

        Raises:
            LayoutMismatch, InvalidReservation, SenderNotAttached: nothing will make this succeed as it is.
            AttemptEnded: the attempt was aborted here. DuplicateAttempt: it has or had a ticket.
            DecodePoolFull: not now; `retry_after_s` is set.
        """
        self._check(reservation)
        lease = self._granting.lease(reservation)
        self._step(Event.GRANT, lease)
        self._contents.start(lease.ticket)
        return lease.ticket

    def check_not_ended(self, attempt_id: str) -> None:
        """Raises why nothing will come of this attempt any more: it was committed before, or it ended without."""
        self._ended.check(attempt_id)

    async def receive(self, record: HandoverRecord) -> ReceivedSequence:
        """Takes the sequence, once what lies in the blocks that the ticket wants checked has been compared with the
        record, and unpacked: publishes its full blocks and passes the lease's references to the caller.

        Raises:
            UnknownTicket: also for one that was committed before. TicketEnded, LeaseExpired: too late, or meanwhile.
            RecordMismatch: the record is not this ticket's; the ticket stays as it is.
            CorruptBlocks: the ticket has ended.
        """
        lease = self._accept(record)
        try:
            await self._contents.make_ready(lease.ticket, record)
        except CorruptBlocks as error:
            self._doubt(record, error)
            raise
        except BaseException:  # also if the call is cancelled: nobody would take the sequence
            self._doubt(record, CorruptBlocks(f"the check of attempt {record.attempt_id!r} was not finished"))
            raise
        return self._hand_over(record)

    def _accept(self, record: HandoverRecord) -> Lease:
        lease = self._judged(self.leases.find(record.ticket_id))
        if lease is None:
            self._step(Event.RECORD, None)
            raise UnknownTicket(f"no ticket {record.ticket_id!r} is held here")
        generations = tuple(map(self._pool.generation, lease.ticket.block_ids))
        difference = misfit(record, lease.ticket, lease.reservation, self._layout, generations)
        effects = self._step(Event.RECORD if difference is None else Event.MISFIT, lease)
        if lease.error is not None:
            raise again(lease.error)
        if difference is not None:
            metrics.REJECTED.labels(difference.field).inc()
            raise difference
        if Effect.IGNORE in effects:
            raise DuplicateAttempt(f"the record of attempt {record.attempt_id!r} is being checked")
        return lease

    def _doubt(self, record: HandoverRecord, error: CorruptBlocks) -> None:
        metrics.REJECTED.labels("content").inc()
        lease = self.leases.find(record.ticket_id)
        if lease is not None and lease.state is State.CHECKING:
            self._step(Event.CORRUPT, lease, error)

    def _hand_over(self, record: HandoverRecord) -> ReceivedSequence:
        lease = self.leases.find(record.ticket_id)
        if lease is None or lease.state is not State.CHECKING:
            self._ended.check(record.attempt_id)
            raise UnknownTicket(f"ticket {record.ticket_id!r} ended while its record was checked")
        self._step(Event.INTACT, lease)
        return lease.received(record)

    def abort(self, attempt_id: str, reason: str) -> None:
        """Our side has given this attempt up: a ticket of it ends, a later reserve is refused. Idempotent."""
        error = AttemptEnded(f"attempt {attempt_id!r} was aborted: {reason}")
        self._step(Event.ABORT, self._judged(self.leases.of_attempt(attempt_id)), error, attempt_id)

    def release(self, ticket_id: str, sender_epoch: str, reason: str = "", *, mac: bytes) -> None:
        """The sender has stopped writing for good: the blocks are free at once. Unknown tickets are ignored."""
        lease = self._of_sender(ticket_id, sender_epoch)
        if lease is not None and not is_seal(mac, lease.ticket.mac):
            lease = None
        attempt_id = lease.reservation.attempt_id if lease is not None else ""
        self._step(Event.RELEASE, lease, TicketEnded(f"the prefill worker gave attempt {attempt_id!r} up: {reason}"))

    def heartbeat(self, sender: SenderIdentity, ticket_ids: Iterable[str], heard_at: float = 0.0) -> list[str]:
        """Renews the leases of the tickets named. Returns those that have ended: stop writing, then release.

        `heard_at` is the latest of our instants (`now`) that had reached the sender when it wrote this; 0: none.
        """
        self._streams.setdefault(sender.epoch, 1)
        named = set(ticket_ids)
        ended = [
            ticket_id
            for ticket_id in named
            if Effect.STOP in self._step(Event.NAMED, self._of_sender(ticket_id, sender.epoch))
        ]
        for lease in self._all_of_sender(sender.epoch):
            if lease.ticket.ticket_id not in named and lease.is_forgotten_by(min(heard_at, self._clock())):
                self._step(Event.FORGOTTEN, lease)
        return ended

    def written(self, sender_epoch: str, num_blocks: Mapping[str, int]) -> None:
        """By ticket id: so many of its blocks, from the first on, are written. Spares time when the record comes."""
        for ticket_id, num_written in num_blocks.items():
            if self._of_sender(ticket_id, sender_epoch) is not None:
                self._contents.written(ticket_id, num_written)

    def sender_gone(self, sender_epoch: str) -> None:
        """An Attach stream of this sender ended. With its last one all its uncommitted tickets fail at once."""
        remaining = self._streams.get(sender_epoch, 0) - 1
        if remaining > 0:
            self._streams[sender_epoch] = remaining
            return
        self._streams.pop(sender_epoch, None)
        self._admission.leave(sender_epoch)
        for lease in self._all_of_sender(sender_epoch):
            error = SenderGone(f"prefill worker {lease.reservation.sender.worker_id!r} is gone")
            self._step(Event.SENDER_GONE, lease, error)

    def expire(self) -> None:
        """Judges every lease by the clock: lapsed ones are quarantined, quarantines past their grace are freed."""
        for lease in self.leases.all():
            self._judged(lease)
        metrics.OLDEST_QUARANTINE.set(self.oldest_quarantine_s)

    async def run(self) -> None:
        """Judges leases until cancelled, whether or not anything else happens."""
        while True:
            await asyncio.sleep(self._options.timer_s)
            self.expire()

    def _check(self, reservation: Reservation) -> None:
        check_reservation(reservation, self._layout, self._pool.num_blocks, self._contents.codings)
        if reservation.sender.epoch not in self._streams:
            raise SenderNotAttached(f"prefill worker {reservation.sender.worker_id!r} has no Attach stream here")
        self._ended.check(reservation.attempt_id)
        if self.leases.of_attempt(reservation.attempt_id) is not None:
            raise DuplicateAttempt(f"attempt {reservation.attempt_id!r} has a ticket already", field="attempt_id")

    def _of_sender(self, ticket_id: str, sender_epoch: str) -> Lease | None:
        """Another sender's ticket is as unknown as none."""
        lease = self.leases.find(ticket_id)
        return self._judged(lease) if lease is not None and lease.reservation.sender.epoch == sender_epoch else None

    def _all_of_sender(self, sender_epoch: str) -> list[Lease]:
        leases = map(self._judged, self.leases.of_sender(sender_epoch))
        return [lease for lease in leases if lease is not None]

    def _judged(self, lease: Lease | None) -> Lease | None:
        """The lease as it stands by now, whenever the timer ran last; None if it is over."""
        if lease is None or (event := lease.due(self._clock())) is None:
            return lease
        error = None
        if event is Event.LAPSE:
            metrics.LEASES_EXPIRED.inc()
            error = LeaseExpired(f"ticket {lease.ticket.ticket_id} was not renewed in {lease.ticket.lease_s} s")
        self._step(event, lease, error)
        return self.leases.find(lease.ticket.ticket_id)

    def _step(
        self, event: Event, lease: Lease | None, error: ServiceError | None = None, attempt_id: str = ""
    ) -> tuple[Effect, ...]:
        """Takes a lease to its next state, carries out what that means, and returns it. No lease: there is none."""
        _, effects = TRANSITIONS[State.NONE if lease is None else lease.state, event]
        if lease is not None:
            attempt_id = lease.reservation.attempt_id
            after = lease.after(event, self._clock(), error)
            self.leases.put(after)
            if after.state not in (State.LIVE, State.CHECKING):
                self._contents.drop(after.ticket.ticket_id)
            if {Effect.HOLD, Effect.HAND_OVER, Effect.END} & set(effects):
                metrics.TICKETS.labels(event.value).inc()
        for effect in effects:
            if lease is not None and effect is Effect.FREE:
                self._pool.release(lease.block_ids)
            elif lease is not None and effect is Effect.HAND_OVER:
                for block_id, block_hash in lease.filled_blocks:
                    self._pool.publish(block_id, block_hash)
                metrics.observe_received(lease.ticket.coding, ticket_bytes(self._layout, lease.ticket))
                self._ended.add(attempt_id, DuplicateAttempt(f"attempt {attempt_id!r} was committed before"))
            elif error is not None and effect is Effect.END:
                logger.info("attempt %s: %s", attempt_id, error)
                self._ended.add(attempt_id, error)
            elif error is not None and effect is Effect.TELL and self._failed is not None:
                self._failed(attempt_id, error)
            elif effect is Effect.RENEW:
                metrics.LEASES_RENEWED.inc()
            elif effect is Effect.IGNORE:
                metrics.IGNORED.labels(_IGNORED[event]).inc()
        return effects
