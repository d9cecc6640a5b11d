"""What each side makes sure of before it acts on what the other says. Pure: values in, an error or an answer out."""

from __future__ import annotations

from kvtransfer.coding import ticket_bytes
from kvtransfer.errors import InvalidReservation, LayoutMismatch, RecordMismatch
from kvtransfer.geometry import CacheSpan
from kvtransfer.integrity import is_seal
from kvtransfer.ticket import AS_IS, HandoverRecord, Reservation, Ticket
from model.kv_layout import KVLayout


def check_reservation(
    reservation: Reservation, layout: KVLayout, num_blocks: int, codings: tuple[str, ...] = ()
) -> None:
    """For the receiver, whose cache has `num_blocks` and takes KV in these codings. Raises LayoutMismatch or
    InvalidReservation."""
    if reservation.layout_fingerprint != layout.fingerprint:
        raise LayoutMismatch(
            f"the sender's KV layout is {reservation.layout_fingerprint}, this worker's {layout.fingerprint}",
            field="layout_fingerprint",
        )
    if reservation.num_tokens < 1 or layout.num_blocks(reservation.num_tokens) > num_blocks:
        raise InvalidReservation(
            f"num_tokens is {reservation.num_tokens}; this worker holds 1 to {num_blocks * layout.block_size}",
            field="num_tokens",
        )
    num_full = reservation.num_tokens // layout.block_size
    if len(reservation.block_hashes) != num_full:
        raise InvalidReservation(
            f"{len(reservation.block_hashes)} block hashes for {num_full} full blocks", field="block_hashes"
        )
    if not reservation.attempt_id:
        raise InvalidReservation("attempt_id is empty", field="attempt_id")
    if reservation.coding not in (AS_IS, *codings):
        raise InvalidReservation(
            f"coding is {reservation.coding!r}; this worker takes {', '.join((AS_IS, *codings))}", field="coding"
        )


def misfit(
    record: HandoverRecord,
    ticket: Ticket,
    reservation: Reservation,
    layout: KVLayout,
    generations: tuple[int, ...],
) -> RecordMismatch | None:
    """For the receiver: the first thing in which a record is not its ticket's. `generations`: of the blocks, by now."""
    if not is_seal(record.mac, ticket.mac):
        return RecordMismatch("mac is not that of the ticket", field="mac")
    expected = (
        ("epoch", record.epoch, ticket.epoch),
        ("attempt_id", record.attempt_id, reservation.attempt_id),
        ("sender_epoch", record.sender_epoch, reservation.sender.epoch),
        ("layout_fingerprint", record.layout_fingerprint, layout.fingerprint),
        ("num_tokens", record.num_tokens, reservation.num_tokens),
        ("sent_tokens", record.sent_tokens, reservation.num_tokens - ticket.num_cached_tokens),
        ("checksums", len(record.checksums), 2 * len(ticket.checked)),
        ("coding", record.coding, ticket.coding),
        ("sent_bytes", record.sent_bytes, ticket_bytes(layout, ticket)),
        ("generations", record.generations, ticket.generations),
        ("generations", record.generations, generations),
    )
    for field, got, wanted in expected:
        if got != wanted:
            return RecordMismatch(f"{field} is {got!r} in the record and {wanted!r} in its ticket", field=field)
    return None


def fits(ticket: Ticket, reservation: Reservation, remote: CacheSpan, epoch: str) -> bool:
    """For the sender: a ticket that is not what was asked for would have it write where it may not."""
    num_cached_blocks, rest = divmod(ticket.num_cached_tokens, remote.layout.block_size)
    num_wanted = remote.layout.num_blocks(reservation.num_tokens) - num_cached_blocks
    return (
        ticket.epoch == epoch
        and ticket.coding == reservation.coding
        and rest == 0
        and num_wanted == len(ticket.block_ids) == len(set(ticket.block_ids)) == len(ticket.generations)
        and all(0 <= block_id < remote.num_blocks for block_id in ticket.block_ids)
        and len(ticket.checked) == len(set(ticket.checked))
        and all(0 <= index < num_wanted for index in ticket.checked)
    )
