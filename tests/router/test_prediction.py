"""Predictions against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prediction import Pace, Speed, num_free_blocks_at
from tests.router.test_placement import D, worker

FAST = replace(worker("w", D), prefill_tokens_per_s=2000.0, decode_step_s=0.020, decode_batch=16.0, tokens_per_step=2.0)


def test_a_worker_that_has_measured_nothing_predicts_nothing() -> None:
    pace = Pace.of(worker("w", D))
    assert (pace.prefill_s(100), pace.tpot_s(3)) == (None, None)
    assert Speed.of(pace, Pace(0.001, 0.001)) == Speed(0, 0)  # as good as any


def test_prompts_take_their_tokens_at_the_measured_speed() -> None:
    assert Pace.of(FAST).prefill_s(500) == pytest.approx(0.25)


@pytest.mark.parametrize(
    "num_sequences, tpot_s",
    [
        (16, 0.010),  # as measured: a step of 20 ms gives each sequence two tokens
        (36, 0.015),  # a step has a fixed part, worth 24 sequences: (24 + 36) / (24 + 16) of it
        (1, 0.00625),  # (24 + 1) / 40 of 10 ms
    ],
)
def test_a_token_takes_its_share_of_a_step(num_sequences: int, tpot_s: float) -> None:
    assert Pace.of(FAST).tpot_s(num_sequences) == pytest.approx(tpot_s)


def test_drafts_that_are_all_rejected_do_not_make_a_worker_slower_than_its_steps() -> None:
    """A step gives each sequence a token at least; one that has not said is taken to give one."""
    assert Pace.of(replace(FAST, tokens_per_step=0.0)).tpot_s(16) == pytest.approx(0.020)


@pytest.mark.parametrize(
    "tokens_per_s, steps",
    [(1000, 0), (830, 0), (1210, 0), (800, 1), (1230, -1), (667, 1), (500, 2), (100, 6), (10_000, -6)],
)
def test_speeds_that_differ_by_noise_are_taken_for_equal(tokens_per_s: float, steps: int) -> None:
    """From 1,000 tokens a second on in steps of 1.49, of which half a one is a factor of 1.22."""
    typical = Pace(0.001, 0.002)
    speed = Speed.of(Pace.of(replace(FAST, prefill_tokens_per_s=tokens_per_s)), typical)
    assert speed.token == steps
    assert speed.pace(typical).token_s == pytest.approx(0.001 * 1.49**steps)


@given(st.floats(1e-6, 1.0), st.floats(0.01, 100.0), st.floats(1.5, 50.0))
def test_a_factor_of_one_and_a_half_is_never_taken_for_noise(typical_s: float, factor: float, ratio: float) -> None:
    typical = Pace(typical_s, None)
    fast, slow = (Speed.of(Pace(typical_s * factor * times, None), typical).token for times in (1.0, ratio))
    assert slow > fast


@pytest.mark.parametrize(
    "age_s, tokens_per_s",
    [
        (0, 62.5),
        (10, 62.5),
        (35, 250.0),  # half of the way to 1,000, in doublings
        (60, 1000.0),
        (3600, 1000.0),
    ],
)
def test_what_was_measured_long_ago_says_little(age_s: float, tokens_per_s: float) -> None:
    old = replace(FAST, prefill_tokens_per_s=62.5, prefill_age_s=age_s)
    aged = Pace.of(old).aged(old, Pace(0.001, None))
    assert aged.token_s == pytest.approx(1 / tokens_per_s)
    assert aged.sequence_s == Pace.of(FAST).sequence_s  # nobody else has measured that
    decoded = replace(FAST, decode_age_s=60.0)
    assert Pace.of(decoded).aged(decoded, Pace(0.001, 0.5)).sequence_s == pytest.approx(0.5)


@pytest.mark.parametrize("extreme", [5e-324, 1e-300, 1e300, 1.7e308])
def test_whatever_a_worker_says_of_its_speed_can_be_reckoned_with(extreme: float) -> None:
    for field in ("prefill_tokens_per_s", "decode_step_s", "decode_batch", "tokens_per_step"):
        found, typical = Pace.of(replace(FAST, **{field: extreme})), Pace(0.001, 0.001)  # type: ignore[arg-type]
        pace = Speed.of(found, typical).pace(typical)
        assert pace.token_s is not None and 0 < pace.token_s < 1e7
        assert pace.sequence_s is not None and 0 < pace.sequence_s < 1e7


def test_blocks_are_predicted_from_what_grows_and_what_is_known_to_end() -> None:
    """16 sequences at 10 ms a token write 100 tokens each in a second: 1,600 tokens, which are 100 blocks of 16."""
    sequence_s = Pace.of(FAST).sequence_s
    running = replace(FAST, num_active=16, num_free_blocks=150)
    assert num_free_blocks_at(running, 50.0, 0.0, sequence_s, 16) == 150
    assert num_free_blocks_at(running, 50.0, 1.0, sequence_s, 16) == pytest.approx(50)
    ending = replace(running, releases=((49.0, 7), (50.5, 30), (51.0, 20), (51.1, 99)))  # one should have ended before
    assert num_free_blocks_at(ending, 50.0, 1.0, sequence_s, 16) == pytest.approx(100)
    assert num_free_blocks_at(ending, 50.0, 1.0, None, 16) == 200
    assert num_free_blocks_at(running, 50.0, 2.0, sequence_s, 16) == pytest.approx(-50)
    assert num_free_blocks_at(running, 50.0, 60.0, sequence_s, 16) == pytest.approx(-50)  # as far as is looked ahead
