"""What a worker says of its speed: means of steps of each kind, and nothing before there was one."""

from __future__ import annotations

import pytest

from deploy.step_meter import StepMeter
from model.runner import Chunk, SampledToken, StepOutput, VerifiedDraft


def chunk(num_tokens: int) -> Chunk:
    return Chunk([1] * num_tokens, 0, [0])


def test_speeds_of_prompts_and_of_decoding_are_told_apart() -> None:
    meter = StepMeter()
    assert (meter.prefill_tokens_per_s, meter.decode_step_s, meter.decode_batch, meter.tokens_per_step) == (0, 0, 0, 0)
    meter.observe([chunk(100), chunk(1)], StepOutput((None, SampledToken(1)), compute_s=0.1))
    assert meter.prefill_tokens_per_s == pytest.approx(1010)
    assert meter.decode_step_s == 0
    three = tuple(SampledToken(token) for token in range(3))
    meter.observe([chunk(1), chunk(1)], StepOutput((SampledToken(1), VerifiedDraft(three, 4)), compute_s=0.02))
    assert (meter.decode_step_s, meter.decode_batch, meter.tokens_per_step) == (0.02, 2, 2.0)
    meter.observe([chunk(1)], StepOutput((SampledToken(1),), compute_s=0.03))
    assert meter.decode_step_s == pytest.approx(0.021)
    assert meter.decode_batch == pytest.approx(1.9)
    assert meter.tokens_per_step == pytest.approx(1.9)
    assert meter.prefill_tokens_per_s == pytest.approx(1010)


def test_after_a_pause_the_newest_step_counts_for_more() -> None:
    """What was before may have been a neighbour's doing: after half a minute it counts half, after one not at all."""
    clock = [0.0]
    meter = StepMeter(lambda: clock[0])

    def step(num_tokens: int, took_s: float) -> None:
        meter.observe([chunk(num_tokens)], StepOutput((SampledToken(1),), took_s))

    assert (meter.prefill_age_s, meter.decode_age_s) == (0, 0)
    step(1000, 10.0)
    step(1, 0.4)
    clock[0] = 3.0
    step(1000, 1.0)
    assert meter.prefill_tokens_per_s == pytest.approx(100 + 0.1 * 900)
    assert (meter.prefill_age_s, meter.decode_age_s) == (0, 3)
    clock[0] = 33.0
    step(1000, 1.0)
    assert meter.prefill_tokens_per_s == pytest.approx((190 + 1000) / 2)
    clock[0] = 93.0
    step(1000, 0.5)
    step(1, 0.02)
    assert meter.prefill_tokens_per_s == pytest.approx(2000)
    assert (meter.decode_step_s, meter.decode_batch, meter.tokens_per_step) == pytest.approx((0.02, 1, 1))
    assert (meter.prefill_age_s, meter.decode_age_s) == (0, 0)
