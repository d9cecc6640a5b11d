"""A limit by the minute: what is left of it fills evenly. Pure: the time is passed in."""

from __future__ import annotations

from dataclasses import dataclass

_MINUTE_S = 60.0
_ROUNDING = 1e-6


@dataclass(slots=True)
class TokenBucket:
    """Holds a minute's worth at most. Below zero: more was taken than was foreseen, or at several routers at once."""

    per_minute: int
    level: float
    at: float

    @property
    def missing(self) -> float:
        return self.per_minute - self.level

    def fill(self, now: float) -> None:
        self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / _MINUTE_S)
        self.at = now

    def wait_s(self, amount: float) -> float:
        """Until so much could be taken; it is at most what the bucket holds."""
        lacking = amount - self.level
        if lacking < _ROUNDING:
            return 0.0
        return lacking * _MINUTE_S / self.per_minute if self.per_minute else _MINUTE_S

    def give(self, amount: float) -> None:
        self.level = min(self.per_minute, self.level + amount)

    def lower_to(self, missing: float) -> None:
        """At least as much is missing."""
        self.level = min(self.level, self.per_minute - missing)
