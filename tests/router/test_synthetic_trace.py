"""Synthetic traces have the rates, lengths and shared prefixes that were asked for."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest

from router.synthetic_trace import Lengths, Phase, Prefixes, overlaid, synthetic_trace

FIXED = Lengths(100)


def test_equal_seeds_give_equal_traces() -> None:
    phase = Phase(100.0, 5.0, Lengths(100, 0.5), Lengths(20, 0.5), Prefixes(0.5, 3, 2))
    first, again, other = (list(synthetic_trace([phase], seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_rates_step_and_ramp() -> None:
    """Counts of a Poisson process: within four standard deviations, the square roots of what is expected."""
    phases = [Phase(100.0, 4.0, FIXED, FIXED), Phase(100.0, 20.0, FIXED, FIXED, end_per_s=0.0)]
    moments = [request.at_s for request in synthetic_trace(phases, 3)]
    assert moments == sorted(moments)
    for start, end, expected in ((0, 100, 400), (100, 150, 750), (150, 200, 250)):
        assert abs(sum(start <= at < end for at in moments) - expected) < 4 * math.sqrt(expected)
    gaps = [after - before for before, after in pairwise(moments) if after < 100]
    assert 0.85 < statistics.stdev(gaps) / statistics.mean(gaps) < 1.15  # exponential: 1


def test_lengths_are_lognormal_with_their_mean() -> None:
    phase = Phase(400.0, 20.0, Lengths(500, 0.8), Lengths(50, 2.0, least=10, most=60))
    requests = list(synthetic_trace([phase], 4))
    prompts = [request.num_prompt_tokens for request in requests]
    assert statistics.mean(prompts) == pytest.approx(500, rel=0.05)
    assert statistics.median(prompts) == pytest.approx(500 * math.exp(-(0.8**2) / 2), rel=0.05)
    outputs = {request.num_output_tokens for request in requests}
    assert (min(outputs), max(outputs)) == (10, 60)


def test_prefixes_are_shared() -> None:
    phase = Phase(400.0, 10.0, Lengths(700), FIXED, Prefixes(0.25, number=2, num_blocks=3, first_id=7))
    requests = list(synthetic_trace([phase], 5))
    sharing = [request for request in requests if request.prefix_blocks]
    assert len(sharing) / len(requests) == pytest.approx(0.25, abs=0.04)
    assert {request.prefix_blocks[:3] for request in sharing} == {(7, 8, 9), (10, 11, 12)}
    assert {request.num_prompt_tokens for request in sharing} == {700 + 3 * 512}
    own = [request.prefix_blocks[3] for request in sharing]  # of 700 tokens one block is full
    assert len(set(own)) == len(own)


def test_traces_laid_over_each_other_are_in_order() -> None:
    calm = synthetic_trace([Phase(50.0, 2.0, FIXED, FIXED)], 1)
    burst = synthetic_trace([Phase(5.0, 40.0, FIXED, FIXED)], 2, start_s=20.0)
    moments = [request.at_s for request in overlaid(calm, burst)]
    assert moments == sorted(moments)
    assert sum(20 <= at < 25 for at in moments) > 150


@pytest.mark.parametrize(("mean", "least", "most"), [(0.0, 1, 2), (5.0, 0, 2), (5.0, 3, 2)])
def test_lengths_that_are_none_are_refused(mean: float, least: int, most: int) -> None:
    with pytest.raises(ValueError, match="mean must be above 0"):
        Lengths(mean, 0.0, least, most)
