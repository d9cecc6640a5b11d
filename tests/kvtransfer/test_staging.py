"""Slots of the memory that packed blocks are written from: nobody keeps all of them."""

from __future__ import annotations

import pytest

from kvtransfer.staging import Staging


def taken_by(staging: Staging, peer_name: str) -> list[int]:
    """As many slots as it is given."""
    slots = []
    while staging.has_room(peer_name):
        slots.append(staging.take(peer_name))
    return slots


def test_each_peer_leaves_half_of_what_is_free() -> None:
    staging = Staging(32)
    slots = {name: taken_by(staging, name) for name in "abcde"}
    assert [len(some) for some in slots.values()] == [16, 8, 4, 2, 1]
    assert len({slot for some in slots.values() for slot in some}) == 31
    assert staging.num_free == 1 and staging.has_room("f")
    for slot in slots["a"]:
        staging.give_back(slot, "a")
    assert staging.num_free == 17
    assert len(taken_by(staging, "a")) == 9  # of 17
    assert len(taken_by(staging, "b")) == 0  # it has eight, and that many are free


def test_one_slot_is_everybodys_in_turn() -> None:
    staging = Staging(1)
    slot = staging.take("a")
    assert not staging.has_room("a") and not staging.has_room("b")
    staging.give_back(slot, "a")
    assert staging.has_room("a") and staging.has_room("b")


def test_there_has_to_be_one() -> None:
    with pytest.raises(ValueError, match="num_slots is 0"):
        Staging(0)
