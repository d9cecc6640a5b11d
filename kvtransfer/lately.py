"""What has been lately, in memory that does not grow: a rate in which old things count less, and the last times."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

HALF_LIFE_S = 30.0  # what was counted so long ago is worth half
_KEPT = 500


def rate_of(decayed_sum: float) -> float:
    """Per second, of a sum with this half-life. What has been even for some minutes comes out as it is."""
    return decayed_sum * math.log(2) / HALF_LIFE_S


class RecentRate:
    """Counted and read on any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sum = 0.0
        self._at = clock()

    def add(self, number: float) -> None:
        with self._lock:
            self._sum = self._as_of_now() + number

    @property
    def per_s(self) -> float:
        with self._lock:
            self._sum = self._as_of_now()
            return rate_of(self._sum)

    def _as_of_now(self) -> float:
        now = self._clock()
        weight, self._at = math.exp2((self._at - now) / HALF_LIFE_S), now
        return self._sum * weight


class RecentTimes:
    """The last 500. Percentiles are by nearest rank."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_KEPT)

    def add(self, seconds: float) -> None:
        self._times.append(seconds)

    def percentile(self, share: float) -> float:
        """0 if there are none."""
        times = sorted(self._times)
        return times[max(0, math.ceil(share * len(times)) - 1)] if times else 0.0
