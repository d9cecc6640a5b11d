"""Step times learnt from hardware whose law is known, through noise, outliers and a machine that slows down."""

from __future__ import annotations

import random

import numpy as np
import pytest

from decode.coverage import ExpertCoverage, Routing
from decode.step_time import StepForecast, StepShape, StepTime, isotonic
from tests.decode.simulated_hardware import DENSE, SPARSE, Hardware

CONTEXT = 300  # tokens per sequence


def observe(
    step_time: StepTime,
    hardware: Hardware,
    num_sequences: int,
    length: int,
    slowness: float = 1.0,
    context: int = CONTEXT,
) -> None:
    """A step in which every sequence drafts as much."""
    lengths, num_context_tokens = [length] * num_sequences, context * num_sequences
    step_time.observe(
        StepShape(num_sequences, num_context_tokens, sum(lengths), sum(lengths), length),
        hardware.verify_s(lengths, num_context_tokens) * slowness,
        hardware.draft_s(lengths) * slowness,
    )


def trained(hardware: Hardware, batches: list[int], noise: float = 0.05, num_steps: int = 600) -> StepTime:
    coverage = None
    if hardware.expert_s:
        coverage = ExpertCoverage(hardware.routing)
        for _ in range(100):
            coverage.observe(1, 4, hardware.experts([3]))
    step_time, draws = StepTime(7, coverage), random.Random(1)
    for _ in range(num_steps):
        observe(step_time, hardware, draws.choice(batches), draws.randint(0, 7), draws.gauss(1.0, noise))
    return step_time


def forecast(step_time: StepTime, num_sequences: int, context: int = CONTEXT) -> StepForecast:
    return step_time.forecast(num_sequences, context * num_sequences, 7 * num_sequences, 7)


