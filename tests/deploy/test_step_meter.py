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
