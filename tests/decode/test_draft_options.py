"""The choice of drafts is the best of all, found by trying all."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from decode.draft_options import weigh
from decode.step_time import StepForecast


def random_case(draws: random.Random) -> tuple[NDArray[np.float64], list[int], int, StepForecast]:
    num_sequences, longest = draws.randint(1, 3), draws.randint(1, 3)
    rates = np.array([[draws.random() for _ in range(longest)] for _ in range(num_sequences)])
    limits = [draws.randint(0, longest) for _ in range(num_sequences)]
    steps = [draws.choice([0.0, 0.02, 0.5]) for _ in range(sum(limits))]  # flat pieces and jumps
    verify_s = 1.0 + np.concatenate([[0.0], np.cumsum(steps)])
    draft_s = np.concatenate([[0.0], np.cumsum([draws.random() * 0.3 for _ in range(longest)])])
    forecast = StepForecast(verify_s, draft_s, np.full(longest + 1, 0.01), np.ones(len(verify_s)), 0.05)
    return np.cumprod(rates, axis=1), limits, draws.randint(0, sum(limits) + 1), forecast


def rate(
    survival: NDArray[np.float64], lengths: tuple[int, ...], are_free: list[bool], forecast: StepForecast
) -> float:
    tokens = sum(1.0 + survival[i, :length].sum() for i, length in enumerate(lengths))
    made = [length for length, is_free in zip(lengths, are_free, strict=True) if not is_free]
    cap = max(made, default=0)
    seconds = forecast.verify_s[sum(lengths)] + forecast.draft_s[cap] + forecast.draft_token_s[cap] * sum(made)
    return float(tokens / seconds)


@pytest.mark.parametrize("with_free", [False, True])
def test_no_other_choice_is_faster(with_free: bool) -> None:
    """Where some drafts are free the others' own cost is left out: then the likeliest of all are no longer the best."""
    draws = random.Random(11)
    for _ in range(300):
        survival, limits, num_spare_tokens, forecast = random_case(draws)
        are_free = [with_free and draws.random() < 0.5 for _ in limits]
        if with_free:
            forecast = replace(forecast, draft_token_s=np.zeros_like(forecast.draft_token_s))
        options = weigh(survival, limits, are_free, num_spare_tokens, forecast)
        lengths = tuple(options.draft_lengths(options.best))
        possible = itertools.product(*(range(limit + 1) for limit in limits))
        best = max(rate(survival, choice, are_free, forecast) for choice in possible if sum(choice) <= num_spare_tokens)
        assert all(length <= limit for length, limit in zip(lengths, limits, strict=True))
        assert sum(lengths) <= num_spare_tokens
        assert rate(survival, lengths, are_free, forecast) == pytest.approx(best)
        assert options.rates[options.best] == pytest.approx(best)


def test_likelier_drafts_come_first() -> None:
    survival = np.array([[0.9, 0.8, 0.1], [0.5, 0.2, 0.1]])
    flat_then_steep = StepForecast(np.array([1.0, 1.0, 1.0, 1.0, 9, 9, 9]), np.zeros(4), np.zeros(4), np.ones(7), 0.05)
    options = weigh(survival, [3, 3], [False, False], 6, flat_then_steep)
    assert options.draft_lengths(options.best) == [2, 1]


def test_least_chance_is_that_of_the_last_draft_that_is_taken() -> None:
    """The second sequence's look-up needs no cap; with a cap of one the first has but one draft."""
    survival = np.array([[0.9, 0.8], [0.85, 0.6]])
    forecast = StepForecast(np.ones(5), np.zeros(3), np.zeros(3), np.ones(5), 0.05)
    options = weigh(survival, [2, 2], [False, True], 4, forecast)
    assert [options.least_chance((1, prefix)) for prefix in (1, 2, 3, 4)] == pytest.approx([0.9, 0.85, 0.85, 0.6])
    assert [options.least_chance((2, prefix)) for prefix in (1, 2, 3, 4)] == pytest.approx([0.9, 0.85, 0.8, 0.6])


def test_free_drafts_are_taken_where_no_drafter_would_pay() -> None:
    survival, dear = np.full((2, 2), 0.5), np.array([0.0, 9.0, 9.0])
    forecast = StepForecast(np.ones(5), dear, np.zeros(3), np.ones(5), 0.05)
    options = weigh(survival, [2, 2], [True, False], 4, forecast)
    assert options.draft_lengths(options.best) == [2, 0]
    assert options.seconds[options.best] == 1.0


def test_free_drafts_take_the_drafter_no_time() -> None:
    """Two free ones, one of length 1 that is made, and the made one behind it that a cap of 1 leaves out."""
    survival = np.array([[0.9, 0.8], [0.7, 0.6]])
    forecast = StepForecast(np.ones(5), np.array([0.0, 0.2, 0.4]), np.array([0.0, 0.1, 0.1]), np.ones(5), 0.05)
    options = weigh(survival, [2, 2], [True, False], 4, forecast)
    assert options.seconds[0, 2] == 1.0
    assert options.seconds[1, 3] == pytest.approx(1.0 + 0.2 + 0.1)
    assert options.draft_lengths((1, 4)) == [2, 1]


def test_drafts_that_hardly_ever_stand_are_left_out() -> None:
    """However cheap they are: with long drafts and many sequences most are of that kind."""
    forecast = StepForecast(np.ones(41), np.zeros(21), np.zeros(21), np.ones(41), 0.05)
    survival = np.array([0.5 ** np.arange(1, 21), np.full(20, 0.001)])
    options = weigh(survival, [20, 20], [False, False], 40, forecast)
    assert options.draft_lengths(options.best) == [6, 0]  # 2^-6 is more than 1 %, 2^-7 is less
    assert options.rates.shape == (7, 7)
