"""The seam to the transport. `NixlAgent` is the product's; `LoopbackAgent` serves tests and single-process use.

An agent registers a cache, and more memory if it is told to, and writes byte regions of them into a peer's cache. It
knows nothing of tickets or sequences.
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
    """`num_bytes` from an address in our memory to one in the peer's cache."""

    local_address: int
    remote_address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Grid:
    """`num_pieces` pieces of `piece_bytes`, counted from 0, each starting `stride_bytes` behind the one before: without
    that, where the one before ends."""

    base_address: int
    piece_bytes: int
    num_pieces: int
    stride_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.stride_bytes:
            object.__setattr__(self, "stride_bytes", self.piece_bytes)

    @property
    def has_gaps(self) -> bool:
        return self.stride_bytes > self.piece_bytes

    def address(self, index: int) -> int:
        """Of the first byte of a piece."""
        return self.base_address + index * self.stride_bytes


@dataclass(frozen=True, slots=True)
class Pieces:
    """Piece `local_indices[i]` of our memory goes to piece `remote_indices[i]` of the peer's, for each i.

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

    @classmethod
    def of_all(cls, several: Sequence[Pieces]) -> Pieces:
        """Of the same two grids, one behind the other. There must be some."""
        if len(several) == 1:
            return several[0]
        local_indices = np.concatenate([pieces.local_indices for pieces in several])
        remote_indices = np.concatenate([pieces.remote_indices for pieces in several])
        return cls(several[0].local, several[0].remote, local_indices, remote_indices)

    def regions(self) -> list[Region]:
        """The same as regions: one for each run over which both sides count upwards by one, if there are no gaps."""
        if not len(self):
            return []
        goes_on = (np.diff(self.local_indices) == 1) & (np.diff(self.remote_indices) == 1)
        if self.local.has_gaps or self.remote.has_gaps:
            goes_on[:] = False
        starts = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
        lengths = np.diff(starts, append=len(self)) * self.local.piece_bytes
        here, there = self.local_indices[starts].tolist(), self.remote_indices[starts].tolist()
        return [
            Region(self.local.address(one), self.remote.address(other), length)
            for one, other, length in zip(here, there, lengths.tolist(), strict=True)
        ]


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

    def register(self, address: int, num_bytes: int) -> None:
        """More memory to write from, on the cache's device, until the agent is closed. Peers cannot write there."""
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

    def progress(self) -> None:
        """Lets peers connect, and takes in what the hardware cannot write into our memory alone. To be called often."""
        ...

    def close(self) -> None: ...
