"""Percentiles of histograms against those of the sorted values themselves."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.time_histogram import ERROR, TimeHistogram, bucket_of

SHARES = [0.01, 0.1, 0.5, 0.9, 0.99, 1.0]
TIMES = st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=200)


def exact(times: list[float], share: float) -> float:
    return sorted(times)[max(1, math.ceil(share * len(times))) - 1]


def histogram(times: list[float]) -> TimeHistogram:
    found = TimeHistogram()
    for seconds in times:
        found.add(bucket_of(seconds))
    return found


def assert_near(found: TimeHistogram, times: list[float]) -> None:
    assert found.count == len(times)
    for share, told in zip(SHARES, found.percentiles(SHARES), strict=True):
        assert told == pytest.approx(exact(times, share), rel=ERROR * 1.0001)


@given(TIMES)
def test_percentiles_are_within_a_hundredth_of_the_exact_ones(times: list[float]) -> None:
    assert_near(histogram(times), times)


@given(TIMES, TIMES)
def test_a_sum_is_as_good_as_one_of_all(first: list[float], then: list[float]) -> None:
    found = histogram(first)
    found.merge(histogram(then))
    assert_near(found, first + then)


@pytest.mark.parametrize("spread", [0.05, 1.0, 3.0])
def test_many_times_from_microseconds_to_hours(spread: float) -> None:
    rng = random.Random(7)
    times = [min(max(rng.lognormvariate(-2.0, spread), 1e-4), 1e4) for _ in range(20_000)]
    found = histogram(times)
    assert_near(found, times)
    assert len(found._counts) <= 922


def test_what_is_beyond_counts_as_the_nearest() -> None:
    found = histogram([0.0, 1e-9, 1e9])
    least, most = found.percentiles([0.5, 1.0])
    assert least == pytest.approx(1e-4, rel=ERROR) and most == pytest.approx(1e4, rel=3 * ERROR)


def test_of_nothing_all_are_0_and_a_merged_one_is_left_as_it_is() -> None:
    empty, one = TimeHistogram(), histogram([1.0])
    assert empty.percentiles(SHARES) == [0.0] * 6
    empty.merge(one)
    empty.add(bucket_of(2.0))
    assert (empty.count, one.count) == (2, 1)
    assert one.percentiles([1.0])[0] == pytest.approx(1.0, rel=ERROR)
