"""The same seeds give the same tokens on the device as on the CPU. Not run on a GPU yet: see conftest.

The random bits are integer arithmetic and equal; their logarithms may differ in the last bit, which decides between two
tokens about once in a million draws.
"""

from __future__ import annotations

import math

import pytest
import torch

from model.randomness import Purpose, bits, gumbel_noise, seed_tensor
from model.runner import NonFiniteLogits, SampledToken
from model.sampling import sample
from tests.model.sampling_cases import mixed_rows, random_logits

pytestmark = pytest.mark.gpu

SEEDS, POSITIONS, INDEXES = seed_tensor([0, 7, 2**64 - 1]), torch.tensor([0, 3, 2**31]), torch.arange(5000)


def test_random_bits_are_equal() -> None:
    there = bits(SEEDS.cuda(), POSITIONS.cuda(), Purpose.SAMPLE, INDEXES.cuda())
    assert torch.equal(there.cpu(), bits(SEEDS, POSITIONS, Purpose.SAMPLE, INDEXES))


def test_noise_is_equal_but_for_its_last_bits() -> None:
    there = gumbel_noise(SEEDS.cuda(), POSITIONS.cuda(), Purpose.SAMPLE, INDEXES.cuda())
    here = gumbel_noise(SEEDS, POSITIONS, Purpose.SAMPLE, INDEXES)
    torch.testing.assert_close(there.cpu(), here, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocab", [300, 150_000])
def test_every_kind_of_row_gets_the_token_of_the_cpu(vocab: int) -> None:
    logits, rows = random_logits(60, seed=5, vocab=vocab), mixed_rows(60)
    there, here = sample(logits.cuda(), rows), sample(logits, rows)
    for found, expected in zip(there, here, strict=True):
        assert isinstance(found, SampledToken) and isinstance(expected, SampledToken)
        assert found.token_id == expected.token_id
        assert (found.logprobs is None) == (expected.logprobs is None)
        if found.logprobs is not None and expected.logprobs is not None:
            assert found.logprobs.chosen == pytest.approx(expected.logprobs.chosen, abs=1e-4)
            assert [token for token, _ in found.logprobs.top] == [token for token, _ in expected.logprobs.top]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_have_no_token(bad: float) -> None:
    logits, rows = random_logits(20, seed=2), mixed_rows(20)
    logits[3, 17] = bad
    outcomes = sample(logits.cuda(), rows)
    assert [index for index, outcome in enumerate(outcomes) if isinstance(outcome, NonFiniteLogits)] == [3]
