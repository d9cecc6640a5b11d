"""The loopback agent keeps the promises of the seam, so that what is tested over it holds over NIXL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvtransfer.agent import Grid, PeerUnreachable, Pieces, Region, WriteState
from kvtransfer.loopback_agent import LoopbackAgent, LoopbackNetwork
from tests.kvtransfer.cache import Cache


class Two:
    """Two agents and their caches; the first writes into the second."""

    def __init__(self, **options: Any) -> None:
        self.network, self.here, self.there = LoopbackNetwork(), Cache(), Cache(fill=0)
        self.now = 0.0
        self.agent = LoopbackAgent(
            self.network, "a", self.here.address, self.here.num_bytes, clock=lambda: self.now, **options
        )
        self.peer = LoopbackAgent(self.network, "b", self.there.address, self.there.num_bytes)
        self.agent.connect("b", self.peer.metadata(), -1)

    def region(self, num_bytes: int = 100) -> Region:
        return Region(self.here.address + 8, self.there.address + 16, num_bytes)


def test_bytes_arrive_where_they_should_and_nowhere_else() -> None:
    two = Two()
    write = two.agent.write("b", [two.region()])
    assert (write.poll(), write.num_bytes) == (WriteState.DONE, 100)
    there, here = two.there.array.reshape(-1), two.here.array.reshape(-1)
    assert np.array_equal(there[16:116], here[8:108])
    assert not there[:16].any() and not there[116:].any()


def test_pieces_arrive_where_they_should_and_nowhere_else() -> None:
    two = Two()
    here, there = (cache.array.reshape(-1, 32) for cache in (two.here, two.there))
    ours, theirs = (Grid(cache.address, 32, cache.num_bytes // 32) for cache in (two.here, two.there))
    write = two.agent.write("b", Pieces(ours, theirs, np.array([5, 6, 2], np.int32), np.array([0, 1, 9], np.int32)))
    assert (write.poll(), write.num_bytes) == (WriteState.DONE, 96)
    assert np.array_equal(there[[0, 1, 9]], here[[5, 6, 2]])
    assert not np.delete(there, [0, 1, 9], axis=0).any()


def test_late_write_lands_when_it_completes() -> None:
    two = Two(completion_delay_s=5.0)
    write = two.agent.write("b", [two.region()])
    assert write.poll() is WriteState.MOVING
    assert not two.there.array.any()
    two.now = 5.0
    assert write.poll() is WriteState.DONE
    assert two.there.array.any()


def test_chosen_writes_fail_without_landing() -> None:
    two = Two(failing_writes={1})
    assert [two.agent.write("b", [two.region()]).poll() for _ in range(3)] == [
        WriteState.DONE,
        WriteState.FAILED,
        WriteState.DONE,
    ]


def test_disconnection_and_death_fail_what_moves() -> None:
    two = Two(completion_delay_s=5.0)
    write = two.agent.write("b", [two.region()])
    two.agent.disconnect("b")
    two.now = 10.0
    assert write.poll() is WriteState.FAILED
    two.agent.connect("b", two.peer.metadata(), -1)
    write = two.agent.write("b", [two.region()])
    two.peer.close()
    assert write.poll() is WriteState.FAILED
    with pytest.raises(PeerUnreachable):
        two.agent.write("b", [two.region()])
    with pytest.raises(PeerUnreachable):
        two.agent.connect("b", b"b", -1)
    assert not two.there.array.any()


def test_memory_outside_the_caches_is_refused() -> None:
    two = Two()
    for region in (
        Region(two.here.address - 1, two.there.address, 8),
        Region(two.here.address, two.there.address + two.there.num_bytes - 4, 8),
        Region(two.here.address, two.there.address, 0),
    ):
        with pytest.raises(ValueError, match="not inside the registered memory"):
            two.agent.write("b", [region])


def test_two_agents_of_one_name_are_refused() -> None:
    two = Two()
    with pytest.raises(ValueError, match="there already"):
        LoopbackAgent(two.network, "a", 0, 1)
