from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from model.block_pool import BlockPool, NoFreeBlocks, hash_blocks

NUM_BLOCKS = 6


def name(number: int) -> bytes:
    return b"content %d" % number


class PoolMachine(RuleBasedStateMachine):
    """Against a model in plain lists: who holds what, what is findable, in which order it is given up."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.told: set[bytes] = set()  # findable, as its changes say
        self.pool.on_change.append(self.change)
        self.holders: list[list[int]] = []  # each is one reference to each of its blocks
        self.content: dict[int, bytes] = {}  # findable blocks
        self.resting: list[int] = []  # free and findable, the next to be evicted first
        self.generations = [0] * NUM_BLOCKS

    def change(self, block_hash: bytes, is_findable: bool) -> None:
        assert (block_hash in self.told) != is_findable, "what is told is news"
        self.told ^= {block_hash}

    def references(self, block_id: int) -> int:
        return sum(holder.count(block_id) for holder in self.holders)

    def held(self) -> list[int]:
        return [block_id for block_id in range(NUM_BLOCKS) if self.references(block_id)]

    def blank(self) -> list[int]:
        return [b for b in range(NUM_BLOCKS) if not self.references(b) and b not in self.resting]

    @rule(num_wanted=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, num_wanted: int) -> None:
        order = self.blank() + self.resting
        if num_wanted > len(order):
            with pytest.raises(NoFreeBlocks) as raised:
                self.pool.allocate(num_wanted)
            assert (raised.value.num_wanted, raised.value.num_free) == (num_wanted, len(order))
            return
        taken = self.pool.allocate(num_wanted)
        assert taken == sorted(order[:num_wanted])
        for block_id in taken:
            self.generations[block_id] += 1
            self.content.pop(block_id, None)
            if block_id in self.resting:
                self.resting.remove(block_id)
        self.holders.append(taken)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.pool.acquire(holder)
        self.holders.append(list(holder))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(holder)
        for block_id in reversed(holder):
            if not self.references(block_id) and block_id in self.content and block_id not in self.resting:
                self.resting.append(block_id)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), number=st.integers(0, 4))
    def publish(self, data: st.DataObject, number: int) -> None:
        block_id = data.draw(st.sampled_from(self.held()))
        self.pool.publish(block_id, name(number))
        if block_id not in self.content and name(number) not in self.content.values():
            self.content[block_id] = name(number)

    @rule(numbers=st.lists(st.integers(0, 4), unique=True, max_size=4))
    def match_prefix(self, numbers: list[int]) -> None:
        block_of = {content: block_id for block_id, content in self.content.items()}
        expected = []
        for number in numbers:
            if name(number) not in block_of:
                break
            expected.append(block_of[name(number)])
        assert self.pool.match_prefix(name(number) for number in numbers) == expected
        self.resting = [block_id for block_id in self.resting if block_id not in expected]
        self.holders.append(expected)

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1))
    def withdraw(self, block_id: int) -> None:
        self.pool.withdraw([block_id])
        self.content.pop(block_id, None)
        if block_id in self.resting:
            self.resting.remove(block_id)

    @precondition(lambda self: self.blank())
    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.blank()))
        with pytest.raises(ValueError, match="blank"):
            self.pool.acquire([block_id])
        with pytest.raises(ValueError, match="more often"):
            self.pool.release([block_id])
        with pytest.raises(ValueError, match="held by nobody"):
            self.pool.publish(block_id, b"x")

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used == len(self.held())
        assert self.pool.num_free == NUM_BLOCKS - len(self.held())
        assert self.pool.num_cached == len(self.resting)
        assert self.told == set(self.pool.findable()) == set(self.content.values())
        assert [self.pool.generation(block_id) for block_id in range(NUM_BLOCKS)] == self.generations


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockPool(0)


def test_the_end_of_a_prefix_is_given_up_before_its_start() -> None:
    pool = BlockPool(4)
    prefix = pool.allocate(3)
    for number, block_id in enumerate(prefix):
        pool.publish(block_id, name(number))
    pool.release(prefix)
    assert pool.allocate(2) == [2, 3]  # the blank one, then the last of the prefix
    assert pool.match_prefix([name(0), name(1), name(2)]) == prefix[:2]


def test_a_second_block_with_the_same_content_stays_private() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, name(0))
    pool.publish(second, name(0))
    pool.release([second])
    assert pool.num_cached == 0
    assert pool.match_prefix([name(0)]) == [first]


def test_integrity_check_sees_a_block_in_two_states() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool._blank.append(0)
    with pytest.raises(AssertionError, match="block 0 is in 2 states"):
        pool.check_integrity()


def test_hashes_are_chained_blake2b_of_little_endian_words() -> None:
    first = hashlib.blake2b(struct.pack("<2q", 7, 2**40), digest_size=16).digest()
    second = hashlib.blake2b(first + struct.pack("<2q", 1, 2), digest_size=16).digest()
    assert hash_blocks([7, 2**40, 1, 2, 9], 2) == [first, second]


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5), st.data())
def test_hashes_can_be_continued_from_any_block(token_ids: list[int], block_size: int, data: st.DataObject) -> None:
    whole = hash_blocks(token_ids, block_size)
    assert len(whole) == len(token_ids) // block_size
    num_known = data.draw(st.integers(0, len(whole)))
    assert hash_blocks(token_ids, block_size, whole[:num_known]) == whole


@given(st.lists(st.integers(0, 1), min_size=8, max_size=8), st.lists(st.integers(0, 1), min_size=8, max_size=8))
def test_hashes_are_equal_as_far_as_everything_before_is(ours: list[int], theirs: list[int]) -> None:
    for index, (a, b) in enumerate(zip(hash_blocks(ours, 2), hash_blocks(theirs, 2), strict=True)):
        assert (a == b) == (ours[: 2 * index + 2] == theirs[: 2 * index + 2])
