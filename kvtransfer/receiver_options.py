"""How long a receiver waits for what."""

from __future__ import annotations

from dataclasses import dataclass


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
