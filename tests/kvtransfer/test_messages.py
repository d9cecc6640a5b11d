"""Every value of the hand-over survives the wire, also as bytes."""

from __future__ import annotations

import pytest

from kvtransfer import messages
from kvtransfer.ticket import AS_IS, HandoverRecord, Heartbeat, PeerDescription, Reservation, SenderIdentity, Ticket
from protos import decode_pb2
from protos.errors import InvalidArgument
from tests.kvtransfer.cache import LAYOUT

SENDER = SenderIdentity("prefill-0", "s1")


def test_layout() -> None:
    sent = messages.layout_to_message(LAYOUT).SerializeToString()
    assert messages.layout_from_message(decode_pb2.KVLayout.FromString(sent)) == LAYOUT


def test_layout_that_no_cache_can_have_is_the_callers_fault() -> None:
    with pytest.raises(InvalidArgument, match="num_layers is 0"):
        messages.layout_from_message(decode_pb2.KVLayout(dtype="float32"))
    with pytest.raises(InvalidArgument, match="dtype is ''"):
        messages.layout_from_message(decode_pb2.KVLayout())


def test_description() -> None:
    description = PeerDescription("d1", "agent", b"\x00\xff", LAYOUT, 32, 2**63 + 5, -1, ("int8", "one of next year"))
    sent = messages.description_to_message(description).SerializeToString()
    assert messages.description_from_message(decode_pb2.PeerDescription.FromString(sent)) == description


@pytest.mark.parametrize("coding", [AS_IS, "int8"])
def test_reservation(coding: str) -> None:
    reservation = Reservation("a", "r", SENDER, "f", 9, (b"one", b"\x00two"), coding)
    sent = messages.reservation_to_message(reservation).SerializeToString()
    assert messages.reservation_from_message(decode_pb2.ReserveRequest.FromString(sent)) == reservation


@pytest.mark.parametrize("coding", [AS_IS, "int8"])
def test_ticket(coding: str) -> None:
    ticket = Ticket("t", "d1", 8, (3, 4, 9), (1, 1, 7), 2.5, coding=coding)
    sent = messages.ticket_to_message(ticket).SerializeToString()
    assert messages.ticket_from_message(decode_pb2.Ticket.FromString(sent)) == ticket


@pytest.mark.parametrize("coding", [AS_IS, "fp8"])
def test_record(coding: str) -> None:
    record = HandoverRecord("t", "a", "d1", "s1", "f", (1, 2), 9, 77, 9, 4096, coding=coding)
    sent = messages.record_to_message(record).SerializeToString()
    assert messages.record_from_message(decode_pb2.HandoverRecord.FromString(sent)) == record


def test_kv_as_it_is_needs_no_word() -> None:
    """So that workers that know of no coding understand each other with those that do."""
    asked = messages.reservation_to_message(Reservation("a", "r", SENDER, "f", 9, ()))
    granted = messages.ticket_to_message(Ticket("t", "d1", 8, (), (), 2.5))
    record = messages.record_to_message(HandoverRecord("t", "a", "d1", "s1", "f", (), 9, 77, 9, 4096))
    assert (asked.coding, granted.coding, record.coding) == ("", "", "")


def test_heartbeat() -> None:
    sent = messages.heartbeat_to_message(SENDER, Heartbeat(["t1", "t2"], {"t2": 5}), 7, 12.5).SerializeToString()
    received = decode_pb2.Heartbeat.FromString(sent)
    assert messages.heartbeat_sender(received) == SENDER
    assert dict(received.num_written_blocks) == {"t2": 5}
    assert (list(received.ticket_ids), received.number, received.heard_at) == (["t1", "t2"], 7, 12.5)
