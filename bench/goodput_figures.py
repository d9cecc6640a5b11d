"""What bench.goodput reckons with: when requests come, which are in time, and the search for the highest rate at which
enough of them are. Pure: it knows no cluster.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SHARE = 0.9  # of the requests are to keep to both SLOs
SPAN = 32.0  # how far from the first rate the search goes, up and down


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds: to the first token, and per token after it on the mean of a request."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one request. One that failed has times without end. Tokens of the prompt: `num_received` by hand-over,
    `num_cached` found in prefix caches, of which there should be none."""

    ttft_s: float
    tpot_s: float
    worst_gap_s: float  # between two messages with tokens
    failure: str = ""
    num_received: int = 0
    num_cached: int = 0

    @classmethod
    def failed(cls, reason: str) -> Answer:
        return cls(math.inf, math.inf, math.inf, reason)

    @classmethod
    def of(
        cls,
        asked_at: float,
        messages: Sequence[tuple[float, int]],
        num_wanted: int,
        num_received: int = 0,
        num_cached: int = 0,
    ) -> Answer:
        """`messages`: when each came, and how many tokens it brought. An answer that is too short has failed."""
        num_tokens = sum(count for _, count in messages)
        if num_tokens != num_wanted or not messages:
            return cls.failed("SHORT")
        moments = [moment for moment, _ in messages]
        num_later = num_tokens - messages[0][1]
        tpot_s = (moments[-1] - moments[0]) / num_later if num_later else 0.0
        gaps = [later - earlier for earlier, later in pairwise(moments)]
        return cls(moments[0] - asked_at, tpot_s, max(gaps, default=0.0), "", num_received, num_cached)

    def keeps(self, slo: Slo) -> bool:
        return self.ttft_s <= slo.ttft_s and self.tpot_s <= slo.tpot_s


@dataclass(frozen=True, slots=True)
class Played:
    """What one rate did to a side. A run that was lost before its end has fewer answers than requests."""

    per_s: float
    num_requests: int
    answers: Sequence[Answer]

    def num_kept(self, slo: Slo) -> int:
        return sum(answer.keeps(slo) for answer in self.answers)

    def is_kept(self, slo: Slo) -> bool:
        return self.num_kept(slo) >= num_needed(self.num_requests)

    def ttft_s(self, share: float) -> float:
        return percentile([answer.ttft_s for answer in self.answers], share)

    def tpot_s(self, share: float) -> float:
        return percentile([answer.tpot_s for answer in self.answers], share)

    @property
    def worst_gap_s(self) -> float:
        return max((answer.worst_gap_s for answer in self.answers), default=math.nan)

    @property
    def num_failed(self) -> int:
        return sum(bool(answer.failure) for answer in self.answers)

    @property
    def share_received(self) -> float:
        """Of the answered requests: those whose prompts were handed over."""
        return sum(answer.num_received > 0 for answer in self.answers) / max(1, len(self.answers) - self.num_failed)

    @property
    def num_cached(self) -> int:
        return sum(answer.num_cached for answer in self.answers)


def joined(runs: Sequence[Played]) -> Played:
    """Runs at one rate as one."""
    answers = [answer for run in runs for answer in run.answers]
    return Played(runs[0].per_s, sum(run.num_requests for run in runs), answers)


def num_needed(num_requests: int, share: float = SHARE) -> int:
    """How many of them have to be in time. Rounded first: 0.9 of 70 is 63, not a hair more."""
    return math.ceil(round(share * num_requests, 9))


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank: within a limit just if that share of the values is. NaN if there are none."""
    return sorted(values)[max(0, num_needed(len(values), share) - 1)] if values else math.nan


def arrivals(seed: int, per_s: float, seconds: float) -> list[float]:
    """When requests come, in seconds: a Poisson process. Another rate only stretches it: the n-th request of a seed
    comes after the same waits, longer or shorter, so that rates differ by nothing else. At least one comes."""
    rng = random.Random(seed)
    moments = [rng.expovariate(1.0) / per_s]
    while (moment := moments[-1] + rng.expovariate(1.0) / per_s) < seconds:
        moments.append(moment)
    return moments


class RateSearch:
    """The highest rate that is kept: by doubling or halving until one is kept and one is not, then in the middle of the
    two on the log scale until they are `tolerance` apart."""

    def __init__(self, first_per_s: float, tolerance: float) -> None:
        self._first_per_s = first_per_s
        self._tolerance = tolerance
        self.highest = 0.0  # that was kept; 0: none was
        self._lost = math.inf

    @property
    def next_per_s(self) -> float:
        """The rate to try."""
        if self.highest and self._lost < math.inf:
            return math.sqrt(self.highest * self._lost)
        if self.highest:
            return 2 * self.highest
        return self._first_per_s if self._lost == math.inf else self._lost / 2

    @property
    def is_done(self) -> bool:
        """Also where every rate is kept, or none, as far as SPAN goes."""
        if self.highest and self._lost < math.inf:
            return self._lost / self.highest <= self._tolerance
        return self.highest >= self._first_per_s * SPAN or self._lost <= self._first_per_s / SPAN

    def tell(self, per_s: float, *, is_kept: bool) -> None:
        if is_kept:
            self.highest = max(self.highest, per_s)
        else:
            self._lost = min(self._lost, per_s)


def ratio(above: float, below: float) -> float | None:
    """None where there is none, or it would say nothing: of what has no value, no end or no size."""
    is_sound = math.isfinite(above) and math.isfinite(below) and below > 0
    return above / below if is_sound else None
