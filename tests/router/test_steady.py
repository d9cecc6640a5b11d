"""How far back the present reaches."""

from __future__ import annotations

import random

from router.steady import steady_s


def noise(mean: float, first_s: int, last_s: int, seed: int = 0) -> list[tuple[float, float]]:
    """Two values a second."""
    rng = random.Random(seed)
    return [(half / 2, rng.gauss(mean, 1.0)) for half in range(2 * first_s, 2 * last_s)]


def test_what_never_changed_reaches_as_far_back_as_anybody_looks() -> None:
    assert steady_s(700.0, [noise(5.0, 0, 700)]) == 320.0


def test_a_step_ends_it() -> None:
    """60 s ago: windows of 10, 20 and 40 s are as before, the 40 s before these are not."""
    assert steady_s(700.0, [noise(5.0, 0, 640), noise(5.0, 0, 700)]) == 320.0
    assert steady_s(700.0, [[*noise(5.0, 0, 640), *noise(7.0, 640, 700)]]) == 40.0


def test_one_series_of_several_is_enough() -> None:
    step = [*noise(5.0, 0, 640), *noise(7.0, 640, 700)]
    assert steady_s(700.0, [noise(5.0, 0, 700), step]) == 40.0


def test_few_values_say_nothing() -> None:
    """A value in four seconds: 24 of them are in 96 s, so that windows below that are taken as they are."""
    sparse = [(4.0 * index, 0.0 if index < 150 else 100.0 + index % 2) for index in range(175)]
    assert steady_s(700.0, [sparse]) == 160.0


def test_chance_seldom_ends_it() -> None:
    reached = [steady_s(700.0, [noise(5.0, 0, 700, seed) for seed in range(3 * run, 3 * run + 3)]) for run in range(60)]
    assert sum(window_s < 320.0 for window_s in reached) <= 2
