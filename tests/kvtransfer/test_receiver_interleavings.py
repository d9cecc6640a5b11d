"""Any order of what senders, routers and time may do to a receiver: no block is reused while it may be written."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvtransfer.errors import UnknownTicket
from kvtransfer.receiver import Receiver
from kvtransfer.receiver_options import ReceiverOptions
from kvtransfer.ticket import HandoverRecord, Reservation, SenderIdentity, Ticket
from model.block_pool import BlockPool
from protos.errors import ServiceError
from tests.kvtransfer.cache import LAYOUT, hashes_of
from tests.kvtransfer.committing import commit

BLOCK = LAYOUT.block_size
LEASE_S, GRACE_S = 9.0, 2.0


@dataclass(eq=False)
class Held:
    """A ticket as its sender has it. It may write until `until`: for ever, unless it has stopped."""

    ticket: Ticket
    reservation: Reservation
    until: float = float("inf")


@dataclass(eq=False)
class ModelSender:
    identity: SenderIdentity
    attached: bool = False
    held: list[Held] = field(default_factory=list)


class Interleavings(RuleBasedStateMachine):
    tickets = Bundle("tickets")
    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = BlockPool(12)
        self.failed: list[str] = []
        self.receiver = Receiver(
            self.pool,
            LAYOUT,
            "d1",
            options=ReceiverOptions(lease_s=LEASE_S, quarantine_grace_s=GRACE_S),
            failed=lambda attempt_id, error: self.failed.append(attempt_id),
            clock=lambda: self.now,
        )
        self.senders = [ModelSender(SenderIdentity(f"p{n}", f"s{n}")) for n in range(2)]
        self.num_attempts = 0
        self.committed: set[str] = set()
        self.owned: dict[int, int] = {}  # block to the number of sequences that decode from it
        self.stopped: list[Held] = []
        for number in (0, 1):
            self.attach(number)

    @rule(number=st.integers(0, 1))
    def attach(self, number: int) -> None:
        sender = self.senders[number]
        if not sender.attached:
            sender.attached = True
            self.receiver.sender_attached(sender.identity.epoch)

    @rule(number=st.integers(0, 1), then=st.sampled_from([0.0, 1.0, 3.0]))
    def lose(self, number: int, then: float) -> None:
        """The stream ends. What the sender has posted may land until the grace is over."""
        sender = self.senders[number]
        if sender.attached:
            sender.attached = False
            self.receiver.sender_gone(sender.identity.epoch)
            for held in sender.held:
                held.until = self.now + GRACE_S
            self.stopped += sender.held
            sender.held = []
        self.pass_time(then)

    @rule(
        target=tickets,
        number=st.integers(0, 1),
        again=st.sampled_from([0, 0, 0, 1, 2]),
        num_tokens=st.integers(1, 3 * BLOCK),
        prompt=st.sampled_from([0, 1000]),
        answered=st.sampled_from([True, True, False]),
    )
    def reserve(self, number: int, again: int, num_tokens: int, prompt: int, answered: bool) -> object:
        """A new attempt, or one of the last once more."""
        sender, attempt = self.senders[number], self.num_attempts - again
        self.num_attempts += again == 0
        hashes = tuple(hashes_of(num_tokens, prompt))
        asked = Reservation(f"a{attempt}", "r", sender.identity, LAYOUT.fingerprint, num_tokens, hashes)
        try:
            ticket = self.receiver.reserve(asked)
        except ServiceError:
            return multiple()
        assert sender.attached
        assert asked.attempt_id not in self.committed
        held = Held(ticket, asked)
        if not answered:  # the sender never learns of it
            return multiple()
        sender.held.append(held)
        return held

    @rule(number=st.integers(0, 1))
    def heartbeat(self, number: int) -> None:
        sender = self.senders[number]
        if sender.attached:
            self.receiver.heartbeat(sender.identity, [held.ticket.ticket_id for held in sender.held], self.now)

    @rule(held=tickets)
    def release(self, held: Held) -> None:
        for sender in self.senders:
            if held in sender.held:
                sender.held.remove(held)
                self.receiver.release(held.ticket.ticket_id, sender.identity.epoch, mac=held.ticket.mac)

    @rule(target=sequences, held=tickets)
    def commit(self, held: Held) -> object:
        asked, ticket = held.reservation, held.ticket
        record = HandoverRecord(
            ticket_id=ticket.ticket_id,
            attempt_id=asked.attempt_id,
            epoch="d1",
            sender_epoch=asked.sender.epoch,
            layout_fingerprint=LAYOUT.fingerprint,
            generations=ticket.generations,
            num_tokens=asked.num_tokens,
            first_token_id=1,
            sent_tokens=asked.num_tokens - ticket.num_cached_tokens,
            sent_bytes=len(ticket.block_ids) * LAYOUT.block_bytes,
            mac=ticket.mac,
        )
        was_committed = asked.attempt_id in self.committed
        try:
            received = commit(self.receiver, record)
        except ServiceError:
            return multiple()
        assert not was_committed, "committed twice"
        assert asked.attempt_id not in self.failed, "committed after its stream was told of a failure"
        with pytest.raises(UnknownTicket):
            commit(self.receiver, record)
        self.committed.add(asked.attempt_id)
        for sender in self.senders:
            if held in sender.held:
                sender.held.remove(held)  # everything was written before the commit
        for block_id in received.block_ids:
            self.owned[block_id] = self.owned.get(block_id, 0) + 1
        return received.block_ids

    @rule(held=tickets)
    def abort(self, held: Held) -> None:
        self.receiver.abort(held.reservation.attempt_id, "cancelled")

    @rule()
    def abort_before_it_reserves(self) -> None:
        self.receiver.abort(f"a{self.num_attempts}", "cancelled")

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 10.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.receiver.expire()

    @rule(block_ids=consumes(sequences))
    def finish(self, block_ids: tuple[int, ...]) -> None:
        self._drop(block_ids)

    def _drop(self, block_ids: tuple[int, ...]) -> None:
        self.pool.release(block_ids)
        for block_id in block_ids:
            self.owned[block_id] -= 1

    @invariant()
    def nothing_is_reused_under_a_possible_write(self) -> None:
        self.pool.check_integrity()
        writing = [held for sender in self.senders for held in sender.held]
        writing += [held for held in self.stopped if held.until > self.now]
        seen: set[int] = set()
        for held in writing:
            for block_id, generation in zip(held.ticket.block_ids, held.ticket.generations, strict=True):
                assert self.pool.generation(block_id) == generation, "allocated again under a possible write"
                assert not self.owned.get(block_id), "decoded from under a possible write"
                assert block_id not in seen, "two tickets for one block"
                seen.add(block_id)
        self.pool.acquire(seen)  # refused for blocks that were freed
        self.pool.release(list(seen))

    def teardown(self) -> None:
        for number in (0, 1):
            self.lose(number, then=GRACE_S)
        for block_id, count in list(self.owned.items()):
            for _ in range(count):
                self.pool.release([block_id])
        assert self.pool.num_used == 0, "a block was left behind"
        assert self.receiver.num_reserved_blocks == self.receiver.num_quarantined_blocks == 0
        self.pool.check_integrity()


Interleavings.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestInterleavings = Interleavings.TestCase
