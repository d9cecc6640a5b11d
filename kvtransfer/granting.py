"""What a sender is given for a reservation: blocks, as the admission allows, and a sealed ticket that names them."""

from __future__ import annotations

import secrets

from kvtransfer import metrics
from kvtransfer.admission import Admission
from kvtransfer.errors import DecodePoolFull
from kvtransfer.integrity import Verification, seal
from kvtransfer.ownership import Lease
from kvtransfer.ticket import Reservation, Ticket
from model.block_pool import BlockPool, NoFreeBlocks
from model.kv_layout import KVLayout


class Granting:
    """The key of its seals is this process's own."""

    def __init__(
        self,
        pool: BlockPool,
        layout: KVLayout,
        epoch: str,
        *,
        admission: Admission,
        verification: Verification | None,
        lease_s: float,
        grace_s: float,
        retry_after_s: float,
    ) -> None:
        self._pool = pool
        self._layout = layout
        self._epoch = epoch
        self._admission = admission
        self._verification = verification
        self._lease_s = lease_s
        self._grace_s = grace_s
        self._retry_after_s = retry_after_s
        self._key = secrets.token_bytes(32)

    def lease(self, reservation: Reservation) -> Lease:
        """Not granted yet, but its blocks are taken. Raises DecodePoolFull, and then nothing is."""
        cached, received = self._allocate(reservation)
        ticket_id, generations = secrets.token_hex(8), tuple(map(self._pool.generation, received))
        attempt_id, sender_epoch, coding = reservation.attempt_id, reservation.sender.epoch, reservation.coding
        ticket = Ticket(
            ticket_id=ticket_id,
            epoch=self._epoch,
            num_cached_tokens=len(cached) * self._layout.block_size,
            block_ids=tuple(received),
            generations=generations,
            lease_s=self._lease_s,
            checked=() if self._verification is None else self._verification.choose(len(received)),
            mac=seal(self._key, ticket_id, sender_epoch, attempt_id, received, generations, coding),
            coding=coding,
        )
        return Lease(ticket, reservation, (*cached, *received), self._grace_s)

    def _allocate(self, reservation: Reservation) -> tuple[list[int], list[int]]:
        num_blocks = self._layout.num_blocks(reservation.num_tokens)
        try:
            return self._admission.allocate(reservation.sender.epoch, num_blocks, reservation.block_hashes)
        except NoFreeBlocks as full:
            metrics.TICKETS.labels("refused").inc()
            raise DecodePoolFull(
                f"{full.num_wanted} KV blocks wanted, {full.num_free} to give", retry_after_s=self._retry_after_s
            ) from None
