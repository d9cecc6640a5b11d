"""The hand-over on the wire: `protos.decode_pb2` messages to our values and back."""

from __future__ import annotations

from dataclasses import asdict, fields

from kvtransfer.ticket import AS_IS, HandoverRecord, Heartbeat, PeerDescription, Reservation, SenderIdentity, Ticket
from model.kv_layout import KVLayout
from protos import decode_pb2 as pb
from protos.errors import InvalidArgument


def layout_to_message(layout: KVLayout) -> pb.KVLayout:
    return pb.KVLayout(**asdict(layout))


def layout_from_message(message: pb.KVLayout) -> KVLayout:
    """Raises InvalidArgument if no cache can have this layout."""
    try:
        return KVLayout(**{field.name: getattr(message, field.name) for field in fields(KVLayout)})
    except ValueError as error:
        raise InvalidArgument(f"layout: {error}", field="layout") from None


def description_to_message(description: PeerDescription) -> pb.PeerDescription:
    return pb.PeerDescription(
        epoch=description.epoch,
        agent_name=description.agent_name,
        agent_metadata=description.agent_metadata,
        layout=layout_to_message(description.layout),
        num_blocks=description.num_blocks,
        base_address=description.base_address,
        device_id=description.device_id,
        codings=description.codings,
    )


def description_from_message(message: pb.PeerDescription) -> PeerDescription:
    return PeerDescription(
        epoch=message.epoch,
        agent_name=message.agent_name,
        agent_metadata=message.agent_metadata,
        layout=layout_from_message(message.layout),
        num_blocks=message.num_blocks,
        base_address=message.base_address,
        device_id=message.device_id,
        codings=tuple(message.codings),
    )


def reservation_to_message(reservation: Reservation) -> pb.ReserveRequest:
    return pb.ReserveRequest(
        attempt_id=reservation.attempt_id,
        request_id=reservation.request_id,
        sender_epoch=reservation.sender.epoch,
        sender_worker_id=reservation.sender.worker_id,
        layout_fingerprint=reservation.layout_fingerprint,
        num_tokens=reservation.num_tokens,
        block_hashes=reservation.block_hashes,
        coding=_coding_to_message(reservation.coding),
    )


def reservation_from_message(message: pb.ReserveRequest) -> Reservation:
    return Reservation(
        attempt_id=message.attempt_id,
        request_id=message.request_id,
        sender=SenderIdentity(message.sender_worker_id, message.sender_epoch),
        layout_fingerprint=message.layout_fingerprint,
        num_tokens=message.num_tokens,
        block_hashes=tuple(message.block_hashes),
        coding=message.coding or AS_IS,
    )


def ticket_to_message(ticket: Ticket) -> pb.Ticket:
    return pb.Ticket(
        ticket_id=ticket.ticket_id,
        epoch=ticket.epoch,
        num_cached_tokens=ticket.num_cached_tokens,
        block_ids=ticket.block_ids,
        generations=ticket.generations,
        lease_s=ticket.lease_s,
        checked=ticket.checked,
        mac=ticket.mac,
        coding=_coding_to_message(ticket.coding),
    )


def ticket_from_message(message: pb.Ticket) -> Ticket:
    return Ticket(
        ticket_id=message.ticket_id,
        epoch=message.epoch,
        num_cached_tokens=message.num_cached_tokens,
        block_ids=tuple(message.block_ids),
        generations=tuple(message.generations),
        lease_s=message.lease_s,
        checked=tuple(message.checked),
        mac=message.mac,
        coding=message.coding or AS_IS,
    )


def record_to_message(record: HandoverRecord) -> pb.HandoverRecord:
    return pb.HandoverRecord(
        ticket_id=record.ticket_id,
        attempt_id=record.attempt_id,
        epoch=record.epoch,
        sender_epoch=record.sender_epoch,
        layout_fingerprint=record.layout_fingerprint,
        generations=record.generations,
        num_tokens=record.num_tokens,
        first_token_id=record.first_token_id,
        sent_tokens=record.sent_tokens,
        sent_bytes=record.sent_bytes,
        drafting=record.drafting,
        checksums=record.checksums,
        mac=record.mac,
        coding=_coding_to_message(record.coding),
    )


def record_from_message(message: pb.HandoverRecord) -> HandoverRecord:
    return HandoverRecord(
        ticket_id=message.ticket_id,
        attempt_id=message.attempt_id,
        epoch=message.epoch,
        sender_epoch=message.sender_epoch,
        layout_fingerprint=message.layout_fingerprint,
        generations=tuple(message.generations),
        num_tokens=message.num_tokens,
        first_token_id=message.first_token_id,
        sent_tokens=message.sent_tokens,
        sent_bytes=message.sent_bytes,
        drafting=message.drafting,
        checksums=tuple(message.checksums),
        mac=message.mac,
        coding=message.coding or AS_IS,
    )


def heartbeat_to_message(sender: SenderIdentity, heartbeat: Heartbeat, number: int, heard_at: float) -> pb.Heartbeat:
    return pb.Heartbeat(
        sender_epoch=sender.epoch,
        sender_worker_id=sender.worker_id,
        ticket_ids=heartbeat.ticket_ids,
        num_written_blocks=heartbeat.num_written_blocks,
        number=number,
        heard_at=heard_at,
    )


def heartbeat_sender(message: pb.Heartbeat) -> SenderIdentity:
    return SenderIdentity(message.sender_worker_id, message.sender_epoch)


def _coding_to_message(coding: str) -> str:
    """None at all for KV as it is: that is what workers say that know of no coding."""
    return "" if coding == AS_IS else coding
