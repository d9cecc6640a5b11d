"""A transfer agent inside one process: the protocol of `kvtransfer.agent`, carried out with memmove.

For tests and for workers that share a process. Its options make writes late or make them fail, as a network would.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection, Sequence

from kvtransfer.agent import PeerUnreachable, Pieces, Region, WriteState


class LoopbackNetwork:
    """The agents that can reach each other. A closed agent is gone from it, as a dead process is."""

    def __init__(self) -> None:
        self._agents: dict[str, LoopbackAgent] = {}

    def add(self, agent: LoopbackAgent) -> None:
        if agent.name in self._agents:
            raise ValueError(f"an agent named {agent.name!r} is there already")
        self._agents[agent.name] = agent

    def remove(self, agent: LoopbackAgent) -> None:
        self._agents.pop(agent.name, None)

    def find(self, name: str) -> LoopbackAgent | None:
        return self._agents.get(name)


class LoopbackAgent:
    """`completion_delay_s` lets every write land that much later (infinity: never). Of the writes, numbered from 0,
    `failing_writes` fail without landing, and of `corrupting_writes` one bit lands wrong, of which nobody is told."""

    def __init__(
        self,
        network: LoopbackNetwork,
        name: str,
        cache_address: int,
        num_bytes: int,
        *,
        completion_delay_s: float = 0.0,
        failing_writes: Collection[int] = (),
        corrupting_writes: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._network = network
        self._name = name
        self._cache = range(cache_address, cache_address + num_bytes)
        self._readable = [self._cache]
        self._completion_delay_s = completion_delay_s
        self._failing_writes = failing_writes
        self._corrupting_writes = corrupting_writes
        self._clock = clock
        self._peers: set[str] = set()
        self._num_writes = 0
        network.add(self)

    @property
    def name(self) -> str:
        return self._name

    @property
    def num_writes(self) -> int:
        """Writes started so far, failed ones included."""
        return self._num_writes

    def metadata(self) -> bytes:
        return self._name.encode()

    def register(self, address: int, num_bytes: int) -> None:
        self._readable.append(range(address, address + num_bytes))

    def connect(self, peer_name: str, metadata: bytes, device_id: int) -> None:
        if metadata != peer_name.encode() or self._network.find(peer_name) is None:
            raise PeerUnreachable(f"there is no agent named {peer_name!r}")
        self._peers.add(peer_name)

    def disconnect(self, peer_name: str) -> None:
        self._peers.discard(peer_name)

    def write(self, peer_name: str, what: Sequence[Region] | Pieces) -> LoopbackWrite:
        peer = self.reach(peer_name)
        if peer is None:
            raise PeerUnreachable(f"{peer_name!r} is not connected")
        regions = what.regions() if isinstance(what, Pieces) else what
        for region in regions:
            _check_inside(self._readable, region.local_address, region.num_bytes)
            _check_inside([peer._cache], region.remote_address, region.num_bytes)
        fails, corrupts = self._num_writes in self._failing_writes, self._num_writes in self._corrupting_writes
        self._num_writes += 1
        return LoopbackWrite(self, peer_name, regions, fails, corrupts, self._clock, self._completion_delay_s)

    def progress(self) -> None:
        """Writes land without it."""

    def reach(self, peer_name: str) -> LoopbackAgent | None:
        """The peer, if it is connected and still there."""
        return self._network.find(peer_name) if peer_name in self._peers else None

    def close(self) -> None:
        self._peers.clear()
        self._network.remove(self)


class LoopbackWrite:
    """Copies when it completes, not when it is posted: memory that was reused meanwhile would show."""

    def __init__(
        self,
        agent: LoopbackAgent,
        peer_name: str,
        regions: Sequence[Region],
        fails: bool,
        corrupts: bool,
        clock: Callable[[], float],
        delay_s: float,
    ) -> None:
        self._agent = agent
        self._peer_name = peer_name
        self._regions = tuple(regions)
        self._fails = fails
        self._corrupts = corrupts
        self._clock = clock
        self._completes_at = clock() + delay_s
        self._state = WriteState.MOVING
        if delay_s == 0:
            self.poll()

    @property
    def num_bytes(self) -> int:
        return sum(region.num_bytes for region in self._regions)

    def poll(self) -> WriteState:
        if self._state is not WriteState.MOVING:
            return self._state
        if self._agent.reach(self._peer_name) is None:
            self._state = WriteState.FAILED
        elif self._clock() >= self._completes_at:
            self._state = WriteState.FAILED if self._fails else self._copy()
        return self._state

    def _copy(self) -> WriteState:
        for region in self._regions:
            ctypes.memmove(region.remote_address, region.local_address, region.num_bytes)
        if self._corrupts:
            last = self._regions[-1]
            ctypes.c_uint8.from_address(last.remote_address + last.num_bytes // 2).value ^= 1
        return WriteState.DONE


def _check_inside(registered: Sequence[range], address: int, num_bytes: int) -> None:
    if num_bytes < 1 or not any(one.start <= address and address + num_bytes <= one.stop for one in registered):
        raise ValueError(f"{num_bytes} bytes at {address:#x} are not inside the registered memory")
