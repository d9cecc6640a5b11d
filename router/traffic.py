"""How requests have fared lately: rates, percentiles and attainment over a window of up to an hour.

Memory is bounded: time is cut into slices of 1, 10 and 60 s, of each of which the last sixty whole ones are kept, and
the one that has begun. A window is made of the shortest that reach back far enough. What an answer took is counted in
the slice in which it ended. Event loop only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router import metrics
from router.config import SloPolicy
from router.observation import Answered, Arrival
from router.slo_classes import DEFAULT
from router.time_histogram import TimeHistogram, bucket_of

LEAST_WINDOW_S, MOST_WINDOW_S = 10.0, 3600.0
_NUM_SLICES = 60
_SLICE_S = (1.0, 10.0, 60.0)
_SHARES = (0.5, 0.9, 0.99)
_MET = ("no", "yes")  # in the order of False and True


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of times, in seconds; within 1 %. All are 0 if there are none."""

    count: int
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, times: TimeHistogram) -> Percentiles:
        return cls(times.count, *times.percentiles(_SHARES))


@dataclass(frozen=True, slots=True)
class TrafficSlice:
    """A whole one. `ended_ago_s`: since its end."""

    ended_ago_s: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_p90_s: float
    tpot_p90_s: float
    refused_per_s: float


@dataclass(frozen=True, slots=True)
class ClassTraffic:
    """Answers of an SLO class. `attainment`: the share of them that met its SLOs, 1 if there are none; `share` is that
    which is to."""

    slo_class: str
    num_answers: int
    attainment: float
    share: float


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """`window_s`: what it covers, which is at least what was asked for unless the router is younger. Tokens are those
    of answers that ended. `attainment`: the share of these that met both SLOs of their class, 1 if there are none."""

    window_s: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    cached_share: float
    attainment: float
    num_failed: int
    num_refused: int
    slices: tuple[TrafficSlice, ...]  # oldest first
    classes: tuple[ClassTraffic, ...] = ()  # the default one first; none where it is the only one


@dataclass(slots=True)
class _Counts:
    num_requests: int = 0
    num_answers: int = 0
    num_within: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_failed: int = 0
    num_refused: int = 0
    ttft_s: TimeHistogram = field(default_factory=TimeHistogram)
    tpot_s: TimeHistogram = field(default_factory=TimeHistogram)
    by_class: dict[str, list[int]] = field(default_factory=dict)  # answers, and those that met their SLOs
    p90s_s: tuple[float, float] | None = None  # of a slice that is whole: once it was asked for

    def whole_p90s_s(self) -> tuple[float, float]:
        """Of the time to the first token, and per token after it."""
        if self.p90s_s is None:
            self.p90s_s = self.ttft_s.percentiles([0.9])[0], self.tpot_s.percentiles([0.9])[0]
        return self.p90s_s

    def answered_in(self, slo_class: str, num_answers: int, num_within: int) -> None:
        counts = self.by_class.setdefault(slo_class, [0, 0])
        counts[0] += num_answers
        counts[1] += num_within

    def merge(self, other: _Counts) -> None:
        self.num_requests += other.num_requests
        self.num_answers += other.num_answers
        self.num_within += other.num_within
        self.num_prompt_tokens += other.num_prompt_tokens
        self.num_cached_tokens += other.num_cached_tokens
        self.num_output_tokens += other.num_output_tokens
        self.num_failed += other.num_failed
        self.num_refused += other.num_refused
        self.ttft_s.merge(other.ttft_s)
        self.tpot_s.merge(other.tpot_s)
        for slo_class, counts in other.by_class.items():
            self.answered_in(slo_class, *counts)


class _Slices:
    """Of one length, numbered from the start on. Only those in which something happened are there."""

    def __init__(self, slice_s: float) -> None:
        self.slice_s = slice_s
        self._counts: deque[tuple[int, _Counts]] = deque(maxlen=_NUM_SLICES + 1)

    def at(self, age_s: float) -> _Counts:
        """The one that the router is in when it is so old, which never gets less."""
        number = int(age_s / self.slice_s)
        if not self._counts or self._counts[-1][0] < number:
            self._counts.append((number, _Counts()))
        return self._counts[-1][1]

    def since(self, number: int) -> dict[int, _Counts]:
        return {each: counts for each, counts in self._counts if each >= number}


