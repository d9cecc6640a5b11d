"""What the benchmark of eight bits reports, on caches and answers whose figures are known."""

from __future__ import annotations

import pytest
import torch

from bench.wire_error import CodingResult, Prefilled, first_difference, kv_of, rates, send
from kvtransfer.eight_bit import Coding, EightBit
from model.kv_layout import KVLayout

LAYOUT = KVLayout("m", "float32", num_layers=2, num_kv_heads=1, head_dim=2, block_size=4)


@pytest.mark.parametrize(
    ("one", "other", "place"), [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [9, 2, 3], 1), ([1, 2, 3], [1, 2, 4], 3)]
)
def test_first_difference(one: list[int], other: list[int], place: int | None) -> None:
    assert first_difference(one, other) == place


def test_share_of_answers_that_differ_by_then() -> None:
    result = CodingResult(Coding.INT8, 0.5, [], [], [3, None, 8, 1], 1.0, 1.0)
    assert [result.share_differing(count) for count in (1, 2, 3, 7, 8, 64)] == [0.25, 0.25, 0.5, 0.5, 0.75, 0.75]


def test_kv_is_that_of_the_prompt_in_order() -> None:
    memory = torch.arange(2 * 6 * 1 * 2 * 4 * 2, dtype=torch.float32).view(2, 6, 1, 2, 4, 2)
    found = kv_of(memory, Prefilled([7] * 6, [5, 1, 3], 0), 4)  # block 3 is room for the answer
    assert found.shape == (2, 1, 2, 6, 2)
    assert torch.equal(found[1, 0, 1, :4], memory[1, 5, 0, 1])
    assert torch.equal(found[1, 0, 0, 4:], memory[1, 1, 0, 0, :2])


def test_sending_changes_the_prompts_blocks_by_little_and_no_others() -> None:
    memory = torch.randn((2, 6, 1, 2, 4, 2), generator=torch.Generator().manual_seed(1))
    before, each = memory.clone(), Prefilled([7] * 6, [5, 1, 3], 0)
    send(EightBit(LAYOUT, Coding.INT8), memory, each)
    assert torch.equal(memory[:, [0, 2, 3, 4]], before[:, [0, 2, 3, 4]])
    assert not torch.equal(memory[:, [1, 5]], before[:, [1, 5]])
    assert torch.allclose(kv_of(memory, each, 4), kv_of(before, each, 4), atol=float(before.abs().max()) / 250)
    assert min(rates(EightBit(LAYOUT, Coding.FP8), memory)) > 0
