"""Writes that go wrong by plan: what lands at the peer, when, and what the sender is told."""

from __future__ import annotations

import numpy as np
import pytest

from kvtransfer.agent import PeerUnreachable, Region, Write, WriteState
from kvtransfer.fault_injection import FaultInjector
from kvtransfer.faults import FaultPlan
from kvtransfer.faulty_agent import FaultyAgent
from kvtransfer.geometry import CacheSpan
from kvtransfer.loopback_agent import LoopbackAgent, LoopbackNetwork
from tests.kvtransfer.cache import LAYOUT, NUM_BLOCKS, Cache


class Faulty:
    """An agent with faults that writes into `b` and `c`; each write is 100 bytes, to a place of its own."""

    def __init__(self, plan: str) -> None:
        network = LoopbackNetwork()
        self.now = 0.0
        self.here = Cache()
        self.noise = self.here.array.copy()
        self.caches = {name: Cache(fill=0) for name in "bc"}
        self.inner = LoopbackAgent(network, "a", self.here.address, self.here.num_bytes)
        span = CacheSpan(LAYOUT, self.here.address, NUM_BLOCKS)
        injector = FaultInjector(FaultPlan.parse(plan))
        self.agent = FaultyAgent(self.inner, span, injector, clock=lambda: self.now)
        for name, cache in self.caches.items():
            LoopbackAgent(network, name, cache.address, cache.num_bytes)
            self.agent.connect(name, name.encode(), -1)

    def write(self, number: int, peer_name: str = "b") -> Write:
        start = 200 * number
        there = self.caches[peer_name].address
        halves = [Region(self.here.address + at, there + at, 50) for at in (start, start + 50)]
        return self.agent.write(peer_name, halves)

    def landed(self, number: int, peer_name: str = "b") -> bool:
        """All of it, or nothing."""
        there = self.caches[peer_name].array.reshape(-1)[200 * number : 200 * number + 100]
        is_whole = np.array_equal(there, self.noise.reshape(-1)[200 * number : 200 * number + 100])
        assert is_whole or not there.any()
        return is_whole


def test_only_the_write_named_fails_and_it_does_not_land() -> None:
    faulty = Faulty("fail write 2")
    states = [faulty.write(number).poll() for number in range(3)]
    assert states == [WriteState.DONE, WriteState.FAILED, WriteState.DONE]
    assert [faulty.landed(number) for number in range(3)] == [True, False, True]


def test_a_write_that_is_dropped_says_that_it_is_done() -> None:
    faulty = Faulty("drop write 1")
    write = faulty.write(0)
    assert (write.poll(), write.num_bytes, faulty.landed(0)) == (WriteState.DONE, 100, False)


@pytest.mark.parametrize("number", [0, 3])
def test_damage_is_at_the_peer_and_only_in_the_last_region(number: int) -> None:
    faulty = Faulty("corrupt write 1")
    assert faulty.write(number).poll() is WriteState.DONE
    start = 200 * number
    there, here = faulty.caches["b"].array.reshape(-1), faulty.noise.reshape(-1)
    assert np.array_equal(there[start : start + 50], here[start : start + 50])
    assert (there[start + 50 : start + 100] != here[start + 50 : start + 100]).mean() > 0.9
    assert not there[start + 100 :].any()
    assert np.array_equal(faulty.here.array, faulty.noise)
    assert faulty.write(number).poll() is WriteState.DONE
    assert faulty.landed(number)


def test_a_stalled_peer_takes_nothing_until_its_time_is_over() -> None:
    faulty = Faulty("stall write 2 30s")
    writes = [faulty.write(number) for number in range(3)]
    other = faulty.write(0, "c")
    faulty.now = 29.9
    assert [write.poll() for write in (*writes, other)] == [
        WriteState.DONE,
        WriteState.MOVING,
        WriteState.MOVING,
        WriteState.DONE,
    ]
    assert not faulty.landed(1) and not faulty.landed(2)
    faulty.now = 30.0
    assert [write.poll() for write in writes] == [WriteState.DONE] * 3
    assert faulty.landed(1) and faulty.landed(2)


def test_what_is_stalled_for_ever_ends_with_the_connection_and_never_lands() -> None:
    faulty = Faulty("stall write 1")
    write = faulty.write(0)
    faulty.now = 1e9
    assert write.poll() is WriteState.MOVING
    faulty.agent.disconnect("b")
    assert write.poll() is WriteState.FAILED
    with pytest.raises(PeerUnreachable):
        faulty.write(1)
    faulty.agent.connect("b", b"b", -1)
    assert faulty.write(2).poll() is WriteState.DONE  # another connection, another start
    assert write.poll() is WriteState.FAILED
    assert not faulty.landed(0)


def test_a_delay_is_one_write_s_own() -> None:
    faulty = Faulty("delay write 1 20ms")
    late, next_one = faulty.write(0), faulty.write(1)
    assert (late.poll(), next_one.poll()) == (WriteState.MOVING, WriteState.DONE)
    assert not faulty.landed(0)
    faulty.now = 0.02
    assert late.poll() is WriteState.DONE
    assert faulty.landed(0)


def test_a_write_that_is_doubled_is_posted_twice_and_done_once() -> None:
    faulty = Faulty("duplicate write 1")
    write = faulty.write(0)
    states: list[WriteState] = []
    while not states or states[-1] is WriteState.MOVING:
        states.append(write.poll())
    assert states[-1] is WriteState.DONE and faulty.landed(0)
    assert faulty.inner.num_writes == 2


def test_memory_that_was_added_is_written_from_and_damaged_like_the_cache() -> None:
    """The bytes beside are taken from behind where nothing is before."""
    faulty = Faulty("corrupt write 2-3")
    more = Cache(num_blocks=1)
    faulty.agent.register(more.address, more.num_bytes)
    content = more.array.reshape(-1)
    found = faulty.caches["b"].array.reshape(-1)
    for number, (start, expected) in enumerate([(0, content[:8]), (0, content[4:12]), (8, content[4:12])]):
        there = faulty.caches["b"].address + 8 * number
        assert faulty.agent.write("b", [Region(more.address + start, there, 8)]).poll() is WriteState.DONE
        assert np.array_equal(found[8 * number : 8 * number + 8], expected)
