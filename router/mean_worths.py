"""What each ratio has been worth lately: one look ahead tells little between two that are nearly equal. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

_LONGEST_S = 80.0
_SHARE = 0.5  # of the time for which nothing has changed


class MeanWorths:
    """An exponentially weighted mean, that remembers the less the later something has changed."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._at_s = -math.inf

    def add(self, now: float, steady_s: float, worths: Mapping[int, float]) -> Mapping[int, float]:
        """`worths` by number of prefill workers; their means, with these."""
        new = -math.expm1((self._at_s - now) / min(_LONGEST_S, _SHARE * steady_s))
        before, self._at_s = self._means, now
        self._means = {ratio: (1 - new) * before.get(ratio, worth) + new * worth for ratio, worth in worths.items()}
        return self._means
