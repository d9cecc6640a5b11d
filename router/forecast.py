"""The traffic to plan for: how many requests come, how long prompts and answers are, what prefix caches already hold.

Lengths are taken as log-normal, which traces of chats are close to: of two of their numbers the others follow.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from protos.errors import InvalidArgument

_STANDARD = statistics.NormalDist()
_P90 = _STANDARD.inv_cdf(0.9)
_NUM_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class Lengths:
    """`variability`: variance over squared mean; 0 where all are alike."""

    mean: float
    variability: float = 0.0

    @classmethod
    def of(cls, name: str, mean: float, p90: float | None = None) -> Lengths:
        """
        Raises:
            InvalidArgument: no lengths are like that; `name` is said.
        """
        if not mean >= 1:
            raise InvalidArgument(f"{name} is {mean:g}; it must be at least 1 token", field=name)
        if p90 is None or p90 == mean:
            return cls(mean)
        # p90 = mean * exp(1.28 s - s^2 / 2), the smaller root; it is largest where s = 1.28
        most = mean * math.exp(_P90**2 / 2)
        if not mean < p90 <= most:
            raise InvalidArgument(
                f"{name}, 90th percentile, is {p90:g}; with a mean of {mean:g} it is from {mean:g} to {most:.0f}",
                field=name,
            )
        sigma = _P90 - math.sqrt(_P90**2 - 2 * math.log(p90 / mean))
        return cls(mean, math.expm1(sigma**2))

    @classmethod
    def counted(cls, counts: Sequence[int]) -> Lengths:
        mean = statistics.fmean(counts)
        return cls(mean, statistics.pvariance(counts, mean) / mean**2)

    def quantile(self, share: float) -> float:
        if not self.variability:
            return self.mean
        sigma = math.sqrt(math.log1p(self.variability))
        return self.mean * math.exp(sigma * _STANDARD.inv_cdf(share) - sigma**2 / 2)

    def samples(self) -> tuple[float, ...]:
        """Lengths that stand for all, each for as many, with the same mean."""
        if not self.variability:
            return (self.mean,)
        at = [self.quantile((number + 0.5) / _NUM_SAMPLES) for number in range(_NUM_SAMPLES)]
        missing = self.mean * _NUM_SAMPLES - sum(at)  # of the tail that the last one stands for
        return (*at[:-1], at[-1] + missing)


@dataclass(frozen=True, slots=True)
class Forecast:
    """`cache_hit_rate`: of prompt tokens. `arrival_variability`: of the time between requests, as in `Lengths`; 1 is
    Poisson, more are bursts."""

    requests_per_s: float
    prompt: Lengths
    answer: Lengths
    cache_hit_rate: float = 0.0
    arrival_variability: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.requests_per_s < math.inf:
            raise InvalidArgument(
                f"requests_per_s is {self.requests_per_s:g}; it must be above 0", field="requests_per_s"
            )
        if not 0 <= self.cache_hit_rate < 1:
            raise InvalidArgument(
                f"cache_hit_rate is {self.cache_hit_rate:g}; it must be from 0 to below 1", field="cache_hit_rate"
            )
        if not 0 <= self.arrival_variability < math.inf:
            raise InvalidArgument(
                f"arrival_variability is {self.arrival_variability:g}; it must be 0 or more",
                field="arrival_variability",
            )

    @classmethod
    def of_requests(
        cls, arrivals_s: Sequence[float], prompts: Sequence[int], answers: Sequence[int], cache_hit_rate: float = 0.0
    ) -> Forecast:
        """Of what a trace recorded, in the order of arrival."""
        if len(arrivals_s) < 2 or arrivals_s[-1] <= arrivals_s[0]:
            raise InvalidArgument(
                f"a trace of {len(arrivals_s)} requests says nothing of their rate; there must be two at least, at "
                "different times",
                field="trace",
            )
        gaps = [later - sooner for sooner, later in itertools.pairwise(arrivals_s)]
        mean = statistics.fmean(gaps)
        return cls(
            requests_per_s=1 / mean,
            prompt=Lengths.counted(prompts),
            answer=Lengths.counted(answers),
            cache_hit_rate=cache_hit_rate,
            arrival_variability=statistics.pvariance(gaps, mean) / mean**2,
        )
