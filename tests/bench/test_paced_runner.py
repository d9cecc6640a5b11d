"""That the runner of bench.handover says layers are there in order, when they are due, and without writing anything."""

from __future__ import annotations

import time

import numpy as np
import pytest

from bench.paced_runner import PacedRunner
from model.kv_layout import KVLayout
from model.runner import Chunk, SampledToken
from model.sampling_params import SamplingParams

LAYOUT = KVLayout("m", "bfloat16", num_layers=4, num_kv_heads=1, head_dim=4, block_size=4)
NUM_TOKENS = 8
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.fixture
def runner() -> PacedRunner:
    return PacedRunner(LAYOUT, num_blocks=4)


def chunk(start: int, *, is_last: bool = False) -> Chunk:
    return Chunk([1] * NUM_TOKENS, start, [0, 1, 2, 3], GREEDY if is_last else None, [1] * (start + NUM_TOKENS))


def test_layers_come_in_order_and_none_before_it_is_due(runner: PacedRunner) -> None:
    runner.pace(0.01)  # 80 ms a chunk, 20 ms a layer
    came: list[tuple[int, float]] = []
    started = time.perf_counter()
    output = runner.execute([chunk(0)], lambda layer: came.append((layer, time.perf_counter() - started)))
    assert [layer for layer, _ in came] == [0, 1, 2, 3]
    assert all(at >= 0.02 * (layer + 1) for layer, at in came)
    assert output.sampled == (None,)
    assert output.compute_s >= 0.08


def test_a_chunk_that_is_asked_for_late_catches_up_with_the_plan(runner: PacedRunner) -> None:
    runner.pace(0.01)
    started = time.perf_counter()
    runner.execute([chunk(0)])
    time.sleep(0.065)  # three of the next chunk's layers are due
    asked, waited_s = time.perf_counter(), list[float]()
    output = runner.execute([chunk(NUM_TOKENS, is_last=True)], lambda _: waited_s.append(time.perf_counter() - asked))
    assert waited_s[2] < 0.01
    assert time.perf_counter() - started >= 0.16
    assert output.sampled == (SampledToken(0),)


def test_another_prompt_starts_anew(runner: PacedRunner) -> None:
    runner.pace(0.01)
    runner.execute([chunk(0)])
    time.sleep(0.1)
    asked = time.perf_counter()
    runner.execute([chunk(0)])
    assert time.perf_counter() - asked >= 0.08


def test_content_is_random_stays_and_is_renewed_in_every_layer_of_every_block(runner: PacedRunner) -> None:
    words = runner.cache_memory.numpy().view(np.uint64).reshape(4, 4, -1)  # [L, N, words of a layer's block]
    assert len(np.unique(words)) == words.size
    before = words.copy()
    runner.execute([chunk(0, is_last=True)])
    assert np.array_equal(words, before)
    runner.renew()
    assert ((words != before).sum(axis=2) == 1).all()
