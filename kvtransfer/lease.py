"""One ticket as the receiver keeps it: its blocks, its sender, and the instants that decide when it ends. No policy.

live ---commit---> (gone: references pass to the sequence)
 |  \\--release--> (gone: blocks are free)
 | lapse, abort, sender gone
 v
quarantined: may still be written; free on release, at `free_at`, or once the sender shows that it does not write
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.errors import RecordMismatch
from kvtransfer.ticket import HandoverRecord, Reservation, Ticket
from model.block_pool import BlockPool
from model.kv_layout import KVLayout
from protos.errors import ServiceError


@dataclass(slots=True, eq=False)
class Lease:
    """Mutable, on the event loop. Holds one reference to each of `block_ids`: those held before, then the ticket's."""

    ticket: Ticket
    reservation: Reservation
    block_ids: tuple[int, ...]
    expires_at: float
    listed_at: float  # when the sender last said that it writes here
    quarantined_at: float | None = None
    free_at: float | None = None
    end_error: ServiceError | None = None

    @property
    def is_live(self) -> bool:
        return self.quarantined_at is None

    @property
    def num_received_blocks(self) -> int:
        """Blocks that the sender writes."""
        return len(self.ticket.block_ids)

    def renew(self, now: float) -> None:
        self.listed_at = now
        self.expires_at = now + self.ticket.lease_s

    def quarantine(self, now: float, error: ServiceError, free_at: float | None) -> None:
        self.quarantined_at = now
        self.end_error = error
        self.free_at = free_at

    def mismatch(self, record: HandoverRecord, layout: KVLayout, pool: BlockPool) -> RecordMismatch | None:
        """The first thing in which a record is not this ticket's."""
        ticket, reservation = self.ticket, self.reservation
        expected = (
            ("epoch", record.epoch, ticket.epoch),
            ("attempt_id", record.attempt_id, reservation.attempt_id),
            ("sender_epoch", record.sender_epoch, reservation.sender.epoch),
            ("layout_fingerprint", record.layout_fingerprint, layout.fingerprint),
            ("num_tokens", record.num_tokens, reservation.num_tokens),
            ("sent_tokens", record.sent_tokens, reservation.num_tokens - ticket.num_cached_tokens),
            ("sent_bytes", record.sent_bytes, self.num_received_blocks * layout.block_bytes),
            ("generations", record.generations, ticket.generations),
            ("generations", record.generations, tuple(map(pool.generation, ticket.block_ids))),
        )
        for field, got, wanted in expected:
            if got != wanted:
                return RecordMismatch(f"{field} is {got!r} in the record and {wanted!r} in its ticket", field=field)
        return None

    def publish(self, pool: BlockPool) -> None:
        """Makes the full blocks that were written findable."""
        hashes, num_cached = self.reservation.block_hashes, len(self.block_ids) - self.num_received_blocks
        for block_id, block_hash in zip(self.block_ids[num_cached : len(hashes)], hashes[num_cached:], strict=True):
            pool.publish(block_id, block_hash)

    def is_abandoned(self, now: float) -> bool:
        """The sender speaks but has not named this ticket for a whole lease: it never learnt of it, or forgot it.

        A sender names every ticket it may write to in every heartbeat, and drops a ticket that reached it too late.
        """
        return now - self.listed_at > self.ticket.lease_s
