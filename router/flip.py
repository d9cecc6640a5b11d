"""One change of a worker's role, as it went."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from router.candidate import Role


class FlipState(enum.Enum):
    """As numbered in plans.proto."""

    RUNNING = 1
    DONE = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Flip:
    """`at`: in seconds since 1970. `num_moved`: sequences of this router that were handed over for it."""

    worker: str
    before: Role
    after: Role
    at: float
    reason: str
    state: FlipState = FlipState.RUNNING
    took_s: float = 0.0  # so far, while it is running
    num_moved: int = 0
    problem: str = ""  # of one that failed

    @property
    def lost(self) -> Role:
        """What the worker is no longer to do."""
        return self.before & ~self.after
