"""Predictions against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.prediction import Pace, num_free_blocks_at
from tests.router.test_placement import D, worker

FAST = replace(worker("w", D), prefill_tokens_per_s=2000.0, decode_step_s=0.020, decode_batch=16.0, tokens_per_step=2.0)


def test_a_worker_that_has_measured_nothing_predicts_nothing() -> None:
    pace = Pace.of(worker("w", D))
    assert (pace.prefill_s(100), pace.tpot_s(3), pace.rounded()) == (None, None, Pace(None, None))


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


def test_speeds_that_differ_by_noise_are_taken_for_equal() -> None:
    def token_s(tokens_per_s: float) -> float | None:
        return Pace.of(replace(FAST, prefill_tokens_per_s=tokens_per_s)).rounded().token_s

    assert token_s(2048) == token_s(2000) == token_s(2200) == 2**-11
    assert token_s(2500) == pytest.approx(2**-11.25)


@pytest.mark.parametrize("extreme", [5e-324, 1e-300, 1e300, 1.7e308])
def test_whatever_a_worker_says_of_its_speed_can_be_reckoned_with(extreme: float) -> None:
    for field in ("prefill_tokens_per_s", "decode_step_s", "decode_batch", "tokens_per_step"):
        pace = Pace.of(replace(FAST, **{field: extreme})).rounded()  # type: ignore[arg-type]
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
