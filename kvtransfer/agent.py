"""The seam to the transport. `NixlAgent` is the product's; `LoopbackAgent` serves tests and single-process use.

An agent registers one cache and writes byte regions of it into a peer's. It knows nothing of tickets or sequences.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Region:
    """`num_bytes` from an address in our cache to one in the peer's."""

    local_address: int
    remote_address: int
    num_bytes: int


class WriteState(enum.Enum):
    MOVING = "moving"
    DONE = "done"
    FAILED = "failed"


class Write(Protocol):
    """One posted write. Whoever posted it polls it until it is no longer MOVING, then forgets it."""

    @property
    def num_bytes(self) -> int: ...

    def poll(self) -> WriteState: ...


class PeerUnreachable(Exception):
    """The transport cannot reach this peer; what was being written may or may not have arrived."""


class TransferAgent(Protocol):
    @property
    def name(self) -> str:
        """Unique per process start, so that a restarted peer is another peer."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs to `connect`; of this agent's registered cache."""
        ...

    def connect(self, peer_name: str, metadata: bytes, device_id: int) -> None:
        """Makes a peer writable. Raises PeerUnreachable."""
        ...

    def disconnect(self, peer_name: str) -> None:
        """Forgets a peer; unknown names are ignored. Writes still moving end FAILED."""
        ...

    def write(self, peer_name: str, regions: Sequence[Region]) -> Write:
        """Starts copying. May block while it copies (over shared memory it does), with the GIL released: call it from
        a thread that has nothing else to do. Raises PeerUnreachable."""
        ...

    def close(self) -> None: ...
