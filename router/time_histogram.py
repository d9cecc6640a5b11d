"""Counts of times in buckets that grow by 2 %, so that histograms add up and a percentile of any sum is within 1 %.

A percentile is by nearest rank. The error holds from 0.1 ms to 10,000 s; what is beyond counts as the nearest of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate

ERROR = 0.01
_LEAST_S, _MOST_S = 1e-4, 1e4
_GROWTH = (1 + ERROR) / (1 - ERROR)
_PER_LOG = 1 / math.log(_GROWTH)
_OFFSET = -math.log(_LEAST_S) * _PER_LOG
_LAST = math.ceil(math.log(_MOST_S) * _PER_LOG + _OFFSET)


def bucket_of(seconds: float) -> int:
    """The first whose upper bound is not below, of 922."""
    if seconds <= _LEAST_S:
        return 0
    return min(math.ceil(math.log(seconds) * _PER_LOG + _OFFSET), _LAST)


class TimeHistogram:
    """Only buckets that have something are there."""

    __slots__ = ("_counts", "count")

    def __init__(self) -> None:
        self.count = 0
        self._counts: dict[int, int] = {}

    def add(self, bucket: int) -> None:
        """As `bucket_of` gives it, so that several histograms can have it for the price of one."""
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self.count += 1

    def merge(self, other: TimeHistogram) -> None:
        counts = self._counts
        for bucket, number in other._counts.items():
            counts[bucket] = counts.get(bucket, 0) + number
        self.count += other.count

    def percentiles(self, shares: Iterable[float]) -> list[float]:
        """All are 0 if there are none."""
        if not self.count:
            return [0.0 for _ in shares]
        buckets = sorted(self._counts)
        cumulated = list(accumulate(self._counts[bucket] for bucket in buckets))
        return [_middle(buckets[_first_that_reaches(cumulated, share * self.count)]) for share in shares]


def _first_that_reaches(cumulated: list[int], rank: float) -> int:
    return next(index for index, number in enumerate(cumulated) if number >= rank)


def _middle(bucket: int) -> float:
    """As far from its upper bound as from its lower one, relatively."""
    return float(_LEAST_S * _GROWTH**bucket * 2 / (1 + _GROWTH))
