"""The leases a receiver holds, by ticket, attempt and sender. Bookkeeping: what becomes of one `ownership` says.

Another thread may read the sums, so a dict is never iterated over as it is.
"""

from __future__ import annotations

from kvtransfer.ownership import Lease, State


class Leases:
    """No two have the same attempt."""

    def __init__(self) -> None:
        self._by_ticket: dict[str, Lease] = {}
        self._ticket_ids: dict[str, str] = {}  # by attempt id

    def num_reserved_blocks(self) -> int:
        """Blocks that a sender may write and whose attempt goes on."""
        return sum(lease.num_received_blocks for lease in self.all() if lease.ended_at is None)

    def num_quarantined_blocks(self) -> int:
        """Blocks of attempts that are over, which a sender may still be writing."""
        return sum(lease.num_received_blocks for lease in self.all() if lease.ended_at is not None)

    def num_open(self) -> int:
        """Whose attempt goes on."""
        return sum(lease.ended_at is None for lease in self.all())

    def oldest_end(self) -> float | None:
        """When the attempt ended that has waited longest for its blocks to be free."""
        return min((lease.ended_at for lease in self.all() if lease.ended_at is not None), default=None)

    def all(self) -> list[Lease]:
        return list(self._by_ticket.values())

    def of_sender(self, sender_epoch: str) -> list[Lease]:
        return [lease for lease in self.all() if lease.reservation.sender.epoch == sender_epoch]

    def of_attempt(self, attempt_id: str) -> Lease | None:
        return self.find(self._ticket_ids.get(attempt_id, ""))

    def find(self, ticket_id: str) -> Lease | None:
        return self._by_ticket.get(ticket_id)

    def put(self, lease: Lease) -> None:
        """In the place of the one with this ticket; forgets it if it is over."""
        ticket_id, attempt_id = lease.ticket.ticket_id, lease.reservation.attempt_id
        if lease.state is State.NONE:
            del self._by_ticket[ticket_id], self._ticket_ids[attempt_id]
        else:
            self._by_ticket[ticket_id], self._ticket_ids[attempt_id] = lease, ticket_id
