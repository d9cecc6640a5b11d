"""NIXL between real processes: bytes arrive, and a peer that dies or stops is told, not suffered."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvtransfer.agent import Grid, PeerUnreachable, Pieces, Region, Write, WriteState
from kvtransfer.geometry import CacheSpan, pieces
from kvtransfer.nixl_agent import NixlAgent
from tests.kvtransfer.cache import Cache
from tests.kvtransfer.nixl_peer import LAYOUT, NUM_BLOCKS, NixlPeer, digest, nixl_peers

EVERYTHING = list(range(NUM_BLOCKS))


@pytest.fixture(scope="module")
def cache() -> Cache:
    return Cache(LAYOUT, NUM_BLOCKS)


@pytest.fixture(scope="module")
def agent(cache: Cache) -> Iterator[NixlAgent]:
    agent = NixlAgent("prefill", cache.address, cache.num_bytes)
    yield agent
    agent.close()


@pytest.fixture(scope="module")
def peers() -> Iterator[list[NixlPeer]]:
    """One that stays, one to kill, and one that is that one's next start."""
    with nixl_peers("decode", "victim", "victim") as peers:
        yield peers


@pytest.fixture
def peer(peers: list[NixlPeer]) -> NixlPeer:
    return peers[0]


def connect(agent: NixlAgent, peer: NixlPeer) -> None:
    agent.connect(peer.name, peer.metadata, -1)


def pieces_of(cache: Cache, peer: NixlPeer, here: list[int], there: list[int]) -> Pieces:
    local = CacheSpan(LAYOUT, cache.address, NUM_BLOCKS)
    return pieces(local, peer.span, range(LAYOUT.num_layers), here, there)


def ended(write: Write, within_s: float = 60.0) -> WriteState:
    deadline = time.monotonic() + within_s
    while write.poll() is WriteState.MOVING and time.monotonic() < deadline:
        time.sleep(0.001)
    return write.poll()


@pytest.mark.parametrize("prepared", [True, False])
def test_scattered_blocks_arrive_bit_exact_and_nothing_is_said(
    agent: NixlAgent, cache: Cache, peer: NixlPeer, prepared: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    connect(agent, peer)
    first = list(range(100))
    assert ended(agent.write(peer.name, pieces_of(cache, peer, first, first))) is WriteState.DONE
    assert peer.digest(first) == digest(cache, first)
    rng = random.Random(3)
    here, there = rng.sample(EVERYTHING, 100), rng.sample(range(100, NUM_BLOCKS), 100)
    here[10:20], there[10:20] = sorted(here[10:20]), range(10)  # a run on one side only
    here[30:40], there[30:40] = range(200, 210), range(90, 100)  # a run on both
    here[50:54] = range(300, 304)  # and on the other only
    wanted = pieces_of(cache, peer, here, there)
    write = agent.write(peer.name, wanted if prepared else wanted.regions())
    assert ended(write) is WriteState.DONE
    assert write.num_bytes == 100 * LAYOUT.block_bytes
    assert peer.digest(there) == digest(cache, here)
    agent.disconnect(peer.name)
    assert capfd.readouterr() == ("", "")


def test_peer_killed_in_the_middle_fails_its_writes_and_only_its_own(
    agent: NixlAgent, cache: Cache, peers: list[NixlPeer], capfd: pytest.CaptureFixture[str]
) -> None:
    peer, victim, again = peers
    connect(agent, peer)
    connect(agent, victim)
    everything = pieces_of(cache, victim, EVERYTHING, EVERYTHING)
    assert ended(agent.write(victim.name, everything)) is WriteState.DONE
    killing = threading.Timer(0.03, victim.signal, [signal.SIGKILL])
    killing.start()
    states: list[WriteState] = []
    give_up_at = time.monotonic() + 60.0  # by the clock: the signal may take long to be sent and to be delivered
    while WriteState.FAILED not in states and time.monotonic() < give_up_at:
        states.append(ended(agent.write(victim.name, everything)))
    killing.join()
    assert states[-1] is WriteState.FAILED
    assert set(states[:-1]) <= {WriteState.DONE}
    assert ended(agent.write(peer.name, pieces_of(cache, peer, [1, 2], [8, 9]))) is WriteState.DONE
    assert peer.digest([8, 9]) == digest(cache, [1, 2])
    agent.disconnect(victim.name)
    with pytest.raises(PeerUnreachable, match="is not connected"):
        agent.write(victim.name, everything)
    connect(agent, again)  # by the same name
    assert ended(agent.write(again.name, pieces_of(cache, again, [5], [6]))) is WriteState.DONE
    assert again.digest([6]) == digest(cache, [5])
    agent.disconnect(again.name)
    agent.disconnect(peer.name)
    assert capfd.readouterr() == ("", "")


def test_peer_can_be_removed_and_added_again(agent: NixlAgent, cache: Cache, peer: NixlPeer) -> None:
    connect(agent, peer)
    agent.disconnect(peer.name)
    agent.disconnect(peer.name)  # unknown by now: ignored
    connect(agent, peer)
    assert ended(agent.write(peer.name, pieces_of(cache, peer, [3], [4]))) is WriteState.DONE
    assert peer.digest([4]) == digest(cache, [3])
    agent.disconnect(peer.name)


def test_stopped_peer_keeps_a_write_moving_until_it_is_given_up(
    cache: Cache, peer: NixlPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # over shared memory the write itself is the copy
    agent = NixlAgent("over-tcp", cache.address, cache.num_bytes)
    connect(agent, peer)
    assert ended(agent.write(peer.name, pieces_of(cache, peer, [1], [1]))) is WriteState.DONE
    peer.signal(signal.SIGSTOP)
    write = agent.write(peer.name, pieces_of(cache, peer, EVERYTHING, EVERYTHING))
    assert ended(write, within_s=0.2) is WriteState.MOVING
    agent.disconnect(peer.name)
    assert write.poll() is WriteState.FAILED
    peer.signal(signal.SIGCONT)
    agent.close()


def test_metadata_of_another_agent_is_refused(agent: NixlAgent, peer: NixlPeer) -> None:
    with pytest.raises(PeerUnreachable, match="that of agent 'decode', not of 'someone'"):
        agent.connect("someone", peer.metadata, -1)
    with pytest.raises(PeerUnreachable):
        agent.connect("someone", b"nonsense", -1)


def test_memory_that_the_peer_did_not_register_is_refused(agent: NixlAgent, cache: Cache, peer: NixlPeer) -> None:
    connect(agent, peer)
    beyond = peer.span.base_address + peer.span.num_bytes
    with pytest.raises(PeerUnreachable, match="could not be prepared"):
        agent.write(peer.name, [Region(cache.address, beyond, 64)])
    for local, remote in ((1, 2), (2, 1)):  # caches as long as they are, and twice as long
        here = Grid(cache.address, LAYOUT.block_bytes, local * NUM_BLOCKS)
        there = Grid(peer.span.base_address, LAYOUT.block_bytes, remote * NUM_BLOCKS)
        with pytest.raises(PeerUnreachable, match="could not be prepared"):
            agent.write(peer.name, Pieces(here, there, np.zeros(1, np.int32), np.zeros(1, np.int32)))
    agent.disconnect(peer.name)


def test_idle_agent_costs_next_to_nothing(agent: NixlAgent) -> None:
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.1
