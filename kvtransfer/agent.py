"""The seam to the transport. `NixlAgent` is the product's; `LoopbackAgent` serves tests and single-process use.

An agent registers one cache and writes byte regions of it into a peer's. It knows nothing of tickets or sequences.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Region:
    """`num_bytes` from an address in our cache to one in the peer's."""

    local_address: int
    remote_address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Grid:
    """A cache as `num_pieces` pieces of `piece_bytes`, one behind the other, counted from 0."""

    base_address: int
    piece_bytes: int
    num_pieces: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """Piece `local_indices[i]` of our cache goes to piece `remote_indices[i]` of the peer's, for each i.

    An agent that knows the grids already finds them faster than as many regions. ValueError if the grids do not fit.
    """

    local: Grid
    remote: Grid
    local_indices: Indices
    remote_indices: Indices

    def __post_init__(self) -> None:
        if self.local.piece_bytes != self.remote.piece_bytes:
            raise ValueError(f"pieces of {self.local.piece_bytes} bytes do not fit those of {self.remote.piece_bytes}")

    def __len__(self) -> int:
        return len(self.local_indices)

    @property
    def num_bytes(self) -> int:
        return len(self) * self.local.piece_bytes

    def regions(self) -> list[Region]:
        """The same as regions: one for each run over which both sides count upwards by one."""
        if not len(self):
            return []
        goes_on = (np.diff(self.local_indices) == 1) & (np.diff(self.remote_indices) == 1)
        starts = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
        lengths = np.diff(starts, append=len(self)) * self.local.piece_bytes
        local = self.local.base_address + self.local_indices[starts].astype(np.int64) * self.local.piece_bytes
        remote = self.remote.base_address + self.remote_indices[starts].astype(np.int64) * self.remote.piece_bytes
        return [Region(*row) for row in zip(local.tolist(), remote.tolist(), lengths.tolist(), strict=True)]


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

    def write(self, peer_name: str, what: Sequence[Region] | Pieces) -> Write:
        """Starts copying. May block while it copies (over shared memory it does), with the GIL released: call it from
        a thread that has nothing else to do. Raises PeerUnreachable."""
        ...

    def close(self) -> None: ...
