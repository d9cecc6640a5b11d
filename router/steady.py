"""For how long nothing has changed: the longest past that the present is like, by what is told in numbers of it.

As in ADWIN (Bifet and Gavalda, 2007), with windows that double: as long as the mean of the newer half and that of the
older half differ by no more than chance has it, both are the present.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_FIRST_S, _LONGEST_S = 10.0, 320.0
_LEAST = 24  # of each half, or it says nothing
_SIGMAS = 3.5


def steady_s(now: float, series: Sequence[Sequence[tuple[float, float]]]) -> float:
    """`series`: each of (when, what) in the order of time. Seconds before now."""
    window_s = _FIRST_S
    while window_s < _LONGEST_S and not any(_has_changed(now, window_s, one) for one in series):
        window_s *= 2
    return window_s


def _has_changed(now: float, window_s: float, one: Sequence[tuple[float, float]]) -> bool:
    """Welch's test of the last `window_s` against as long a time before them."""
    newer = [value for at_s, value in one if at_s > now - window_s]
    older = [value for at_s, value in one if now - 2 * window_s < at_s <= now - window_s]
    if len(newer) < _LEAST or len(older) < _LEAST:
        return False
    (new_mean, new_error), (old_mean, old_error) = _mean(newer), _mean(older)
    return abs(new_mean - old_mean) > _SIGMAS * math.sqrt(new_error + old_error)


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """And the square of its standard error."""
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)
