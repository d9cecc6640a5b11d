"""A CUDA call only queues work: who is told or answered must find it done. Not run on a GPU yet: see conftest.

A long pause is queued before the step, so that whoever does not wait reads a cache that is still empty.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.runner import Chunk
from model.torch_runner import TorchRunner
from tests.model.tiny_models import build

pytestmark = pytest.mark.gpu

PAUSE_CYCLES = 200_000_000  # about a tenth of a second


@pytest.fixture
def runner(tmp_path: Path) -> TorchRunner:
    build("llama", tmp_path)
    runner = TorchRunner.load(tmp_path, num_blocks=64, block_size=4, device="cuda")
    runner.execute([Chunk([1, 2, 3, 4], 0, [0])])  # what a first step has to set up would hide the order
    return runner


def test_a_told_layer_can_be_read_by_others(runner: TorchRunner) -> None:
    """By another stream, which does not wait for the one that computes: as a transfer does not."""
    memory, other = runner.cache.memory, torch.cuda.Stream()  # [L, N, H, 2, B, D]
    seen: list[Tensor] = []

    def layer_done(layer: int) -> None:
        with torch.cuda.stream(other):
            copy = memory[layer, 3].to("cpu")  # waits for `other` alone
        seen.append(copy)

    torch.cuda._sleep(PAUSE_CYCLES)
    runner.execute([Chunk([5, 6, 7, 8], 0, [3])], layer_done)
    assert len(seen) == runner.layout.num_layers
    for layer, copy in enumerate(seen):
        assert bool(copy.all())
        assert torch.equal(copy, memory[layer, 3].cpu())


def test_a_step_ends_when_the_device_has_ended_it(runner: TorchRunner) -> None:
    torch.cuda._sleep(PAUSE_CYCLES)
    runner.execute([Chunk([5, 6, 7, 8], 0, [3])])  # no token is wanted, so that nothing else waits
    assert torch.cuda.current_stream().query()
