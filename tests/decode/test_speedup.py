"""The worked numbers of the design, which were calculated by hand."""

from __future__ import annotations

import pytest

from decode.speedup import acceptance_of, expected_tokens, expected_tokens_by_position, speedup


@pytest.mark.parametrize(
    ("acceptance", "num_drafts", "draft_cost", "tokens", "faster"),
    [
        (0.6, 5, 0.1, 2.383, 1.589),
        (0.8, 5, 0.1, 3.689, 2.460),
        (0.9, 5, 0.1, 4.686, 3.124),
        (0.832, 5, 0.114, 3.978, 2.534),
        (0.55, 5, 0.1, 2.161, 1.440),
        (0.55, 8, 0.1, 2.212, 1.229),  # longer drafts hurt
    ],
)
def test_tokens_and_speedup(
    acceptance: float, num_drafts: int, draft_cost: float, tokens: float, faster: float
) -> None:
    emitted = expected_tokens(acceptance, num_drafts)
    assert emitted == pytest.approx(tokens, abs=6e-4)
    assert speedup(emitted, num_drafts, draft_cost) == pytest.approx(faster, abs=6e-4)
    assert expected_tokens_by_position([acceptance] * num_drafts) == pytest.approx(emitted)
    assert acceptance_of(emitted, num_drafts) == pytest.approx(acceptance)


def test_edges() -> None:
    assert expected_tokens(1.0, 4) == 5.0
    assert expected_tokens(0.0, 4) == 1.0
    assert expected_tokens(0.7, 0) == 1.0
    assert speedup(1.0, 0, 0.3) == 1.0
    assert acceptance_of(1.0, 3) == pytest.approx(0.0)
    assert acceptance_of(4.0, 3) == pytest.approx(1.0)


def test_positions_that_differ() -> None:
    """Accept length 2.30 was published with 0.63 / 0.40 / 0.26 as the chances that so many drafts stand."""
    assert expected_tokens_by_position([0.63, 0.40 / 0.63, 0.26 / 0.40]) == pytest.approx(2.29)


def test_verification_that_costs_more_than_a_plain_step() -> None:
    assert speedup(3.2, 7, 0.0, 16 / 7) == pytest.approx(1.4)  # Mixtral in Cascade: 3.2 tokens a step, 1.4 times faster
