"""The decode side of a hand-over: grants tickets over the block pool, takes committed sequences, ends what went wrong.

Event loop only; it knows nothing of gRPC or of the transport. Blocks have up to three owners (`model.block_pool`); the
reference held here is the lease's, and while a sender may still write, it is not given back.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvtransfer import metrics
from kvtransfer.admission import Admission
from kvtransfer.attempts import EndedAttempts, again
from kvtransfer.checks import check_reservation
from kvtransfer.errors import (
    AttemptEnded,
    DecodePoolFull,
    DuplicateAttempt,
    LeaseExpired,
    SenderGone,
    SenderNotAttached,
    TicketEnded,
    UnknownTicket,
)
from kvtransfer.lease import Lease
from kvtransfer.ticket import HandoverRecord, ReceivedSequence, Reservation, SenderIdentity, Ticket
from model.block_pool import BlockPool, NoFreeBlocks
from model.kv_layout import KVLayout
from protos.errors import ServiceError

logger = logging.getLogger(__name__)

FailedListener = Callable[[str, ServiceError], None]
"""Called with (attempt id, error) when a ticket ends before it was committed, unless our own side aborted it."""


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """`quarantine_grace_s` is how long a write may still land after its sender's stream ended.

    `place_s`: a sender that was refused and has not asked again for so long has lost its place in the line.
    """

    lease_s: float = 10.0
    quarantine_grace_s: float = 2.0
    retry_after_s: float = 0.05
    place_s: float = 0.5
    timer_s: float = 0.1
    num_remembered_attempts: int = 10_000


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._layout = layout
        self._epoch = epoch
        self._options = options or ReceiverOptions()
        self._failed = failed
        self._clock = clock
        self._admission = Admission(pool, headroom=headroom, place_s=self._options.place_s, clock=clock)
        self._leases: dict[str, Lease] = {}  # by ticket id
        self._by_attempt: dict[str, Lease] = {}
        self._streams: dict[str, int] = {}  # Attach streams by sender epoch
        self._ended = EndedAttempts(self._options.num_remembered_attempts)

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that a live ticket lets a sender write."""
        # A list, here and below: the thread that serves metrics asks too, and a dict must not change under it.
        return sum(lease.num_received_blocks for lease in list(self._leases.values()) if lease.is_live)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of ended tickets that a sender may still be writing."""
        return sum(lease.num_received_blocks for lease in list(self._leases.values()) if not lease.is_live)

    @property
    def oldest_quarantine_s(self) -> float:
        """Age of the oldest quarantine; 0 if there is none."""
        now = self._clock()
        return max(
            (now - at for lease in self._leases.values() if (at := lease.quarantined_at) is not None), default=0.0
        )

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
        cached, received = self._allocate(reservation)
        lease = self._grant(reservation, cached, received)
        metrics.TICKETS.labels("granted").inc()
        return lease.ticket

    def check_not_ended(self, attempt_id: str) -> None:
        """Raises why nothing will come of this attempt any more: it was committed before, or it ended without."""
        self._ended.check(attempt_id)

    def commit(self, record: HandoverRecord) -> ReceivedSequence:
        """Takes the sequence: publishes its full blocks and passes the lease's references to the caller.

        Raises:
            UnknownTicket: also for one that was committed before. TicketEnded, LeaseExpired: too late.
            RecordMismatch: the record is not this ticket's; the ticket stays as it is.
        """
        lease = self._leases.get(record.ticket_id)
        if lease is None:
            self._ignore("commit")
            raise UnknownTicket(f"no ticket {record.ticket_id!r} is held here")
        if lease.is_live and self._clock() >= lease.expires_at:
            self._lapse(lease)
        if lease.end_error is not None:
            raise again(lease.end_error)
        mismatch = lease.mismatch(record, self._layout, self._pool)
        if mismatch is not None:
            self._ignore("record")
            raise mismatch
        lease.publish(self._pool)
        self._forget(lease, "committed")
        self._ended.add(record.attempt_id, DuplicateAttempt(f"attempt {record.attempt_id!r} was committed before"))
        num_cached_tokens = lease.ticket.num_cached_tokens
        metrics.RECEIVED_BYTES.inc(lease.num_received_blocks * self._layout.block_bytes)
        return ReceivedSequence(
            attempt_id=record.attempt_id,
            block_ids=lease.block_ids,
            num_tokens=record.num_tokens,
            num_cached_tokens=num_cached_tokens,
            num_received_tokens=record.num_tokens - num_cached_tokens,
            first_token_id=record.first_token_id,
            drafting=record.drafting,
        )

    def abort(self, attempt_id: str, reason: str) -> None:
        """Our side has given this attempt up: a ticket of it ends, a later reserve is refused. Idempotent."""
        lease = self._by_attempt.get(attempt_id)
        error = AttemptEnded(f"attempt {attempt_id!r} was aborted: {reason}")
        if lease is not None and lease.is_live:
            self._quarantine(lease, error, "aborted")
        self._ended.add(attempt_id, error)

    def release(self, ticket_id: str, sender_epoch: str, reason: str = "") -> None:
        """The sender has stopped writing for good: the blocks are free at once. Unknown tickets are ignored."""
        lease = self._leases.get(ticket_id)
        if lease is None or lease.reservation.sender.epoch != sender_epoch:
            self._ignore("release")
            return
        was_live, attempt_id = lease.is_live, lease.reservation.attempt_id
        self._free(lease, "released")
        if was_live:
            error = TicketEnded(f"the prefill worker gave attempt {attempt_id!r} up: {reason}")
            self._ended.add(attempt_id, error)
            self._tell(attempt_id, error)

    def heartbeat(self, sender: SenderIdentity, ticket_ids: Iterable[str]) -> list[str]:
        """Renews the leases of the tickets named. Returns those that have ended: stop writing, then release."""
        now = self._clock()
        self._streams.setdefault(sender.epoch, 1)
        listed = set(ticket_ids)
        ended = []
        for ticket_id in listed:
            lease = self._leases.get(ticket_id)
            if lease is None or lease.reservation.sender.epoch != sender.epoch:
                ended.append(ticket_id)
            elif lease.is_live:
                lease.renew(now)
            else:
                lease.listed_at = now
                ended.append(ticket_id)
        for lease in self._of_sender(sender.epoch):
            if not lease.is_live and lease.ticket.ticket_id not in listed and lease.is_abandoned(now):
                self._free(lease, "abandoned")
        return ended

    def sender_gone(self, sender_epoch: str) -> None:
        """An Attach stream of this sender ended. With its last one all its uncommitted tickets fail at once."""
        remaining = self._streams.get(sender_epoch, 0) - 1
        if remaining > 0:
            self._streams[sender_epoch] = remaining
            return
        self._streams.pop(sender_epoch, None)
        self._admission.leave(sender_epoch)
        free_at = self._clock() + self._options.quarantine_grace_s
        for lease in self._of_sender(sender_epoch):
            if lease.is_live:
                error = SenderGone(f"prefill worker {lease.reservation.sender.worker_id!r} is gone")
                self._quarantine(lease, error, "sender_gone", free_at)
                self._tell(lease.reservation.attempt_id, error)
            else:
                lease.free_at = free_at

    def expire(self) -> None:
        """Judges every lease by the clock: lapsed ones are quarantined, quarantines past their grace are freed."""
        now = self._clock()
        for lease in list(self._leases.values()):
            if lease.is_live and now >= lease.expires_at:
                self._lapse(lease)
            elif lease.free_at is not None and now >= lease.free_at:
                self._free(lease, "sender_gone")
        metrics.OLDEST_QUARANTINE.set(self.oldest_quarantine_s)

    async def run(self) -> None:
        """Judges leases until cancelled, whether or not anything else happens."""
        while True:
            await asyncio.sleep(self._options.timer_s)
            self.expire()

    def _check(self, reservation: Reservation) -> None:
        check_reservation(reservation, self._layout, self._pool.num_blocks)
        if reservation.sender.epoch not in self._streams:
            raise SenderNotAttached(f"prefill worker {reservation.sender.worker_id!r} has no Attach stream here")
        self._ended.check(reservation.attempt_id)
        if reservation.attempt_id in self._by_attempt:
            raise DuplicateAttempt(f"attempt {reservation.attempt_id!r} has a ticket already", field="attempt_id")

    def _allocate(self, reservation: Reservation) -> tuple[list[int], list[int]]:
        num_blocks = self._layout.num_blocks(reservation.num_tokens)
        try:
            return self._admission.allocate(reservation.sender.epoch, num_blocks, reservation.block_hashes)
        except NoFreeBlocks as full:
            metrics.TICKETS.labels("refused").inc()
            raise DecodePoolFull(
                f"{full.num_wanted} KV blocks wanted, {full.num_free} to give",
                retry_after_s=self._options.retry_after_s,
            ) from None

    def _grant(self, reservation: Reservation, cached: list[int], received: list[int]) -> Lease:
        now = self._clock()
        ticket = Ticket(
            ticket_id=secrets.token_hex(8),
            epoch=self._epoch,
            num_cached_tokens=len(cached) * self._layout.block_size,
            block_ids=tuple(received),
            generations=tuple(map(self._pool.generation, received)),
            lease_s=self._options.lease_s,
        )
        lease = Lease(ticket, reservation, (*cached, *received), now + ticket.lease_s, now)
        self._leases[ticket.ticket_id] = lease
        self._by_attempt[reservation.attempt_id] = lease
        return lease

    def _lapse(self, lease: Lease) -> None:
        error = LeaseExpired(
            f"the lease of ticket {lease.ticket.ticket_id} was not renewed in {lease.ticket.lease_s} s"
        )
        metrics.LEASES_EXPIRED.inc()
        self._quarantine(lease, error, "expired")
        self._tell(lease.reservation.attempt_id, error)

    def _quarantine(self, lease: Lease, error: ServiceError, outcome: str, free_at: float | None = None) -> None:
        lease.quarantine(self._clock(), error, free_at)
        self._ended.add(lease.reservation.attempt_id, error)
        metrics.TICKETS.labels(outcome).inc()
        reservation = lease.reservation
        logger.info("attempt %s of request %s: %s", reservation.attempt_id, reservation.request_id, error)

    def _free(self, lease: Lease, outcome: str) -> None:
        self._forget(lease, outcome if lease.is_live else None)
        self._pool.release(lease.block_ids)

    def _forget(self, lease: Lease, outcome: str | None) -> None:
        del self._leases[lease.ticket.ticket_id]
        del self._by_attempt[lease.reservation.attempt_id]
        if outcome is not None:
            metrics.TICKETS.labels(outcome).inc()

    def _of_sender(self, sender_epoch: str) -> Iterator[Lease]:
        yield from [lease for lease in self._leases.values() if lease.reservation.sender.epoch == sender_epoch]

    def _tell(self, attempt_id: str, error: ServiceError) -> None:
        if self._failed is not None:
            self._failed(attempt_id, error)

    def _ignore(self, kind: str) -> None:
        metrics.IGNORED.labels(kind).inc()
