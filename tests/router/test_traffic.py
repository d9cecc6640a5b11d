"""Traffic over a window, against sums over a plain list of all that happened."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import prometheus_client
import pytest

from router.config import SloPolicy
from router.observation import Answered, Arrival
from router.traffic import ClassTraffic, Percentiles, Traffic

ARRIVAL = Arrival(0.0, 10, 20)
LABELS = [("default", "yes"), ("default", "no"), ("batch", "yes"), ("batch", "no")]


class Clock:
    def __init__(self) -> None:
        self.now = 5000.25

    def __call__(self) -> float:
        return self.now


def answered(ttft_s: float = 0.5, tpot_s: float | None = 0.05, prompt: int = 100, cached: int = 25) -> Answered:
    return Answered(0.0, 1.0, prompt, cached, 30, ttft_s, tpot_s)


def exact(times: list[float], share: float) -> float:
    return sorted(times)[math.ceil(share * len(times)) - 1]


def assert_percentiles(told: Percentiles, times: list[float]) -> None:
    assert told.count == len(times)
    for share, value in ((0.5, told.p50), (0.9, told.p90), (0.99, told.p99)):
        assert value == pytest.approx(exact(times, share), rel=0.0101)


@pytest.mark.parametrize(
    ("window_s", "slice_s"), [(10, 1), (60, 1), (61, 10), (300, 10), (600, 10), (601, 60), (3600, 60)]
)
def test_an_hour_of_requests_as_a_plain_list_has_it(window_s: float, slice_s: float) -> None:
    """Asked in the middle of a slice: the window reaches back to the beginning of one."""
    rng, clock = random.Random(3), Clock()
    began_at, traffic = clock.now, Traffic(SloPolicy(1.0, 0.1, 0.9), clock)
    came: list[float] = []
    told: list[tuple[float, Answered]] = []
    while clock.now < began_at + 5000.4:
        clock.now += rng.expovariate(2.0)
        traffic.arrived(ARRIVAL)
        came.append(clock.now - began_at)
        one = Answered(
            arrived_at_s=clock.now,
            ended_at_s=clock.now,
            num_prompt_tokens=rng.randrange(1, 2000),
            num_cached_tokens=0,
            num_output_tokens=rng.randrange(1, 500),
            ttft_s=rng.lognormvariate(-0.7, 0.8),
            tpot_s=None if rng.random() < 0.1 else rng.lognormvariate(-2.9, 0.6),
        )
        traffic.answered(one)
        told.append((clock.now - began_at, one))
    age_s = clock.now - began_at
    first = max(0, math.floor(age_s / slice_s) - math.ceil(window_s / slice_s))
    since_s = first * slice_s
    report = traffic.report(window_s)
    within = [each for at, each in told if at >= since_s]
    assert window_s <= report.window_s < window_s + 2 * slice_s
    assert report.window_s == pytest.approx(age_s - since_s)
    assert_percentiles(report.ttft_s, [each.ttft_s for each in within])
    assert_percentiles(report.tpot_s, [each.tpot_s for each in within if each.tpot_s is not None])
    met = [each for each in within if each.ttft_s <= 1.0 and (each.tpot_s is None or each.tpot_s <= 0.1)]
    assert report.attainment == pytest.approx(len(met) / len(within)) and 0.3 < report.attainment < 0.9
    covered_s = age_s - since_s
    assert report.requests_per_s * covered_s == pytest.approx(sum(at >= since_s for at in came))
    assert report.prompt_tokens_per_s * covered_s == pytest.approx(sum(each.num_prompt_tokens for each in within))
    assert report.output_tokens_per_s * covered_s == pytest.approx(sum(each.num_output_tokens for each in within))
    assert len(report.slices) == math.ceil(window_s / slice_s) <= 60
    for number, one_slice in enumerate(report.slices, start=first):
        of_slice = [each for at, each in told if number * slice_s <= at < (number + 1) * slice_s]
        assert one_slice.requests_per_s * slice_s == pytest.approx(len(of_slice))
        tokens = sum(each.num_output_tokens for each in of_slice)
        assert one_slice.output_tokens_per_s * slice_s == pytest.approx(tokens)
        if of_slice:
            assert one_slice.ttft_p90_s == pytest.approx(exact([each.ttft_s for each in of_slice], 0.9), rel=0.0101)
        assert one_slice.ended_ago_s == pytest.approx(age_s - (number + 1) * slice_s)


def test_nothing_yet() -> None:
    clock = Clock()
    report = Traffic(SloPolicy(), clock).report(60)
    assert (report.window_s, report.requests_per_s, report.attainment, report.cached_share) == (0.0, 0.0, 1.0, 0.0)
    assert report.ttft_s == Percentiles(0, 0.0, 0.0, 0.0) and report.slices == ()


def test_a_young_router_divides_by_its_age_and_a_quiet_one_forgets() -> None:
    clock = Clock()
    traffic = Traffic(SloPolicy(), clock)
    clock.now += 2.5
    for _ in range(5):
        traffic.arrived(ARRIVAL)
    report = traffic.report(3600)
    assert (report.window_s, report.requests_per_s) == (2.5, 2.0)
    assert [each.requests_per_s for each in traffic.report(60).slices] == [0.0, 0.0]
    clock.now += 1.0
    assert [each.requests_per_s for each in traffic.report(60).slices] == [0.0, 0.0, 5.0]
    clock.now += 100.0
    assert traffic.report(60).requests_per_s == 0.0
    assert traffic.report(600).requests_per_s == pytest.approx(5 / 103.5)
    clock.now += 4000.0
    assert traffic.report(3600).requests_per_s == 0.0


def test_shares_failures_and_refusals() -> None:
    clock = Clock()
    traffic = Traffic(SloPolicy(ttft_s=0.5, tpot_s=0.05), clock)
    clock.now += 0.5
    for one in (answered(), answered(ttft_s=0.51), answered(tpot_s=0.051), answered(tpot_s=None, prompt=300, cached=0)):
        traffic.arrived(ARRIVAL)
        traffic.answered(one)
    traffic.arrived(ARRIVAL)
    traffic.failed()
    traffic.refused(had_arrived=False)
    traffic.arrived(ARRIVAL)
    traffic.refused(had_arrived=True)
    clock.now += 0.5
    report = traffic.report(10)
    assert report.attainment == 0.5
    assert report.cached_share == pytest.approx(75 / 600)
    assert (report.num_failed, report.num_refused) == (1, 2)
    assert report.requests_per_s == 7.0
    assert report.tpot_s.count == 3
    assert [each.refused_per_s for each in report.slices] == [2.0]


def test_classes_are_judged_by_their_own_slos() -> None:
    """0.6 s are too long for the default class and for nobody else; a class that nobody gave is the default one."""
    clock = Clock()
    traffic = Traffic(SloPolicy(0.5, 0.05), clock, {"batch": SloPolicy(30.0, 0.5, 0.6), "idle": SloPolicy(1.0, 0.1)})
    before = [_counted(*labels) for labels in LABELS]
    clock.now += 0.5
    for ttft_s, slo_class in ((0.4, ""), (0.6, ""), (0.6, "batch"), (31.0, "batch"), (0.7, "batch"), (0.6, "gone")):
        traffic.answered(replace(answered(ttft_s), slo_class=slo_class))
        clock.now += 0.7  # over several slices
    report = traffic.report(10)
    assert report.attainment == pytest.approx(3 / 6)
    assert report.classes == (
        ClassTraffic("default", 3, pytest.approx(1 / 3), 0.9),  # type: ignore[arg-type]
        ClassTraffic("batch", 3, pytest.approx(2 / 3), 0.6),  # type: ignore[arg-type]
        ClassTraffic("idle", 0, 1.0, 0.9),
    )
    assert [_counted(*labels) - was for labels, was in zip(LABELS, before, strict=True)] == [1, 2, 2, 1]
    assert _counted("gone", "yes") == -1.0  # names that nobody gave are no labels
    assert Traffic(SloPolicy(), clock).report(60).classes == ()


def _counted(slo_class: str, met: str) -> float:
    """-1 where there is no such label."""
    labels = {"slo_class": slo_class, "met": met}
    counted = prometheus_client.REGISTRY.get_sample_value("pdserve_router_slo_answers_total", labels)
    return -1.0 if counted is None else counted


def test_memory_is_bounded() -> None:
    rng, clock = random.Random(1), Clock()
    traffic = Traffic(SloPolicy(), clock)
    for _ in range(30_000):
        clock.now += 1.0
        traffic.answered(answered(ttft_s=rng.lognormvariate(0, 5)))
    assert [len(scale._counts) for scale in traffic._scales] == [61, 61, 61]


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttft_s": 0.0},
        {"tpot_s": -1.0},
        {"ttft_s": math.nan},
        {"tpot_s": math.inf},
        {"percentile": 1.0},
        {"percentile": 0.0},
    ],
)
def test_an_slo_that_is_none_is_refused(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} is"):
        SloPolicy(**wrong)
    assert SloPolicy() == SloPolicy(ttft_s=1.0, tpot_s=0.1, percentile=0.9)
