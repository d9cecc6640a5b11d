"""Step-time models: known coefficients are found again, whatever the calibration said, and changes are followed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from model.timed_runner import StepTiming
from router.least_squares import LeastSquares
from router.step_costs import CLOCK_FIELDS, Experts, StepCosts
from router.step_models import Calibration, StepModel

TRUE = StepCosts(0.02, 6e-4, 1e-7, 0.022, 1e-3, 1e-6)
OFF = StepCosts(0.01, 1e-3, 5e-8, 0.05, 4e-4, 3e-6)  # what a calibration of another machine might say
NOISE = 0.03


def a_batch(rng: random.Random) -> tuple[int, int]:
    number = rng.randint(1, 64)
    return number, number * rng.randint(100, 3000)


def coefficients(costs: StepCosts) -> list[float]:
    return [getattr(costs, name) for name in CLOCK_FIELDS]


def taught(
    num_steps: int, *, seed: int = 0, true: StepCosts = TRUE, spoilt: Callable[[random.Random], float] | None = None
) -> StepModel:
    rng = random.Random(seed)
    model = StepModel(Calibration(replace(OFF, experts=true.experts, decode_expert_s=true.decode_expert_s * 3)))
    for _ in range(num_steps):
        factor = 1.0 if spoilt is None else spoilt(rng)
        num_tokens = rng.randint(16, 512)
        chunks = [(num_tokens, num_tokens + rng.randint(0, 4000))]
        model.observe_prefill(chunks, true.prefill_s(chunks) * rng.gauss(1, NOISE) * factor)
        number, context = a_batch(rng)
        model.observe_decode(number, context, true.decode_s(number, context) * rng.gauss(1, NOISE) * factor)
    return model


def worst_error(model: StepModel, true: StepCosts) -> float:
    costs = model.costs
    prefills = [[(n, n + before)] for n in (64, 256, 512) for before in (0, 2000)]
    errors = [costs.prefill_s(chunks) / true.prefill_s(chunks) - 1 for chunks in prefills]
    batches = [(number, number * context) for number in (1, 8, 32, 64) for context in (200, 1000, 3000)]
    errors += [costs.decode_s(*batch) / true.decode_s(*batch) - 1 for batch in batches]
    return max(map(abs, errors))


def test_the_formula_is_that_of_timed_workers() -> None:
    timing = StepTiming(0.02, 6e-4, 1e-7, 0.022, 1e-3, 1e-6)
    costs = StepCosts(*(getattr(timing, name) for name in StepTiming.__slots__ if name != "scale"))
    assert costs.prefill_s([(100, 300)]) == pytest.approx(0.02 + 100 * 6e-4 + 100 * 300 * 1e-7)
    assert costs.prompt_s(300, max_step_tokens=200) == pytest.approx(
        2 * 0.02 + 300 * 6e-4 + (200**2 + 100 * 300) * 1e-7
    )
    assert costs.prompt_s(300, 512, num_cached_tokens=256) == pytest.approx(0.02 + 44 * 6e-4 + 44 * 300 * 1e-7)
    assert costs.decode_s(10, 5000) == pytest.approx(0.022 + 10 * 1e-3 + 5000 * 1e-6)
    assert costs.mixed_s([(100, 300)], 10, 5000) == pytest.approx(costs.prefill_s([(100, 300)]) + 10e-3 + 5e-3)


def test_experts_saturate() -> None:
    """8 experts of which 2 are chosen: of 4 tokens each misses an expert with 0.75^4."""
    assert Experts(8, 2).touched(1) == 2.0
    assert Experts(8, 2).touched(4) == pytest.approx(8 * (1 - 0.75**4))


@pytest.mark.parametrize("seed", range(3))
def test_known_coefficients_are_found_again(seed: int) -> None:
    model = taught(400, seed=seed)
    costs = model.costs
    assert worst_error(model, TRUE) < 0.04
    assert costs.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=0.1)
    assert costs.decode_sequence_s == pytest.approx(TRUE.decode_sequence_s, rel=0.1)
    assert costs.decode_context_token_s == pytest.approx(TRUE.decode_context_token_s, rel=0.1)


def test_the_time_of_experts_is_found_again() -> None:
    true = replace(TRUE, experts=Experts(64, 4), decode_expert_s=4e-4)
    assert worst_error(taught(400, true=true), true) < 0.05


def test_what_costs_nothing_is_never_less_than_nothing() -> None:
    true = replace(TRUE, prefill_base_s=0.0, prefill_pair_s=0.0, decode_context_token_s=0.0)
    model = taught(300, true=true)
    values = model.costs
    assert min(values.prefill_base_s, values.prefill_pair_s, values.decode_context_token_s) >= 0.0
    assert worst_error(model, true) < 0.05


@pytest.mark.parametrize("seed", range(3))
def test_outliers_hardly_matter(seed: int) -> None:
    """One step in twenty takes twenty times as long: a mean would be off by 95 %."""
    model = taught(400, seed=seed, spoilt=lambda rng: 20.0 if rng.random() < 0.05 else 1.0)
    assert worst_error(model, TRUE) < 0.06


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_change_of_speed_is_learnt_within_20_steps(factor: float) -> None:
    model, rng = taught(300), random.Random(9)
    before = model.decode_confidence
    lowest = before
    for _ in range(20):
        batch = a_batch(rng)
        model.observe_decode(*batch, factor * TRUE.decode_s(*batch) * rng.gauss(1, NOISE))
        lowest = min(lowest, model.decode_confidence)
    for number in (4, 32):
        assert model.costs.decode_s(number, 500 * number) == pytest.approx(
            factor * TRUE.decode_s(number, 500 * number), rel=0.1
        )
    assert lowest < 0.6 * before  # it missed
    assert model.prefill_confidence == taught(300).prefill_confidence  # of that nothing was said


def test_a_steady_load_does_not_make_it_forget_others() -> None:
    model, rng = taught(300), random.Random(1)
    for _ in range(3000):
        model.observe_decode(8, 4000, TRUE.decode_s(8, 4000) * rng.gauss(1, NOISE))
    assert model.costs.decode_s(64, 64000) == pytest.approx(TRUE.decode_s(64, 64000), rel=0.06)


def test_confidence_grows_with_what_was_measured() -> None:
    confidences = [taught(number).decode_confidence for number in (0, 30, 100, 300)]
    assert confidences[0] == 0.0
    assert confidences == sorted(confidences)
    assert confidences[-1] > 0.7


def test_a_cold_start_says_what_the_calibration_said() -> None:
    assert coefficients(StepModel(Calibration(OFF)).costs) == pytest.approx(coefficients(OFF))


def test_a_weightier_calibration_is_given_up_more_slowly() -> None:
    errors = []
    for weight in (5.0, 500.0):
        model, rng = StepModel(Calibration(TRUE, weight)), random.Random(2)
        for _ in range(8):
            model.observe_decode(16, 8000, 1.2 * TRUE.decode_s(16, 8000) * rng.gauss(1, 0.01))
        errors.append(abs(model.costs.decode_s(16, 8000) / TRUE.decode_s(16, 8000) - 1.2))
    assert errors[0] < 0.1 < errors[1]


def test_tokens_per_step_follow_what_is_accepted() -> None:
    model = StepModel(Calibration(TRUE))
    for _ in range(200):
        model.observe_decode(8, 4000, 0.03, tokens_per_step=2.5)
    assert model.costs.tokens_per_step == pytest.approx(2.5, rel=0.01)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_measurement_is_left_out(value: float) -> None:
    model = StepModel(Calibration(TRUE))
    model.observe_decode(8, 4000, value)
    assert coefficients(model.costs) == pytest.approx(coefficients(TRUE))
    assert model.decode_confidence == 0.0


def test_a_prior_without_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="only zeros"):
        LeastSquares([0.0, 0.0], [[1.0, 2.0]], weight=1.0)
    with pytest.raises(ValueError, match="2 coefficients"):
        LeastSquares([1.0, 0.0], [[1.0]], weight=1.0)
