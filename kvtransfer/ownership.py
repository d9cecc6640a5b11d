"""Who owns the blocks of a ticket, and what may happen to them: the state machine on the decode side.

Pure: no clock of its own (instants are arguments), no pool, no messages. `kvtransfer.receiver` turns messages and time
into events and carries out the effects. docs/hand-over.md has the same table in words; a test compares the two.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from kvtransfer.ticket import HandoverRecord, ReceivedSequence, Reservation, Ticket
from protos.errors import ServiceError


class State(enum.Enum):
    NONE = "none"  # no such ticket: never granted here, or over. Its blocks are a sequence's, or free
    LIVE = "live"  # its sender may write, and renews the lease
    CHECKING = "checking"  # all has been written, says its record; what lies in the blocks is being looked at
    QUARANTINED = "quarantined"  # nothing will come of it, but its sender may not have stopped writing
    ORPHANED = "orphaned"  # the same, and its sender is gone: what it posted may land until the grace is over


class Event(enum.Enum):
    """The values of those that end an attempt are what metrics call its outcome."""

    GRANT = "granted"  # room was found for a reservation
    NAMED = "named"  # a heartbeat of its sender names it
    FORGOTTEN = "forgotten"  # its sender speaks, but has not named it for a whole lease (`Lease.is_forgotten_by`)
    RECORD = "record"  # a record that is this ticket's
    MISFIT = "misfit"  # a record that names it and differs from it
    INTACT = "committed"  # what lies in the blocks is what was sent, or nothing is to be checked
    CORRUPT = "corrupt"  # it is not, or cannot be told
    ABORT = "aborted"  # our side has given the attempt up
    RELEASE = "released"  # its sender has stopped writing for good
    SENDER_GONE = "sender_gone"  # the last stream of its sender has ended
    LAPSE = "expired"  # the clock: the lease was not renewed in time
    GRACE_OVER = "grace_over"  # the clock: nothing of a sender that is gone can land any more


class Effect(enum.Enum):
    HOLD = "the lease holds the blocks"
    RENEW = "the lease starts anew"
    STOP = "the sender is told to stop writing"
    HAND_OVER = "publish, and pass the references to the sequence"
    FREE = "give the references back"
    END = "the attempt is over, its reason remembered"
    TELL = "the router's stream learns the reason"
    IGNORE = "count, change nothing"


S, E, X = State, Event, Effect
TRANSITIONS: dict[tuple[State, Event], tuple[State, tuple[Effect, ...]]] = {
    (S.NONE, E.GRANT): (S.LIVE, (X.HOLD,)),
    (S.NONE, E.NAMED): (S.NONE, (X.STOP,)),
    (S.NONE, E.RECORD): (S.NONE, (X.IGNORE,)),
    (S.NONE, E.ABORT): (S.NONE, (X.END,)),
    (S.NONE, E.RELEASE): (S.NONE, (X.IGNORE,)),
    (S.LIVE, E.NAMED): (S.LIVE, (X.RENEW,)),
    (S.LIVE, E.FORGOTTEN): (S.LIVE, ()),
    (S.LIVE, E.RECORD): (S.CHECKING, ()),
    (S.LIVE, E.MISFIT): (S.LIVE, (X.IGNORE,)),
    (S.LIVE, E.ABORT): (S.QUARANTINED, (X.END,)),
    (S.LIVE, E.RELEASE): (S.NONE, (X.FREE, X.END, X.TELL)),
    (S.LIVE, E.SENDER_GONE): (S.ORPHANED, (X.END, X.TELL)),
    (S.LIVE, E.LAPSE): (S.QUARANTINED, (X.END, X.TELL)),
    (S.CHECKING, E.NAMED): (S.CHECKING, (X.RENEW,)),
    (S.CHECKING, E.FORGOTTEN): (S.CHECKING, ()),
    (S.CHECKING, E.RECORD): (S.CHECKING, (X.IGNORE,)),
    (S.CHECKING, E.MISFIT): (S.CHECKING, (X.IGNORE,)),
    (S.CHECKING, E.INTACT): (S.NONE, (X.HAND_OVER,)),
    (S.CHECKING, E.CORRUPT): (S.QUARANTINED, (X.END, X.TELL)),  # its record is in doubt, and so is that it has stopped
    (S.CHECKING, E.ABORT): (S.QUARANTINED, (X.END,)),
    (S.CHECKING, E.RELEASE): (S.NONE, (X.FREE, X.END, X.TELL)),
    (S.CHECKING, E.SENDER_GONE): (S.ORPHANED, (X.END, X.TELL)),
    (S.QUARANTINED, E.NAMED): (S.QUARANTINED, (X.STOP,)),
    (S.QUARANTINED, E.FORGOTTEN): (S.NONE, (X.FREE,)),
    (S.QUARANTINED, E.RECORD): (S.QUARANTINED, (X.IGNORE,)),
    (S.QUARANTINED, E.MISFIT): (S.QUARANTINED, (X.IGNORE,)),
    (S.QUARANTINED, E.ABORT): (S.QUARANTINED, ()),
    (S.QUARANTINED, E.RELEASE): (S.NONE, (X.FREE,)),
    (S.QUARANTINED, E.SENDER_GONE): (S.ORPHANED, ()),
    (S.ORPHANED, E.NAMED): (S.ORPHANED, (X.STOP,)),
    (S.ORPHANED, E.FORGOTTEN): (S.ORPHANED, ()),  # a stream that was opened since knows nothing of older writes
    (S.ORPHANED, E.RECORD): (S.ORPHANED, (X.IGNORE,)),
    (S.ORPHANED, E.MISFIT): (S.ORPHANED, (X.IGNORE,)),
    (S.ORPHANED, E.ABORT): (S.ORPHANED, ()),
    (S.ORPHANED, E.RELEASE): (S.NONE, (X.FREE,)),
    (S.ORPHANED, E.SENDER_GONE): (S.ORPHANED, ()),  # the grace runs from the first time
    (S.ORPHANED, E.GRACE_OVER): (S.NONE, (X.FREE,)),
}


@dataclass(frozen=True, slots=True)
class Lease:
    """One ticket as it stands. While it is not NONE it has a reference to each of `block_ids`: those held here before,
    then the ticket's. Instants are on the receiver's clock, in seconds."""

    ticket: Ticket
    reservation: Reservation
    block_ids: tuple[int, ...]
    grace_s: float
    state: State = State.NONE
    named_at: float = 0.0  # granted, or last named by its sender
    expires_at: float = 0.0
    ended_at: float | None = None
    free_at: float | None = None
    error: ServiceError | None = None  # why the attempt has ended

    @property
    def num_received_blocks(self) -> int:
        """Blocks that the sender writes."""
        return len(self.ticket.block_ids)

    @property
    def filled_blocks(self) -> list[tuple[int, bytes]]:
        """Those of them that become full, with their hashes."""
        hashes, num_cached = self.reservation.block_hashes, len(self.block_ids) - self.num_received_blocks
        return list(zip(self.block_ids[num_cached : len(hashes)], hashes[num_cached:], strict=True))

    def due(self, now: float) -> Event | None:
        """What the clock has brought about."""
        if self.state is State.LIVE and now >= self.expires_at:
            return Event.LAPSE
        if self.state is State.ORPHANED and self.free_at is not None and now >= self.free_at:
            return Event.GRACE_OVER
        return None

    def is_forgotten_by(self, heard_at: float) -> bool:
        """Whether a heartbeat without this ticket shows that its sender does not write.

        `heard_at`: an instant of ours that its sender knew when it wrote the heartbeat. A sender names every ticket it
        may write to, and drops one that reached it after half a lease; but what it wrote earlier may come late.
        """
        return heard_at - self.named_at > self.ticket.lease_s

    def received(self, record: HandoverRecord) -> ReceivedSequence:
        """What its references are handed over with."""
        num_cached_tokens = self.ticket.num_cached_tokens
        return ReceivedSequence(
            attempt_id=record.attempt_id,
            block_ids=self.block_ids,
            num_tokens=record.num_tokens,
            num_cached_tokens=num_cached_tokens,
            num_received_tokens=record.num_tokens - num_cached_tokens,
            first_token_id=record.first_token_id,
            drafting=record.drafting,
        )

    def after(self, event: Event, now: float, error: ServiceError | None = None) -> Lease:
        """`error` says why, if the event ends the attempt."""
        state, effects = TRANSITIONS[self.state, event]
        ends, starts = Effect.END in effects, Effect.HOLD in effects or Effect.RENEW in effects
        is_orphaned = state is State.ORPHANED and self.state is not State.ORPHANED
        return replace(
            self,
            state=state,
            named_at=now if event in (Event.GRANT, Event.NAMED) else self.named_at,
            expires_at=now + self.ticket.lease_s if starts else self.expires_at,
            ended_at=now if ends else self.ended_at,
            free_at=now + self.grace_s if is_orphaned else self.free_at,
            error=error if ends else self.error,
        )
