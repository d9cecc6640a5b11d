"""Who gets blocks while there are too few: nobody takes what those before them wait for. Time is a number here."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.admission import Admission
from model.block_pool import BlockPool, NoFreeBlocks

PLACE_S = 0.5
RETRY_S = (0.025, 0.075)


class Desk:
    def __init__(self, num_blocks: int = 8) -> None:
        self.now, self.headroom, self.pool = 100.0, 0, BlockPool(num_blocks)
        self.admission = Admission(self.pool, headroom=lambda: self.headroom, place_s=PLACE_S, clock=lambda: self.now)

    def ask(self, sender: str, num_blocks: int, block_hashes: tuple[bytes, ...] = ()) -> list[int]:
        """Its blocks; none if it was refused."""
        num_free = self.pool.num_free
        try:
            prefix, new = self.admission.allocate(sender, num_blocks, block_hashes)
        except NoFreeBlocks:
            assert self.pool.num_free == num_free
            return []
        assert len(prefix) + len(new) == num_blocks
        return prefix + new


def test_who_came_first_gets_the_blocks_first() -> None:
    desk = Desk()
    held = desk.pool.allocate(8)
    assert not desk.ask("large", 5)
    desk.pool.release(held[:4])
    assert not desk.ask("small", 2)
    desk.pool.release(held[4:5])
    assert not desk.ask("small", 2)
    assert len(desk.ask("large", 5)) == 5
    desk.pool.release(held[5:7])
    assert len(desk.ask("small", 2)) == 2


def test_who_leaves_room_for_those_before_need_not_wait_for_them() -> None:
    desk = Desk()
    held = desk.pool.allocate(8)
    assert not desk.ask("first", 4)
    assert not desk.ask("second", 2)
    desk.pool.release(held[:7])
    assert len(desk.ask("third", 1)) == 1
    assert not desk.ask("fourth", 1)
    assert len(desk.ask("second", 2)) == 2
    assert len(desk.ask("first", 4)) == 4


def test_a_place_is_kept_by_asking_again_and_lost_without() -> None:
    desk = Desk()
    desk.pool.allocate(4)
    assert not desk.ask("first", 5)
    for _ in range(5):
        desk.now += 0.9 * PLACE_S
        assert not desk.ask("second", 4)
        assert not desk.ask("first", 5)
    desk.now += 1.1 * PLACE_S
    assert len(desk.ask("second", 4)) == 4


def test_a_place_is_for_what_its_sender_asked_for_last() -> None:
    desk = Desk()
    held = desk.pool.allocate(8)
    assert not desk.ask("first", 8)
    assert not desk.ask("first", 2)
    desk.pool.release(held[:4])
    assert len(desk.ask("second", 2)) == 2


def test_who_got_blocks_or_left_keeps_nobody_waiting() -> None:
    desk = Desk()
    held = desk.pool.allocate(8)
    for sender, num_blocks in (("first", 4), ("second", 4), ("third", 1)):
        assert not desk.ask(sender, num_blocks)
    desk.pool.release(held[:5])
    assert len(desk.ask("first", 4)) == 4
    assert not desk.ask("third", 1)
    desk.admission.leave("second")
    desk.admission.leave("nobody")
    assert len(desk.ask("third", 1)) == 1


def test_a_prefix_that_nobody_holds_is_kept_for_who_waits_for_it() -> None:
    """It is free like any other block: whoever took it would have the one before wait for more than it asked for."""
    desk = Desk()
    hashes = (b"one", b"two", b"three")
    prefix = desk.pool.allocate(3)
    for block_id, block_hash in zip(prefix, hashes, strict=True):
        desk.pool.publish(block_id, block_hash)
    desk.pool.release(prefix)
    held = desk.pool.allocate(4)
    assert not desk.ask("first", 5, hashes)  # two new ones; of five that are free three are its prefix, held by nobody
    desk.pool.release(held[:1])
    assert not desk.ask("second", 2)
    assert desk.ask("first", 5, hashes)[:3] == prefix


def test_a_prefix_is_no_way_past_those_before() -> None:
    desk = Desk()
    (block,) = desk.pool.allocate(1)
    desk.pool.publish(block, b"one")
    desk.pool.release([block])
    held = desk.pool.allocate(4)
    assert not desk.ask("first", 5)
    assert not desk.ask("second", 1, (b"one",))
    desk.pool.release(held[:1])
    assert len(desk.ask("first", 5)) == 5


def test_a_prefix_that_others_hold_costs_nothing() -> None:
    desk = Desk()
    desk.headroom = 4
    held = desk.pool.allocate(8)
    desk.pool.publish(held[0], b"one")
    assert not desk.ask("first", 5)
    assert desk.ask("second", 1, (b"one",)) == [held[0]]


@pytest.mark.parametrize(("headroom", "num_to_give"), [(0, 4), (3, 1), (4, 0), (9, 0)])
def test_headroom_is_left_to_who_runs_here(headroom: int, num_to_give: int) -> None:
    desk = Desk()
    desk.headroom = headroom
    desk.pool.allocate(4)
    with pytest.raises(NoFreeBlocks) as full:
        desk.admission.allocate("first", num_to_give + 1, ())
    assert (full.value.num_wanted, full.value.num_free) == (num_to_give + 1, num_to_give)
    assert len(desk.ask("first", num_to_give)) == num_to_give


def test_headroom_is_nobodys_where_nobody_is() -> None:
    desk = Desk()
    desk.headroom = 3
    assert len(desk.ask("first", 8)) == 8


@settings(max_examples=60, deadline=None)
@given(
    largest=st.lists(st.integers(1, 12), min_size=2, max_size=5),
    seed=st.integers(0, 2**32),
    hold_s=st.sampled_from([0.02, 0.2, 1.0]),
)
def test_everybody_gets_its_turn(largest: list[int], seed: int, hold_s: float) -> None:
    """However many prompts the others have: once those before have had theirs, one hold and one retry are enough."""
    rng = random.Random(seed)
    desk = Desk(12)
    bound_s = len(largest) * (hold_s + RETRY_S[1])
    wanted = [rng.randint(1, most) for most in largest]
    waiting_since = [desk.now] * len(largest)
    events = [(desk.now + rng.uniform(*RETRY_S), sender) for sender in range(len(largest))]
    ends: list[tuple[float, list[int]]] = []
    for _ in range(400):
        desk.now, sender = heapq.heappop(events)
        while ends and ends[0][0] <= desk.now:
            desk.pool.release(heapq.heappop(ends)[1])
        blocks = desk.ask(str(sender), wanted[sender])
        if blocks:
            heapq.heappush(ends, (desk.now + hold_s, blocks))
            wanted[sender], waiting_since[sender] = rng.randint(1, largest[sender]), desk.now
        assert desk.now - waiting_since[sender] <= bound_s, f"{wanted[sender]} blocks of sender {sender} never came"
        heapq.heappush(events, (desk.now + (rng.uniform(*RETRY_S) if not blocks else 0.001), sender))


def test_small_prompts_without_end_do_not_starve_a_large_one() -> None:
    desk = Desk()
    ends: list[tuple[float, list[int]]] = []
    for tick in range(400):
        desk.now = 100.0 + 0.01 * tick
        while ends and ends[0][0] <= desk.now:
            desk.pool.release(ends.pop(0)[1])
        blocks = desk.ask("small", 2)
        if blocks:
            ends.append((desk.now + 0.5 + 0.03 * (tick % 5), blocks))
            ends.sort()
        if tick >= 10 and tick % 5 == 0 and desk.ask("large", 8):
            assert tick <= 10 + 2 * 65  # one small one had asked before it
            return
    pytest.fail("the large prompt was starved")
