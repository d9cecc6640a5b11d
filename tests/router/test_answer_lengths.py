"""Lengths of answers, some of which have not ended yet."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.answer_lengths import AnswerLengths


def test_a_textbook_case() -> None:
    """Ended at 3, 5 and 8; one left at 4 and one at 9: S = 4/5, 4/5 * 2/3, 4/5 * 2/3 * 1/2."""
    lengths = AnswerLengths.of([3, 5, 8], [4, 9])
    assert list(lengths.lengths) == [3, 5, 8, 14]  # nobody knows how long the longest will be: half as much again
    assert list(lengths.longer) == pytest.approx([4 / 5, 8 / 15, 4 / 15, 0.0])
    assert [lengths.at(share) for share in (0.1, 0.3, 0.6, 0.9)] == [3, 5, 8, 14]


def test_of_those_that_are_longer() -> None:
    """Behind 5 tokens half of them have 8, the others more."""
    lengths = AnswerLengths.of([3, 5, 8], [4, 9])
    assert [lengths.at(share, 5) for share in (0.4, 0.6)] == [8, 14]
    assert lengths.at(0.5, 20) == 30  # beyond all that was seen


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.floats(0.0, 0.999))
def test_without_running_ones_it_is_what_was_seen(ended: list[int], share: float) -> None:
    """The empirical quantile, to within rounding at its steps."""
    found = AnswerLengths.of(ended, []).at(share)
    below, above = sum(length < found for length in ended), sum(length <= found for length in ended)
    assert below / len(ended) - 1e-9 <= share <= above / len(ended) + 1e-9


def test_long_ones_that_run_are_not_forgotten() -> None:
    """Half of the answers have 20 tokens, half 200, and after 50 tokens only the short ones have ended; some that were
    early have shown the long ones."""
    rng = random.Random(1)
    true = [rng.choice((20, 200)) for _ in range(400)]
    old, new = true[:100], true[100:]
    ended, running = [*old, *(length for length in new if length <= 50)], [50 for length in new if length > 50]
    lengths = AnswerLengths.of(ended, running)
    estimated = fmean(lengths.at((index + 0.5) / 1000) for index in range(1000))
    assert estimated == pytest.approx(fmean(true), rel=0.05)
    assert fmean(ended) < 0.7 * fmean(true)  # what would have been thought otherwise
