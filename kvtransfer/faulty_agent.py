"""A transfer agent around another one, whose writes fail, stall, come late, twice, damaged or not at all, by plan."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from kvtransfer.agent import PeerUnreachable, Pieces, Region, TransferAgent, Write, WriteState
from kvtransfer.fault_injection import FaultInjector
from kvtransfer.faults import Fault, Target
from kvtransfer.geometry import CacheSpan

_SHIFT_BYTES = 4


class FaultyAgent:
    """`span` is the cache that the inner agent has registered. Our own cache is never written to."""

    def __init__(
        self,
        inner: TransferAgent,
        span: CacheSpan,
        injector: FaultInjector,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._starts = {span.base_address}  # of what is registered
        self._injector = injector
        self._clock = clock
        self._stalled_until: dict[str, float] = {}  # by peer
        self._moving: set[_FaultyWrite] = set()

    @property
    def name(self) -> str:
        return self._inner.name

    def metadata(self) -> bytes:
        return self._inner.metadata()

    def register(self, address: int, num_bytes: int) -> None:
        self._starts.add(address)
        self._inner.register(address, num_bytes)

    def connect(self, peer_name: str, metadata: bytes, device_id: int) -> None:
        self._inner.connect(peer_name, metadata, device_id)

    def disconnect(self, peer_name: str) -> None:
        self._stalled_until.pop(peer_name, None)
        for write in list(self._moving):
            if write.peer_name == peer_name:
                write.give_up()
        self._inner.disconnect(peer_name)

    def write(self, peer_name: str, what: Sequence[Region] | Pieces) -> Write:
        """A peer that stalls takes nothing, this write and those after it, until its time is over."""
        regions = what.regions() if isinstance(what, Pieces) else what
        hits = self._injector.hits(Target.WRITE)
        now = self._clock()
        if Fault.STALL in hits:
            self._stalled_until[peer_name] = now + hits[Fault.STALL]
        lands_at = max(self._stalled_until.get(peer_name, now), now + hits.get(Fault.DELAY, 0.0))
        if Fault.CORRUPT in hits:
            regions = [*regions[:-1], self._damaged(regions[-1])]
        write: Write
        if hits.keys() & {Fault.FAIL, Fault.DROP} or lands_at > now or Fault.DUPLICATE in hits:
            write = _FaultyWrite(self, peer_name, regions, hits, lands_at)
        else:
            write = self._inner.write(peer_name, regions)
        self._injector.wrote()
        return write

    def progress(self) -> None:
        self._inner.progress()

    def close(self) -> None:
        self._inner.close()

    def _damaged(self, region: Region) -> Region:
        """The same place at the peer, filled from a few bytes beside the right ones."""
        shift = _SHIFT_BYTES if region.local_address in self._starts else -_SHIFT_BYTES
        return Region(region.local_address + shift, region.remote_address, region.num_bytes)


class _FaultyWrite:
    """Posts to the inner agent when its time has come, in a `poll`: as often as it is to land."""

    def __init__(
        self,
        agent: FaultyAgent,
        peer_name: str,
        regions: Sequence[Region],
        hits: dict[Fault, float],
        lands_at: float,
    ) -> None:
        self.peer_name = peer_name
        self._agent = agent
        self._regions = regions
        self._ends = WriteState.FAILED if Fault.FAIL in hits else WriteState.DONE
        self._num_to_post = 0 if hits.keys() & {Fault.FAIL, Fault.DROP} else 1 + (Fault.DUPLICATE in hits)
        self._lands_at = lands_at
        self._posted: Write | None = None
        self._state = WriteState.MOVING
        agent._moving.add(self)

    @property
    def num_bytes(self) -> int:
        return sum(region.num_bytes for region in self._regions)

    def poll(self) -> WriteState:
        if self._state is WriteState.MOVING and self._agent._clock() >= self._lands_at:
            self._go_on()
        return self._state

    def give_up(self) -> None:
        """What was not posted yet never will be; what was ends with the inner agent's own connection."""
        self._num_to_post, self._lands_at = 0, -math.inf
        if self._posted is None:
            self._end(WriteState.FAILED)

    def _go_on(self) -> None:
        while (state := WriteState.DONE if self._posted is None else self._posted.poll()) is not WriteState.MOVING:
            if state is WriteState.FAILED or not self._num_to_post:
                self._end(self._ends if state is WriteState.DONE else state)
                return
            self._num_to_post -= 1
            try:
                self._posted = self._agent._inner.write(self.peer_name, self._regions)
            except PeerUnreachable:
                self._end(WriteState.FAILED)
                return

    def _end(self, state: WriteState) -> None:
        self._state = state
        self._agent._moving.discard(self)
