"""How fast a queue is worked off, as observed while something waited in it. Pure: `now` is passed in."""

from __future__ import annotations

import math

_MEMORY_S = 10.0  # of waiting: what was seen so long ago counts 1/e
_ENOUGH_S = 0.5  # before this there is nothing to tell
_FORGET_S = 60.0  # after this the workers may be others


class DrainRate:
    """Tokens that went, over the time in which there was a queue; both fade."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._at = -math.inf
        self._is_waiting = False

    def observe(self, now: float, *, is_waiting: bool, num_tokens: int = 0) -> None:
        """Up to now things were as told before; `num_tokens` went just now; from now on something waits or not."""
        elapsed_s = now - self._at
        if elapsed_s > _FORGET_S and not self._is_waiting:
            self._tokens = self._seconds = 0.0
        if self._is_waiting:
            kept = math.exp(-elapsed_s / _MEMORY_S)
            self._tokens = kept * self._tokens + num_tokens
            self._seconds = kept * self._seconds + _MEMORY_S * (1 - kept)
        self._at, self._is_waiting = now, is_waiting

    def tokens_per_s(self, now: float, num_tokens: int = 0) -> float | None:
        """As if `num_tokens` more went now: that nothing went yet does not mean that nothing will. None: too early."""
        self.observe(now, is_waiting=self._is_waiting)
        return (self._tokens + num_tokens) / self._seconds if self._seconds >= _ENOUGH_S else None
