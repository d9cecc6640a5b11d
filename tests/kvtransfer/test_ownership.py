"""The table that says who owns a ticket's blocks: complete, and the same in the code and on the page about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtransfer.errors import AttemptEnded
from kvtransfer.outgoing import MAY_BECOME
from kvtransfer.outgoing import State as OutgoingState
from kvtransfer.ownership import TRANSITIONS, Effect, Event, Lease, State
from kvtransfer.ticket import Reservation, SenderIdentity, Ticket

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "hand-over.md").read_text()
OF_A_CHECK = {Event.INTACT, Event.CORRUPT}
BY_CLOCK = {Event.LAPSE: State.LIVE, Event.GRACE_OVER: State.ORPHANED}
ONLY_OF_A_TICKET = {Event.FORGOTTEN, Event.MISFIT, Event.SENDER_GONE}


def rows(title: str) -> list[list[str]]:
    """Of the first table under this heading, without its head."""
    table = re.search(r"\n\|.*?\n\n", PAGE[PAGE.index(f"## {title}") :], re.DOTALL)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].split("\n")[3:] if line]


def lease(state: State = State.NONE, **instants: float) -> Lease:
    ticket = Ticket("t", "d1", 0, (3, 4), (1, 1), 9.0)
    reservation = Reservation("a", "r", SenderIdentity("p", "s1"), "f", 8, (b"1", b"2"))
    return Lease(ticket, reservation, (3, 4), grace_s=2.0, state=state, **instants)  # type: ignore[arg-type]


def test_every_message_has_a_meaning_in_every_state() -> None:
    for state in State:
        for event in Event:
            if event in BY_CLOCK:
                assert ((state, event) in TRANSITIONS) == (BY_CLOCK[event] is state)
            elif event in OF_A_CHECK:  # the receiver asks for the state first: it may have changed meanwhile
                assert ((state, event) in TRANSITIONS) == (state is State.CHECKING)
            elif event is Event.GRANT or state is State.NONE:
                can_be = state is State.NONE and event not in ONLY_OF_A_TICKET
                assert ((state, event) in TRANSITIONS) == can_be
            else:
                assert (state, event) in TRANSITIONS


def test_table_on_the_page_is_the_one_in_the_code() -> None:
    told = {
        (State(state), Event[event.partition(":")[0].upper()]): (
            State(after),
            tuple(Effect(effect) for effect in effects.split("; ") if effect),
        )
        for state, event, after, effects in rows("What happens in each")
    }
    assert told == TRANSITIONS


def test_drawing_shows_every_change_of_state() -> None:
    drawn = {
        (State(before), Event[event.upper()], State(after))
        for before, after, events in re.findall(r"^ +(\w+) --> (\w+): (.+)$", PAGE, re.MULTILINE)
        for event in events.split(", ")
    }
    assert drawn == {(before, event, after) for (before, event), (after, _) in TRANSITIONS.items() if before != after}


def test_page_names_every_state_of_a_ticket_and_of_an_outgoing_sequence() -> None:
    assert [row[0] for row in rows("States of a ticket")] == [f"`{state.value}`" for state in State]
    told = {
        OutgoingState(state): {OutgoingState(after) for after in afters.split(", ") if after}
        for state, afters, _ in rows("States of a sequence")
    }
    assert told == MAY_BECOME


def test_references_are_given_back_or_passed_on_exactly_when_a_ticket_is_over() -> None:
    for (before, _), (after, effects) in TRANSITIONS.items():
        ends = before is not State.NONE and after is State.NONE
        assert len({Effect.FREE, Effect.HAND_OVER} & set(effects)) == ends


def test_attempt_ends_when_its_ticket_does_and_never_again() -> None:
    goes_on = {State.LIVE, State.CHECKING}
    for (before, event), (after, effects) in TRANSITIONS.items():
        if before is not State.NONE:
            leaves = before in goes_on and after not in goes_on
            assert (Effect.END in effects or Effect.HAND_OVER in effects) == leaves
            assert (Effect.TELL in effects) == (Effect.END in effects and event is not Event.ABORT)


def test_instants_of_a_lease() -> None:
    granted = lease().after(Event.GRANT, 100.0)
    assert (granted.state, granted.due(108.9), granted.due(109.0)) == (State.LIVE, None, Event.LAPSE)
    renewed = granted.after(Event.NAMED, 105.0)
    assert (renewed.due(113.9), renewed.due(114.0)) == (None, Event.LAPSE)
    error = AttemptEnded("it lapsed")
    lapsed = renewed.after(Event.LAPSE, 114.0, error)
    assert (lapsed.state, lapsed.error, lapsed.ended_at) == (State.QUARANTINED, error, 114.0)
    assert lapsed.after(Event.ABORT, 115.0, AttemptEnded("another")).error is error
    assert lapsed.due(1e9) is None
    orphaned = lapsed.after(Event.SENDER_GONE, 120.0, AttemptEnded("another"))
    assert (orphaned.due(121.9), orphaned.due(122.0)) == (None, Event.GRACE_OVER)
    assert orphaned.after(Event.SENDER_GONE, 121.0).due(122.0) is Event.GRACE_OVER
    assert (orphaned.error, orphaned.ended_at) == (error, 114.0)


@pytest.mark.parametrize(("heard_at", "is_forgotten"), [(0.0, False), (109.0, False), (109.1, True)])
def test_only_a_heartbeat_written_a_whole_lease_later_shows_that_a_ticket_is_forgotten(
    heard_at: float, is_forgotten: bool
) -> None:
    assert lease().after(Event.GRANT, 100.0).is_forgotten_by(heard_at) is is_forgotten
