"""Rates and times of late, against what went in."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, Counter

from kvtransfer.lately import RecentRate, RecentTimes
from kvtransfer.metrics import total
from kvtransfer.transfer_meter import TransferMeter


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def test_an_even_rate_comes_out_as_it_is_and_halves_in_half_a_minute_of_silence() -> None:
    rate = RecentRate(clock := Clock())
    assert rate.per_s == 0.0
    for _ in range(3000):
        clock.now += 0.1
        rate.add(200.0)
    assert rate.per_s == pytest.approx(2000.0, rel=0.005)
    clock.now += 30.0
    assert rate.per_s == pytest.approx(1000.0, rel=0.005)
    clock.now += 1e6
    assert rate.per_s == 0.0


def test_bytes_sent_count_however_long_they_were_under_way() -> None:
    clock = Clock()
    meter = TransferMeter(clock)
    for _ in range(3000):
        meter.began("peer", 500, clock.now)
        clock.now += 0.01
        meter.ended("peer", 500, well=True)
        clock.now += 0.09
    assert meter.transferred.bytes_per_s == pytest.approx(5000.0, rel=0.005)


def test_percentiles_of_the_last_times_alone() -> None:
    times = RecentTimes()
    assert times.percentile(0.9) == 0.0
    for number in range(2000):
        times.add(float(number))
    last = [float(number) for number in range(1500, 2000)]
    for share in (0.5, 0.9, 1.0):
        assert times.percentile(share) == last[math.ceil(share * 500) - 1]


def test_a_counter_is_summed_over_its_labels() -> None:
    counter = Counter("some_events", "Some.", ["outcome", "side"], registry=CollectorRegistry())
    counter.labels("ok", "left").inc(2)
    counter.labels("ok", "right").inc(3)
    counter.labels("lost", "left").inc(4)
    plain = Counter("other_events", "Others.", registry=CollectorRegistry())
    plain.inc(6)
    assert (total(counter), total(counter, outcome="ok"), total(plain)) == (9, 5, 6)
    assert total(counter, outcome="never") == 0
