"""How long a receiver waits for what."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.nixl_agent import UNACKNOWLEDGED_S

_ON_ITS_WAY_S = 2.0


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """`quarantine_grace_s` is how long a write may still land after its sender's stream ended.

    `place_s`: a sender that was refused and has not asked again for so long has lost its place in the line.
    """

    lease_s: float = 10.0
    quarantine_grace_s: float = 2.0
    retry_after_s: float = 0.05
    place_s: float = 0.5
    timer_s: float = 0.1
    num_remembered_attempts: int = 10_000

    @classmethod
    def of_lease(cls, lease_s: float) -> ReceiverOptions:
        """A sender posts until its lease has lapsed, though its stream may have ended; and what it posted last may
        arrive until its system drops the connection. The grace is for the longer of the two."""
        return cls(lease_s=lease_s, quarantine_grace_s=max(lease_s, UNACKNOWLEDGED_S) + _ON_ITS_WAY_S)
