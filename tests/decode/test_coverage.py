"""Distinct experts: against enumeration, published counts, and a router whose correlation is known."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest

from decode.coverage import ExpertCoverage, Routing, distinct_experts

MIXTRAL = Routing(8, 2)
DEEPSEEK_V3 = Routing(256, 8)
QWEN3_235B = Routing(128, 8)


@pytest.mark.parametrize(("num_experts", "num_chosen", "num_tokens"), [(4, 2, 2), (3, 1, 3), (5, 2, 2), (3, 3, 2)])
def test_is_the_mean_over_all_choices(num_experts: int, num_chosen: int, num_tokens: int) -> None:
    choices = list(itertools.combinations(range(num_experts), num_chosen))
    counts = [len(set().union(*tokens)) for tokens in itertools.product(choices, repeat=num_tokens)]
    mean = Fraction(sum(counts), len(counts))
    assert distinct_experts(Routing(num_experts, num_chosen), num_tokens) == pytest.approx(float(mean))


@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "num_tokens"),
    [(8, 2, 11), (64, 8, 23), (64, 6, 31), (128, 8, 47), (128, 4, 95), (256, 8, 95), (384, 8, 143)],
)
def test_saturation(num_experts: int, num_chosen: int, num_tokens: int) -> None:
    routing = Routing(num_experts, num_chosen)
    assert distinct_experts(routing, num_tokens - 1) < 0.95 * num_experts <= distinct_experts(routing, num_tokens)


def test_known_counts() -> None:
    assert distinct_experts(Routing(512, 10), 4) == pytest.approx(38.8, abs=0.05)
    assert [distinct_experts(DEEPSEEK_V3, t) for t in (4, 8, 16)] == pytest.approx([30.5, 57, 102], rel=0.01)
    assert 2 * 64 / distinct_experts(MIXTRAL, 64) == pytest.approx(16, abs=0.05)  # tokens per active expert
    assert 8 * 64 / distinct_experts(QWEN3_235B, 64) == pytest.approx(4.1, abs=0.05)


@pytest.mark.parametrize(
    ("routing", "ratios"),
    [(DEEPSEEK_V3, {1: 3.8, 8: 2.8, 16: 2.2, 32: 1.54, 64: 1.15, 128: 1.02}), (MIXTRAL, {1: 2.7, 8: 1.1})],
)
def test_bytes_of_verifying_four_tokens_each(routing: Routing, ratios: dict[int, float]) -> None:
    for num_sequences, ratio in ratios.items():
        four, one = distinct_experts(routing, 4 * num_sequences), distinct_experts(routing, num_sequences)
        assert four / one == pytest.approx(ratio, rel=0.02)


def test_correlation_as_published() -> None:
    """256 experts, 8 chosen: 22.0, 35.9 and 57.4 are N(t^0.75) at 4, 8 and 16 tokens; 22, 36 and 56 were measured."""
    coverage = ExpertCoverage(DEEPSEEK_V3)
    assert coverage.beta == 0.75
    assert coverage.predict(1, np.array([4.0, 8.0, 16.0])) == pytest.approx([22.0, 35.9, 57.4], abs=0.05)
    assert coverage.predict(5, np.array([5.0])) == pytest.approx([distinct_experts(DEEPSEEK_V3, 5)])  # no drafts
    for num_tokens, measured in [(4, 22), (8, 36), (16, 56)] * 30:
        coverage.observe(1, num_tokens, measured)
    assert coverage.beta == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("truth", [0.0, 0.3, 0.55, 1.0])
@pytest.mark.parametrize("num_sequences", [1, 4])
def test_finds_beta_through_noise_and_nonsense(truth: float, num_sequences: int) -> None:
    coverage, noise = ExpertCoverage(QWEN3_235B), random.Random(3)
    for step in range(400):
        num_drafts = noise.randint(1, 6)
        experts = distinct_experts(QWEN3_235B, num_sequences * (num_drafts + 1) ** truth)
        coverage.observe(
            num_sequences, num_sequences * (num_drafts + 1), max(8.0, noise.gauss(experts, experts * 0.05))
        )
        if step % 40 == 20:
            coverage.observe(num_sequences, num_sequences * 2, 128.0)  # possible, but far off
        coverage.observe(num_sequences, num_sequences * 2, noise.choice([float("nan"), 0.0, 7.9, 129.0, float("inf")]))
    assert coverage.beta == pytest.approx(truth, abs=0.06)


def test_follows_a_change() -> None:
    coverage = ExpertCoverage(QWEN3_235B)
    for truth in (0.9, 0.4):
        for _ in range(300):
            coverage.observe(2, 8, distinct_experts(QWEN3_235B, 2 * 4**truth))
        assert coverage.beta == pytest.approx(truth, abs=0.03)


def test_learns_nothing_where_nothing_is_to_be_learnt() -> None:
    coverage = ExpertCoverage(MIXTRAL)
    for _ in range(200):
        coverage.observe(64, 512, 8.0)  # all experts, whatever beta is
        coverage.observe(4, 4, 2.0)  # no drafts
    assert coverage.beta == pytest.approx(0.75, abs=1e-3)


def test_stays_within_bounds() -> None:
    low, high = ExpertCoverage(QWEN3_235B), ExpertCoverage(QWEN3_235B)
    for _ in range(200):
        low.observe(1, 8, 8.0)
        high.observe(1, 8, 128.0)
    assert low.beta == pytest.approx(0.0, abs=0.02)
    assert high.beta == 1.0


def test_refuses_impossible_routing() -> None:
    for num_experts, num_chosen in [(8, 9), (8, 0)]:
        with pytest.raises(ValueError, match="cannot be chosen"):
            Routing(num_experts, num_chosen)
