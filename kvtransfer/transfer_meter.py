"""What is under way to other workers, and how fast that has been lately: bytes that arrived over the time it took.

The time in which nothing is under way is no part of it, so that it does not matter how much of a hand-over hides behind
computing. One thread counts, any may read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.lately import HALF_LIFE_S, rate_of


@dataclass(frozen=True, slots=True)
class Transferred:
    """Sums in which what was counted `HALF_LIFE_S` ago is worth half."""

    num_bytes: float = 0.0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Of all time, that in which nothing was under way among it."""
        return rate_of(self.num_bytes)


@dataclass(slots=True)
class _Peer:
    num_moving: int  # writes
    num_bytes: int
    counted_at: float  # until then its time is counted, or will never be


class TransferMeter:
    """Each peer's time counts by itself, while at least one write to it is under way: what a hand-over to one gets.

    The time before a write failed does not count: a peer that has stopped says nothing of the link to others.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        self._counted = (0.0, Transferred())  # when, and what; replaced as a whole

    def moving_bytes(self, peer_name: str) -> int:
        peer = self._peers.get(peer_name)
        return 0 if peer is None else peer.num_bytes

    def began(self, peer_name: str, num_bytes: int, at: float) -> None:
        peer = self._peers.setdefault(peer_name, _Peer(0, 0, at))
        peer.num_moving += 1
        peer.num_bytes += num_bytes

    def ended(self, peer_name: str, num_bytes: int, *, well: bool) -> None:
        now, peer = self._clock(), self._peers[peer_name]
        if well:
            before = self._as_of(now)
            sums = Transferred(before.num_bytes + num_bytes, before.seconds + now - peer.counted_at)
            self._counted = now, sums
        peer.counted_at = now
        peer.num_moving -= 1
        peer.num_bytes -= num_bytes
        if not peer.num_moving:
            del self._peers[peer_name]

    @property
    def transferred(self) -> Transferred:
        return self._as_of(self._clock())

    def _as_of(self, now: float) -> Transferred:
        at, sums = self._counted
        weight = 0.5 ** ((now - at) / HALF_LIFE_S)
        return Transferred(sums.num_bytes * weight, sums.seconds * weight)