class Traffic:
    """Implements `router.history.Observer`."""

    def __init__(
        self,
        slo: SloPolicy,
        clock: Callable[[], float] = time.monotonic,
        classes: Mapping[str, SloPolicy] | None = None,
    ) -> None:
        """`slo` is that of the default class, `classes` has those of the others by name."""
        self._slos = {DEFAULT: slo, **(classes or {})}
        self._within = {name: [metrics.SLO_ANSWERS.labels(name, met) for met in _MET] for name in self._slos}
        self._clock = clock
        self._started_at = clock()
        self._scales = tuple(map(_Slices, _SLICE_S))

    def arrived(self, arrival: Arrival) -> None:
        for counts in self._now():
            counts.num_requests += 1

    def answered(self, answered: Answered) -> None:
        slo_class = answered.slo_class if answered.slo_class in self._slos else DEFAULT
        slo, tpot_s, has_several = self._slos[slo_class], answered.tpot_s, len(self._slos) > 1
        is_within = answered.ttft_s <= slo.ttft_s and (tpot_s is None or tpot_s <= slo.tpot_s)
        self._within[slo_class][is_within].inc()
        ttft_bucket, tpot_bucket = bucket_of(answered.ttft_s), None if tpot_s is None else bucket_of(tpot_s)
        for counts in self._now():
            counts.num_answers += 1
            counts.num_within += is_within
            if has_several:
                counts.answered_in(slo_class, 1, is_within)
            counts.num_prompt_tokens += answered.num_prompt_tokens
            counts.num_cached_tokens += answered.num_cached_tokens
            counts.num_output_tokens += answered.num_output_tokens
            counts.ttft_s.add(ttft_bucket)
            if tpot_bucket is not None:
                counts.tpot_s.add(tpot_bucket)

    def failed(self) -> None:
        for counts in self._now():
            counts.num_failed += 1

    def refused(self, *, had_arrived: bool, slo_class: str = "") -> None:
        for counts in self._now():
            counts.num_refused += 1
            counts.num_requests += not had_arrived

    def report(self, window_s: float) -> TrafficReport:
        """From 10 s to an hour back."""
        age_s = self._clock() - self._started_at
        scale = next(each for each in self._scales if window_s <= each.slice_s * _NUM_SLICES)
        current = int(age_s / scale.slice_s)
        first = max(0, current + int(-window_s // scale.slice_s))
        found, total = scale.since(first), _Counts()
        for counts in found.values():
            total.merge(counts)
        covered_s = age_s - first * scale.slice_s
        per_s = 1 / covered_s if covered_s > 0 else 0.0
        return TrafficReport(
            window_s=covered_s,
            ttft_s=Percentiles.of(total.ttft_s),
            tpot_s=Percentiles.of(total.tpot_s),
            requests_per_s=total.num_requests * per_s,
            prompt_tokens_per_s=total.num_prompt_tokens * per_s,
            output_tokens_per_s=total.num_output_tokens * per_s,
            cached_share=total.num_cached_tokens / (total.num_prompt_tokens or 1),
            attainment=total.num_within / total.num_answers if total.num_answers else 1.0,
            num_failed=total.num_failed,
            num_refused=total.num_refused,
            slices=tuple(
                _slice(found.get(number) or _Counts(), scale.slice_s, age_s - (number + 1) * scale.slice_s)
                for number in range(first, current)
            ),
            classes=self._classes(total),
        )

    def _classes(self, total: _Counts) -> tuple[ClassTraffic, ...]:
        if len(self._slos) == 1:
            return ()
        rows = [(name, *total.by_class.get(name, (0, 0)), slo.percentile) for name, slo in self._slos.items()]
        return tuple(
            ClassTraffic(name, num_answers, num_within / num_answers if num_answers else 1.0, share)
            for name, num_answers, num_within, share in rows
        )

    def _now(self) -> tuple[_Counts, ...]:
        age_s = self._clock() - self._started_at
        return tuple(scale.at(age_s) for scale in self._scales)


def _slice(counts: _Counts, slice_s: float, ended_ago_s: float) -> TrafficSlice:
    ttft_p90_s, tpot_p90_s = counts.whole_p90s_s()
    return TrafficSlice(
        ended_ago_s=ended_ago_s,
        requests_per_s=counts.num_requests / slice_s,
        output_tokens_per_s=counts.num_output_tokens / slice_s,
        ttft_p90_s=ttft_p90_s,
        tpot_p90_s=tpot_p90_s,
        refused_per_s=counts.num_refused / slice_s,
    )
