"""Warming up: a prompt and a decode step run before anybody asks, in the blocks that are there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deploy.runners import warm_up
from model.kv_layout import KVLayout
from model.runner import Chunk, LayerDone, StepOutput
from model.timed_runner import StepTiming, TimedRunner


class Recorder(TimedRunner):
    def __init__(self, num_blocks: int) -> None:
        layout = KVLayout("m", "float32", num_layers=1, num_kv_heads=1, head_dim=4, block_size=4)
        super().__init__(layout, num_blocks, StepTiming(scale=0.0), vocab_size=100)
        self.ran: list[tuple[int, int]] = []  # start and number of tokens of each chunk

    def execute(self, chunks: Sequence[Chunk], layer_done: LayerDone | None = None) -> StepOutput:
        self.ran += [(chunk.start, len(chunk.token_ids)) for chunk in chunks]
        return super().execute(chunks, layer_done)


@pytest.mark.parametrize(("num_blocks", "num_tokens"), [(50, 32), (3, 11), (1, 3)])
def test_a_prompt_and_a_decode_step_are_run(num_blocks: int, num_tokens: int) -> None:
    runner = Recorder(num_blocks)
    warm_up(runner, 32)
    assert runner.ran == [(0, num_tokens), (num_tokens, 1)]
