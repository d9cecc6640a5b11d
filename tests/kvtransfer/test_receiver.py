"""The receiver's promises, one by one; time is a number here."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvtransfer.errors import (
    AttemptEnded,
    DecodePoolFull,
    DuplicateAttempt,
    InvalidReservation,
    LayoutMismatch,
    LeaseExpired,
    RecordMismatch,
    SenderGone,
    SenderNotAttached,
    TicketEnded,
    UnknownTicket,
)
from kvtransfer.receiver import Receiver
from kvtransfer.receiver_options import ReceiverOptions
from kvtransfer.ticket import HandoverRecord, Reservation, SenderIdentity, Ticket
from model.block_pool import BlockPool
from protos.errors import ServiceError
from tests.kvtransfer.cache import LAYOUT, hashes_of
from tests.kvtransfer.committing import commit

BLOCK = LAYOUT.block_size
SENDER = SenderIdentity("prefill-0", "s1")
OPTIONS = ReceiverOptions(lease_s=9.0, quarantine_grace_s=2.0, num_remembered_attempts=3)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """A receiver with a pool of eight blocks, a clock and one attached sender."""

    def __init__(self, num_blocks: int = 8, headroom: int = 0) -> None:
        self.clock, self.pool = Clock(), BlockPool(num_blocks)
        self.failures: list[tuple[str, type[Exception]]] = []
        self.receiver = Receiver(
            self.pool,
            LAYOUT,
            "d1",
            options=OPTIONS,
            failed=lambda attempt_id, error: self.failures.append((attempt_id, type(error))),
            headroom=lambda: headroom,
            clock=self.clock,
        )
        self.receiver.sender_attached(SENDER.epoch)

    def reserve(self, attempt_id: str = "a", num_tokens: int = 2 * BLOCK, first: int = 0) -> Ticket:
        return self.receiver.reserve(reservation(attempt_id, num_tokens, first))

    def advance(self, seconds: float) -> None:
        self.clock.now += seconds
        self.receiver.expire()


def reservation(attempt_id: str, num_tokens: int, first: int = 0) -> Reservation:
    hashes = tuple(hashes_of(num_tokens, first))
    return Reservation(attempt_id, "r", SENDER, LAYOUT.fingerprint, num_tokens, hashes)


def record(ticket: Ticket, attempt_id: str = "a", num_tokens: int = 2 * BLOCK) -> HandoverRecord:
    return HandoverRecord(
        ticket_id=ticket.ticket_id,
        attempt_id=attempt_id,
        epoch="d1",
        sender_epoch=SENDER.epoch,
        layout_fingerprint=LAYOUT.fingerprint,
        generations=ticket.generations,
        num_tokens=num_tokens,
        first_token_id=42,
        sent_tokens=num_tokens - ticket.num_cached_tokens,
        sent_bytes=len(ticket.block_ids) * LAYOUT.block_bytes,
        mac=ticket.mac,
    )


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_committed_sequence_takes_the_blocks_and_its_prefix_is_found_again(desk: Desk) -> None:
    num_tokens = 2 * BLOCK + 1
    ticket = desk.reserve(num_tokens=num_tokens)
    assert (ticket.num_cached_tokens, len(ticket.block_ids), desk.receiver.num_reserved_blocks) == (0, 3, 3)
    received = commit(desk.receiver, record(ticket, num_tokens=num_tokens))
    assert received.block_ids == ticket.block_ids
    assert (received.num_tokens, received.num_cached_tokens, received.num_received_tokens) == (
        num_tokens,
        0,
        num_tokens,
    )
    assert received.first_token_id == 42
    assert (desk.receiver.num_reserved_blocks, desk.pool.num_used) == (0, 3)
    again = desk.reserve("b", num_tokens)
    assert (again.num_cached_tokens, len(again.block_ids)) == (2 * BLOCK, 1)
    shared = commit(desk.receiver, record(again, "b", num_tokens))
    assert shared.block_ids[:2] == received.block_ids[:2]
    assert shared.num_received_tokens == 1
    desk.pool.release(received.block_ids)
    desk.pool.release(shared.block_ids)
    assert desk.pool.num_used == 0


def test_uncommitted_blocks_are_no_prefix(desk: Desk) -> None:
    desk.reserve("a")
    assert desk.reserve("b").num_cached_tokens == 0


def test_commit_happens_once(desk: Desk) -> None:
    ticket = desk.reserve()
    commit(desk.receiver, record(ticket))
    with pytest.raises(UnknownTicket):
        commit(desk.receiver, record(ticket))
    with pytest.raises(DuplicateAttempt):
        desk.reserve()
    desk.receiver.release(ticket.ticket_id, SENDER.epoch, mac=ticket.mac)  # late: the sequence keeps its blocks
    assert desk.pool.num_used == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch", "d0"),
        ("attempt_id", "other"),
        ("sender_epoch", "s0"),
        ("layout_fingerprint", "0"),
        ("num_tokens", 3),
        ("sent_tokens", 0),
        ("sent_bytes", 1),
        ("generations", (7, 7)),
        ("generations", ()),
        ("checksums", (1, 2)),
        ("mac", b""),
    ],
)
def test_record_that_does_not_fit_is_refused_and_changes_nothing(desk: Desk, field: str, value: object) -> None:
    ticket = desk.reserve()
    with pytest.raises(RecordMismatch, match=field):
        commit(desk.receiver, replace(record(ticket), **{field: value}))  # type: ignore[arg-type]
    assert desk.receiver.num_reserved_blocks == 2
    commit(desk.receiver, record(ticket))


def test_blocks_that_were_given_out_again_void_their_ticket(desk: Desk) -> None:
    """Whatever defect it was: nothing is decoded from them, under the old generations or the new ones."""
    ticket = desk.reserve()
    desk.pool.release(ticket.block_ids)
    assert tuple(desk.pool.allocate(2)) == ticket.block_ids
    for generations in (ticket.generations, tuple(map(desk.pool.generation, ticket.block_ids))):
        with pytest.raises(RecordMismatch, match="generations"):
            commit(desk.receiver, replace(record(ticket), generations=generations))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"layout_fingerprint": "0"}, LayoutMismatch),
        ({"num_tokens": 0, "block_hashes": ()}, InvalidReservation),
        ({"num_tokens": -5}, InvalidReservation),
        ({"num_tokens": 8 * BLOCK + 1}, InvalidReservation),
        ({"block_hashes": ()}, InvalidReservation),
        ({"attempt_id": ""}, InvalidReservation),
        ({"sender": SenderIdentity("prefill-0", "unknown")}, SenderNotAttached),
    ],
)
def test_reservation_that_cannot_be_granted_takes_nothing(
    desk: Desk, change: dict[str, object], error: type[ServiceError]
) -> None:
    with pytest.raises(error):
        desk.receiver.reserve(replace(reservation("a", 2 * BLOCK), **change))  # type: ignore[arg-type]
    assert desk.pool.num_used == 0
    desk.reserve()


def test_full_pool_gives_the_matched_prefix_back(desk: Desk) -> None:
    received = commit(desk.receiver, record(desk.reserve()))
    desk.reserve("big", 6 * BLOCK, first=500)
    with pytest.raises(DecodePoolFull, match="1 KV blocks wanted, 0 to give"):
        desk.reserve("more", 2 * BLOCK + 1)
    desk.pool.release(received.block_ids)
    assert desk.pool.num_used == 6
    assert desk.reserve("more", 2 * BLOCK).num_cached_tokens == 2 * BLOCK


def test_headroom_is_kept_for_sequences_that_run_here() -> None:
    desk = Desk(headroom=3)
    alone = desk.reserve("a", 8 * BLOCK)  # nobody is here who could want to grow
    desk.receiver.release(alone.ticket_id, SENDER.epoch, mac=alone.mac)
    desk.reserve("b", 3 * BLOCK)
    with pytest.raises(DecodePoolFull, match="3 KV blocks wanted, 2 to give"):
        desk.reserve("c", 3 * BLOCK, first=500)
    desk.reserve("c", 2 * BLOCK, first=500)


def test_sender_that_was_refused_first_is_served_first_and_is_forgotten_when_it_goes() -> None:
    desk = Desk()
    other = SenderIdentity("prefill-1", "s2")
    desk.receiver.sender_attached(other.epoch)
    held = desk.pool.allocate(8)
    with pytest.raises(DecodePoolFull):
        desk.reserve("large", 5 * BLOCK)
    desk.pool.release(held[:4])
    small = replace(reservation("small", BLOCK, 500), sender=other)
    with pytest.raises(DecodePoolFull, match="1 KV blocks wanted, 0 to give"):
        desk.receiver.reserve(small)
    desk.receiver.sender_gone(SENDER.epoch)
    desk.receiver.reserve(small)


def test_lapsed_lease_is_quarantined_until_the_sender_has_stopped(desk: Desk) -> None:
    ticket = desk.reserve()
    desk.advance(8.9)
    assert desk.receiver.num_reserved_blocks == 2
    desk.advance(0.2)
    assert (desk.receiver.num_reserved_blocks, desk.receiver.num_quarantined_blocks) == (0, 2)
    assert desk.failures == [("a", LeaseExpired)]
    desk.advance(1000)
    assert desk.receiver.oldest_quarantine_s == pytest.approx(1000)
    assert desk.receiver.heartbeat(SENDER, [ticket.ticket_id]) == [ticket.ticket_id]
    with pytest.raises(LeaseExpired):
        commit(desk.receiver, record(ticket))
    assert desk.pool.num_used == 2
    desk.receiver.release(ticket.ticket_id, SENDER.epoch, mac=ticket.mac)
    assert desk.pool.num_used == 0


def test_commit_after_the_lease_is_refused_even_before_the_timer_runs(desk: Desk) -> None:
    ticket = desk.reserve()
    desk.clock.now += 9.0
    with pytest.raises(LeaseExpired):
        commit(desk.receiver, record(ticket))


def test_heartbeats_renew(desk: Desk) -> None:
    ticket = desk.reserve()
    for _ in range(5):
        desk.advance(6)
        assert desk.receiver.heartbeat(SENDER, [ticket.ticket_id]) == []
    commit(desk.receiver, record(ticket))


def test_heartbeat_names_what_it_does_not_know(desk: Desk) -> None:
    assert desk.receiver.heartbeat(SENDER, ["never"]) == ["never"]


def test_heartbeat_of_another_process_start_renews_nothing(desk: Desk) -> None:
    ticket = desk.reserve()
    restarted = SenderIdentity(SENDER.worker_id, "s2")
    desk.advance(8)
    assert desk.receiver.heartbeat(restarted, [ticket.ticket_id]) == [ticket.ticket_id]
    desk.receiver.release(ticket.ticket_id, restarted.epoch, mac=ticket.mac)
    assert desk.receiver.num_reserved_blocks == 2
    desk.advance(1)
    assert desk.receiver.num_reserved_blocks == 0


def test_ticket_the_sender_never_learnt_of_comes_back(desk: Desk) -> None:
    desk.reserve()  # the answer is lost
    for _ in range(4):
        desk.receiver.heartbeat(SENDER, [], desk.clock.now)
        desk.advance(3)
    assert desk.receiver.num_quarantined_blocks == 2
    desk.receiver.heartbeat(SENDER, [], desk.clock.now)
    assert desk.pool.num_used == 0


def test_heartbeat_that_was_long_under_way_does_not_show_that_a_ticket_is_forgotten(desk: Desk) -> None:
    """It may have been written before the ticket reached the sender, who is writing by now."""
    ticket, granted_at = desk.reserve(), desk.clock.now
    desk.advance(10)
    desk.receiver.heartbeat(SENDER, [])
    desk.receiver.heartbeat(SENDER, [], granted_at + 8.9)
    assert desk.receiver.num_quarantined_blocks == 2
    desk.receiver.heartbeat(SENDER, [ticket.ticket_id], granted_at + 9.1)
    desk.advance(8.9)
    desk.receiver.heartbeat(SENDER, [], desk.clock.now)
    assert desk.receiver.num_quarantined_blocks == 2


def test_new_stream_of_a_sender_does_not_cut_the_grace_of_its_old_one_short(desk: Desk) -> None:
    desk.reserve()
    desk.advance(10)
    desk.receiver.sender_gone(SENDER.epoch)
    desk.advance(1.5)
    desk.receiver.sender_attached(SENDER.epoch)
    desk.receiver.heartbeat(SENDER, [], desk.clock.now)  # the new stream knows nothing of what was written before
    assert desk.receiver.num_quarantined_blocks == 2
    desk.receiver.sender_gone(SENDER.epoch)
    desk.advance(0.6)
    assert desk.pool.num_used == 0


def test_aborted_attempt_is_quarantined_and_refused_from_then_on(desk: Desk) -> None:
    ticket = desk.reserve()
    desk.receiver.abort("a", "the client left")
    desk.receiver.abort("a", "twice")
    assert (desk.receiver.num_quarantined_blocks, desk.failures) == (2, [])
    with pytest.raises(AttemptEnded, match="the client left"):
        commit(desk.receiver, record(ticket))
    with pytest.raises(AttemptEnded, match="the client left"):
        desk.reserve()
    assert desk.receiver.heartbeat(SENDER, [ticket.ticket_id]) == [ticket.ticket_id]
    desk.receiver.release(ticket.ticket_id, SENDER.epoch, mac=ticket.mac)
    assert desk.pool.num_used == 0


def test_attempt_aborted_before_it_reserves_is_refused(desk: Desk) -> None:
    desk.receiver.abort("a", "the client left")
    with pytest.raises(AttemptEnded):
        desk.reserve()
    assert desk.pool.num_used == 0


def test_memory_of_ended_attempts_is_bounded(desk: Desk) -> None:
    for number in range(5):
        desk.receiver.abort(f"a{number}", "cancelled")
    desk.reserve("a1", BLOCK)  # forgotten
    with pytest.raises(AttemptEnded):
        desk.reserve("a2", BLOCK)


def test_second_reservation_of_an_attempt_is_a_duplicate(desk: Desk) -> None:
    desk.reserve()
    with pytest.raises(DuplicateAttempt):
        desk.reserve()
    assert desk.pool.num_used == 2


def test_release_before_commit_frees_at_once_and_tells(desk: Desk) -> None:
    ticket = desk.reserve()
    desk.receiver.release(ticket.ticket_id, SENDER.epoch, "one token was enough", mac=ticket.mac)
    desk.receiver.release(ticket.ticket_id, SENDER.epoch, mac=ticket.mac)
    assert desk.pool.num_used == 0
    assert desk.failures == [("a", TicketEnded)]
    with pytest.raises(TicketEnded, match="one token was enough"):
        desk.reserve()


def test_sender_gone_fails_its_tickets_and_frees_after_the_grace(desk: Desk) -> None:
    ticket = desk.reserve()
    desk.reserve("b", first=500)
    desk.receiver.abort("b", "the client left")
    desk.receiver.sender_gone(SENDER.epoch)
    assert desk.failures == [("a", SenderGone)]
    desk.advance(1.9)
    assert desk.receiver.num_quarantined_blocks == 4
    with pytest.raises(SenderGone):
        commit(desk.receiver, record(ticket))
    with pytest.raises(SenderNotAttached):
        desk.reserve("c")
    desk.advance(0.2)
    assert desk.pool.num_used == 0


def test_sender_is_gone_with_its_last_stream(desk: Desk) -> None:
    desk.receiver.sender_attached(SENDER.epoch)
    ticket = desk.reserve()
    desk.receiver.sender_gone(SENDER.epoch)  # the old stream's end is noticed late
    commit(desk.receiver, record(ticket))
    desk.receiver.sender_gone(SENDER.epoch)
    desk.receiver.sender_gone("never attached")
    assert desk.failures == []


def test_grace_may_be_over_when_the_next_message_of_its_sender_comes(desk: Desk) -> None:
    """Before the timer has run."""
    desk.reserve()
    desk.receiver.sender_gone(SENDER.epoch)
    desk.clock.now += 2.1
    desk.receiver.sender_attached(SENDER.epoch)
    desk.receiver.heartbeat(SENDER, [], desk.clock.now)
    assert desk.pool.num_used == 0
    desk.reserve("b")
    desk.receiver.sender_gone(SENDER.epoch)
    desk.clock.now += 2.1
    desk.receiver.sender_gone(SENDER.epoch)
    assert desk.pool.num_used == 0


async def test_timer_judges_without_any_message() -> None:
    pool = BlockPool(4)
    failures: dict[str, Exception] = {}
    options = ReceiverOptions(lease_s=0.02, timer_s=0.005)
    receiver = Receiver(pool, LAYOUT, "d1", options=options, failed=failures.__setitem__)
    receiver.sender_attached(SENDER.epoch)
    receiver.reserve(reservation("a", BLOCK))
    timer = asyncio.create_task(receiver.run())
    async with asyncio.timeout(2):
        while "a" not in failures:
            await asyncio.sleep(0.005)
    timer.cancel()
    await asyncio.wait([timer])
    assert isinstance(failures["a"], LeaseExpired)


@pytest.mark.parametrize(("lease_s", "grace_s"), [(2.0, 7.0), (5.0, 7.0), (10.0, 12.0)])
def test_quarantine_outlasts_the_lease_and_what_the_system_may_still_bring(lease_s: float, grace_s: float) -> None:
    options = ReceiverOptions.of_lease(lease_s)
    assert (options.lease_s, options.quarantine_grace_s) == (lease_s, grace_s)
