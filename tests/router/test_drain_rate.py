"""The observed rate of a queue, against rates that are known."""

from __future__ import annotations

import pytest

from router.drain_rate import DrainRate


def worked_off(tokens_per_s: float, every_s: float, seconds: float) -> tuple[DrainRate, float]:
    rate, now = DrainRate(), 0.0
    rate.observe(now, is_waiting=True)
    while now < seconds:
        now += every_s
        rate.observe(now, is_waiting=True, num_tokens=round(tokens_per_s * every_s))
    return rate, now


@pytest.mark.parametrize("tokens_per_s, every_s", [(1000, 0.01), (1000, 1.0), (10, 0.5)])
@pytest.mark.parametrize("seconds", [3.0, 100.0])
def test_is_what_it_was(tokens_per_s: float, every_s: float, seconds: float) -> None:
    rate, now = worked_off(tokens_per_s, every_s, seconds)
    assert rate.tokens_per_s(now) == pytest.approx(tokens_per_s, rel=0.2)


def test_is_unknown_at_first_and_then_no_less_than_one_more() -> None:
    rate = DrainRate()
    assert rate.tokens_per_s(0.0, 100) is None
    rate.observe(0.0, is_waiting=True)
    assert rate.tokens_per_s(0.4, 100) is None
    assert rate.tokens_per_s(2.0, 100) == pytest.approx(50, rel=0.2)  # nothing yet; one of 100 may be about to go


def test_follows_a_change() -> None:
    rate, now = worked_off(1000, 0.1, 60.0)
    for _ in range(200):
        now += 0.1
        rate.observe(now, is_waiting=True, num_tokens=10)
    assert rate.tokens_per_s(now) == pytest.approx(100 + 900 / 2.718**2, rel=0.1)


def test_time_without_a_queue_says_nothing() -> None:
    rate, now = worked_off(1000, 0.1, 20.0)
    rate.observe(now, is_waiting=False)
    rate.observe(now + 30.0, is_waiting=True, num_tokens=5000)  # was placed at once
    assert rate.tokens_per_s(now + 30.0) == pytest.approx(1000, rel=0.1)
    rate.observe(now + 30.0, is_waiting=False)
    assert rate.tokens_per_s(now + 200.0) is None  # the workers may be others by now
