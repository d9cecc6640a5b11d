"""What a simulated worker says of its speed is what `deploy.step_meter` says, of the same steps one by one."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest

from deploy.step_meter import StepMeter
from kvtransfer.transfer_meter import TransferMeter
from model.runner import Chunk, SampledToken, StepOutput
from model.sampling_params import SamplingParams
from router.simulated_meter import SimulatedMeter
from router.step_tally import StepTally

GREEDY = SamplingParams(temperature=0, max_tokens=10)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("seed", range(5))
def test_says_what_the_real_meter_says(seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    real, simulated = StepMeter(clock), SimulatedMeter(clock)
    real.tallies.append(tally := StepTally())
    for _ in range(12):
        clock.now += rng.choice([0.0, 0.0, 20.0, 90.0])
        if rng.random() < 0.3:
            num_tokens = rng.randint(2, 500)
            clock.now += 0.2
            real.observe([a_chunk(num_tokens)], StepOutput((None,), 0.2))
            simulated.prefilled(num_tokens, 0.2, num_tokens * num_tokens)
            assert simulated.tally.take() == tally.take()
        else:
            number, first_s, more_s, num_sequences = rng.randint(1, 15), 0.02, 1e-4, rng.randint(1, 5)
            tokens = tuple(SampledToken(1) for _ in range(num_sequences))
            for index in range(number):
                step_s = first_s + index * more_s
                chunk = Chunk([1], 1100 + index, [0], GREEDY, [1] * (1101 + index), 1)
                real.observe([chunk] * num_sequences, StepOutput(tokens, step_s))
                clock.now += step_s * (index < number - 1)
            last_s = first_s + (number - 1) * more_s
            simulated.decoded(number, num_sequences, first_s, last_s, 1.0, num_sequences * (1101 + (number - 1) / 2))
            (told,), (expected,) = simulated.tally.take(), tally.take()
            assert astuple(told) == pytest.approx(astuple(expected))
        for name in ("prefill_tokens_per_s", "decode_batch", "tokens_per_step"):
            assert getattr(simulated, name) == pytest.approx(getattr(real, name), rel=1e-2), name
        assert simulated.decode_step_s == pytest.approx(real.decode_step_s, rel=1e-2)


def test_transfers_fade_as_the_real_ones() -> None:
    clock = Clock()
    real, simulated = TransferMeter(clock), SimulatedMeter(clock)
    for num_bytes, seconds, pause_s in ((1000, 0.5, 10.0), (4000, 1.0, 45.0), (10, 0.1, 5.0)):
        real.began("peer", num_bytes, clock.now)
        clock.now += seconds
        real.ended("peer", num_bytes, well=True)
        simulated.transferred(num_bytes, seconds)
        clock.now += pause_s
        transferred = real.transferred
        assert simulated.transfers == pytest.approx((transferred.num_bytes, transferred.seconds), rel=1e-6)


def a_chunk(num_tokens: int) -> Chunk:
    return Chunk([1] * num_tokens, 0, [0], GREEDY, [1] * num_tokens, num_tokens)
