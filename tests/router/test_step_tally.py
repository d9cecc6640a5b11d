"""Steps that are alike become their mean, different ones are kept apart, and there are never many."""

from __future__ import annotations

import random

import pytest

from router.measured_steps import DecodeSteps, PrefillSteps
from router.step_costs import StepCosts
from router.step_tally import StepTally

COSTS = StepCosts(0.02, 6e-4, 1e-7, 0.022, 1e-3, 1e-6)


def test_those_alike_become_their_mean_and_others_are_kept_apart() -> None:
    tally = StepTally()
    tally.prefilled(300, 300 * 300, 0.25)
    tally.prefilled(340, 340 * 300, 0.75)
    tally.prefilled(30, 30 * 30, 0.04)  # fewer tokens
    tally.prefilled(300, 300 * 5000, 0.4)  # more context
    tally.decoded(8, 8000, 0.25, 1.0)
    tally.decoded(10, 9000, 0.5, 2.0)
    assert tally.take() == [
        PrefillSteps(320.0, (340 * 300 + 300 * 300) / 2, 0.5),
        PrefillSteps(30, 900, 0.04),
        PrefillSteps(300, 1_500_000, 0.4),
        DecodeSteps(9.0, 8500.0, 0.375, 1.5),
    ]
    assert tally.take() == []


def test_a_step_that_was_held_up_is_left_out() -> None:
    tally = StepTally()
    for step_s in (0.25, 0.125, 5.0, 0.375):
        tally.decoded(8, 8000, step_s)
    assert tally.take() == [DecodeSteps(8.0, 8000.0, 0.25)]


def test_the_mean_obeys_the_formula_whatever_it_is_of() -> None:
    """Since that is linear: it is as good as one step."""
    tally, rng = StepTally(), random.Random(4)
    for _ in range(3000):
        number = rng.randint(1, 64)
        context = number * rng.randint(1, 4000)
        tally.decoded(number, context, COSTS.decode_s(number, context))
        chunks = [(n := rng.randint(2, 512), n + rng.randint(0, 4000)), (m := rng.randint(2, 100), m)]
        pairs = sum(n * context for n, context in chunks)
        tally.prefilled(sum(n for n, _ in chunks), pairs, COSTS.prefill_s(chunks))
    taken = tally.take()
    for steps in taken:
        if isinstance(steps, DecodeSteps):
            assert steps.step_s == pytest.approx(COSTS.decode_s(steps.num_sequences, steps.num_context_tokens))
        else:
            expected_s = 0.02 + 6e-4 * steps.num_tokens + 1e-7 * steps.num_pairs
            assert steps.step_s == pytest.approx(expected_s)
    assert len(taken) == 16  # eight of each
    assert max(each.num_sequences for each in taken if isinstance(each, DecodeSteps)) > 30


def test_what_took_no_time_was_no_step() -> None:
    tally = StepTally()
    tally.prefilled(5, 25, 0.0)
    tally.decoded(5, 25, 0.0)
    assert tally.take() == []
