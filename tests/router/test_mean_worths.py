"""The mean worth of a ratio, over as long as nothing has changed."""

from __future__ import annotations

import math

import pytest

from router.mean_worths import MeanWorths


def test_the_first_ones_are_taken_as_they_are() -> None:
    assert MeanWorths().add(100.0, 320.0, {1: 0.25, 2: 0.75}) == {1: 0.25, 2: 0.75}


@pytest.mark.parametrize(("steady_s", "memory_s"), [(20.0, 10.0), (100.0, 50.0), (160.0, 80.0), (320.0, 80.0)])
def test_what_was_found_before_fades_the_faster_the_later_something_has_changed(
    steady_s: float, memory_s: float
) -> None:
    worths = MeanWorths()
    worths.add(0.0, steady_s, {3: 1.0})
    assert worths.add(10.0, steady_s, {3: 0.0})[3] == pytest.approx(math.exp(-10.0 / memory_s))


def test_a_ratio_that_was_not_tried_is_forgotten_and_a_new_one_is_as_it_is() -> None:
    worths = MeanWorths()
    worths.add(0.0, 320.0, {3: 1.0})
    assert worths.add(10.0, 320.0, {4: 0.5}) == {4: 0.5}
    assert worths.add(20.0, 320.0, {3: 0.0, 4: 0.5}) == {3: 0.0, 4: 0.5}
