"""A sender writes only under a ticket that is exactly what it asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtransfer.checks import fits
from kvtransfer.geometry import CacheSpan
from kvtransfer.ticket import Reservation, SenderIdentity, Ticket
from tests.kvtransfer.cache import LAYOUT, hashes_of

BLOCK = LAYOUT.block_size
SPAN = CacheSpan(LAYOUT, base_address=4096, num_blocks=8)
RESERVATION = Reservation(
    "a", "r", SenderIdentity("prefill-0", "s1"), LAYOUT.fingerprint, 3 * BLOCK + 1, tuple(hashes_of(3 * BLOCK + 1))
)
TICKET = Ticket("t", "d1", BLOCK, block_ids=(5, 2, 7), generations=(1, 1, 1), lease_s=1.0)


def test_ticket_for_the_blocks_that_are_not_there_fits() -> None:
    assert fits(TICKET, RESERVATION, SPAN, "d1")


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": "d0"},
        {"num_cached_tokens": BLOCK + 1},
        {"num_cached_tokens": 0},
        {"num_cached_tokens": -BLOCK},
        {"block_ids": (5, 2)},
        {"block_ids": (5, 2, 2)},
        {"block_ids": (5, 2, 8)},
        {"block_ids": (5, 2, -1)},
        {"generations": (1, 1)},
        {"coding": "int8"},
    ],
)
def test_other_tickets_do_not(change: dict[str, object]) -> None:
    assert not fits(replace(TICKET, **change), RESERVATION, SPAN, "d1")  # type: ignore[arg-type]