@pytest.mark.parametrize("hardware", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("num_sequences", [1, 4, 16])
def test_learns_what_was_seen(hardware: Hardware, num_sequences: int) -> None:
    seen = forecast(trained(hardware, [1, 4, 16]), num_sequences)
    for length in range(8):
        lengths = [length] * num_sequences
        verify_s = hardware.verify_s(lengths, CONTEXT * num_sequences)
        assert seen.verify_s[length * num_sequences] == pytest.approx(verify_s, rel=0.04)
        draft_s = seen.draft_s[length] + seen.draft_token_s[length] * sum(lengths)
        assert draft_s == pytest.approx(hardware.draft_s(lengths), rel=0.1, abs=0.01)
    assert seen.noise == pytest.approx(0.04, abs=0.015)  # the mean of |error|, 0.8 sigma


@pytest.mark.parametrize("hardware", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_extrapolates_to_batches_it_never_saw(hardware: Hardware) -> None:
    step_time = trained(hardware, [2, 4, 16])
    for num_sequences in (8, 32):
        unseen = forecast(step_time, num_sequences, context=600)
        for length in (0, 1, 3):
            verify_s = hardware.verify_s([length] * num_sequences, 600 * num_sequences)
            assert unseen.verify_s[length * num_sequences] == pytest.approx(verify_s, rel=0.2)
        assert not unseen.num_seen.any()


def test_never_falls_and_is_never_negative() -> None:
    """Measured times that fall with the size, as an unlucky row of noise would have it."""
    step_time, draws = StepTime(7), random.Random(9)
    for _ in range(300):
        num_sequences, length = draws.randint(1, 40), draws.randint(0, 7)
        num_drafts = num_sequences * length
        shape = StepShape(num_sequences, draws.randint(1, 9000), num_drafts, num_drafts, length)
        step_time.observe(shape, draws.random() + 1 / (num_sequences + num_drafts), draws.random() / (1 + length))
        seen = step_time.forecast(draws.randint(1, 64), draws.randint(1, 20_000), 300, 7)
        assert (np.diff(seen.verify_s) >= 0).all() and (np.diff(seen.draft_s) >= 0).all()
        assert (seen.verify_s >= 0).all() and (seen.draft_s >= 0).all() and (seen.draft_token_s >= 0).all()


def test_says_what_it_does_not_know() -> None:
    step_time = StepTime(7)
    assert not step_time.is_known
    for verify_s in (0.0, -1.0, float("nan"), float("inf")):
        step_time.observe(StepShape(1, 10), verify_s, 0.0)
    assert not step_time.is_known
    observe(step_time, DENSE, 4, 0)
    seen = forecast(step_time, 4)
    assert step_time.is_known
    assert seen.plain_s == pytest.approx(DENSE.verify_s([0] * 4, 4 * CONTEXT))
    assert seen.num_seen[0] == pytest.approx(1.0, rel=0.01) and not seen.num_seen[1:].any()
    assert seen.doubt[0] < seen.doubt[1] > 0.25


def test_outliers_hardly_count() -> None:
    step_time, draws = StepTime(7), random.Random(4)
    for step in range(300):
        stall = 20.0 if step % 15 == 0 else 1.0  # the very first step among them
        observe(step_time, DENSE, 1, draws.choice([0, 3]), stall * draws.gauss(1.0, 0.03))
    seen = forecast(step_time, 1)
    assert step_time.drift == pytest.approx(1.0, abs=0.1)
    for length in (0, 3):
        assert seen.verify_s[length] == pytest.approx(DENSE.verify_s([length], CONTEXT), rel=0.08)


def test_noise_is_not_taken_for_a_slower_machine() -> None:
    step_time = trained(DENSE, [1], noise=0.2)
    assert step_time.drift == pytest.approx(1.0, abs=0.15)
    seen = forecast(step_time, 1)
    for length in range(8):
        assert seen.verify_s[length] == pytest.approx(DENSE.verify_s([length], CONTEXT), rel=0.1)


def test_slow_steps_now_and_then_do_not_drive_the_machine_away() -> None:
    """Of a kind of steps that is run for long; what was learnt of another before is still true."""
    step_time, draws = trained(DENSE, [1]), random.Random(4)
    before = forecast(step_time, 1).plain_s
    for _ in range(8000):
        stall = 2.0 if draws.random() < 0.05 else 1.0
        observe(step_time, DENSE, 1, 3, stall * draws.gauss(1.0, 0.05))
    assert step_time.drift == pytest.approx(1.0, abs=0.1)
    assert forecast(step_time, 1).plain_s == pytest.approx(before, rel=0.1)


def test_slower_machine_slows_every_forecast() -> None:
    """Only drafted steps are measured while it is slower; the plain step's forecast follows."""
    step_time, draws = trained(DENSE, [1]), random.Random(6)
    before = forecast(step_time, 1)
    for _ in range(60):
        observe(step_time, DENSE, 1, 3, 2.0 * draws.gauss(1.0, 0.05))
    after = forecast(step_time, 1)
    assert step_time.drift == pytest.approx(2.0, rel=0.1)
    assert after.plain_s / before.plain_s == pytest.approx(2.0, rel=0.1)
    assert after.verify_s[3] / after.plain_s == pytest.approx(before.verify_s[3] / before.plain_s, rel=0.06)


def test_context_is_told_apart_from_rows() -> None:
    hardware, step_time, draws = Hardware(context_token_s=1e-3, row_s=0.04), StepTime(7), random.Random(8)
    for step in range(400):
        observe(step_time, hardware, 2, draws.randint(0, 7), draws.gauss(1.0, 0.03), context=100 + step)
    for context in (500, 1500):
        seen = forecast(step_time, 2, context)
        assert seen.verify_s[0] == pytest.approx(hardware.verify_s([0, 0], 2 * context), rel=0.1)
        assert seen.verify_s[14] == pytest.approx(hardware.verify_s([7, 7], 2 * context), rel=0.1)


def test_finer_routing_is_seen_by_its_experts() -> None:
    """One sequence with 7 drafts was never timed; that it loads many experts is known from counts alone."""
    hardware = Hardware(weights_s=0.2, expert_s=0.05, routing=Routing(128, 8))
    coverage = ExpertCoverage(hardware.routing)
    for _ in range(100):
        coverage.observe(1, 8, hardware.experts([7]))
    step_time = StepTime(7, coverage)
    for num_sequences in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) * 20:
        observe(step_time, hardware, num_sequences, 0)
    seen = forecast(step_time, 1)
    assert seen.verify_s[7] == pytest.approx(hardware.verify_s([7], CONTEXT), rel=0.1)


def test_one_odd_step_does_not_lift_larger_ones_that_are_known() -> None:
    """5 rows, seen once and disturbed; steps of 8 rows, seen often, take no longer than they do."""
    step_time = StepTime(7)
    for _ in range(60):
        for length in (0, 2, 7):
            observe(step_time, DENSE, 1, length)
    observe(step_time, DENSE, 1, 4, slowness=1.5)
    forecast = step_time.forecast(1, CONTEXT, 7, 7)
    assert forecast.verify_s[7] == pytest.approx(DENSE.verify_s([7], CONTEXT), rel=0.02)
    assert (np.diff(forecast.verify_s) >= 0).all()


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [1.0, 2.0, 3.0]),
        ([1.0, 4.0, 2.0], [1.0, 1.0, 1.0], [1.0, 3.0, 3.0]),
        ([1.0, 4.0, 2.0], [1.0, 1.0, 3.0], [1.0, 2.5, 2.5]),
        ([3.0, 2.0, 1.0, 5.0], [1.0, 1.0, 2.0, 1.0], [1.75, 1.75, 1.75, 5.0]),
        ([2.0, 3.0, 1.0], [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]),  # the last pool reaches the first
    ],
)
def test_nearest_sequence_that_never_falls(values: list[float], weights: list[float], expected: list[float]) -> None:
    assert isotonic(np.array(values), np.array(weights)).tolist() == pytest.approx(expected)


def test_what_is_slow_indeed_is_believed_in_the_end() -> None:
    """A few steps that took five times as long as expected may have been held up, all of them were not."""
    step_time = StepTime(7)
    for _ in range(20):
        observe(step_time, DENSE, 1, 0)
    plain_s = DENSE.verify_s([0], CONTEXT)
    for number in range(40):
        if number < 4:  # three are left out
            assert forecast(step_time, 1).verify_s[3] == pytest.approx(plain_s, rel=0.05)
        step_time.observe(StepShape(1, CONTEXT, 3, 3, 3), 5.0 * plain_s, DENSE.draft_s([3]))
    assert forecast(step_time, 1).verify_s[3] == pytest.approx(5.0 * plain_s, rel=0.1)
