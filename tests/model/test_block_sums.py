"""Checksums of KV blocks against a plain reading of their definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model import block_sums
from model.block_sums import BlockSums
from model.kernels.library import KernelsUnavailable, load_fastest


def naive(memory: Tensor, block_id: int) -> tuple[int, int]:
    """Byte by byte."""
    content = memory[:, block_id].contiguous().view(torch.uint8).flatten().tolist()
    s1 = s2 = 0
    for i in range(len(content) // 4):
        word = sum(content[4 * i + k] << (8 * k) for k in range(4))
        s1, s2 = s1 + word, s2 + (i + 1) * word
    return s1 % 2**64, s2 % 2**64


def noise(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    size = dtype.itemsize * torch.Size(shape).numel()
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


@pytest.fixture(params=["kernel", "torch"])
def of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], BlockSums]:
    if request.param == "torch":

        def none() -> None:
            raise KernelsUnavailable("made up")

        monkeypatch.setattr(block_sums, "library", none)
    else:
        load_fastest()  # raises where there is no compiler
    return BlockSums


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 5, 2, 2, 4, 4), torch.float32),
        ((2, 4, 1, 2, 1, 1), torch.bfloat16),  # one word
        ((2, 4, 1, 2, 3, 3), torch.bfloat16),  # nine words: one row of lanes and one left over
        ((2, 4, 3, 2, 16, 5), torch.float16),
    ],
)
def test_sums_are_those_of_the_definition(
    of: Callable[[Tensor], BlockSums], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    memory = noise(shape, dtype)
    sums = of(memory).start(3)
    sums.add(range(shape[0]), [2, 0, 3], [0, 2, 1])
    assert sums.values() == (*naive(memory, 2), *naive(memory, 3), *naive(memory, 0))


def test_sums_wrap_around(of: Callable[[Tensor], BlockSums]) -> None:
    memory = torch.full((3, 2, 8, 2, 64, 64), -1, dtype=torch.int32).view(torch.float32)  # every word is 2^32 - 1
    num_words = 3 * 8 * 2 * 64 * 64
    sums = of(memory).start(1)
    sums.add(range(3), [1], [0])
    word = 2**32 - 1
    assert sums.values() == (num_words * word, word * num_words * (num_words + 1) // 2 % 2**64)
    assert word * num_words * (num_words + 1) // 2 > 2**64


def test_layers_add_up_in_any_order(of: Callable[[Tensor], BlockSums]) -> None:
    memory = noise((3, 5, 2, 2, 4, 4))
    sums = of(memory).start(2)
    for layer, blocks in ((2, [4, 1]), (0, [4, 1]), (1, [4])):
        sums.add(range(layer, layer + 1), blocks, [0, 1][: len(blocks)])
    sums.add(range(1, 2), [1], [1])
    assert sums.values() == (*naive(memory, 4), *naive(memory, 1))


@pytest.mark.parametrize("change", ["bit", "swap", "layers"])
def test_what_changed_shows(of: Callable[[Tensor], BlockSums], change: str) -> None:
    memory = noise((3, 5, 2, 2, 4, 4))
    words = memory.view(torch.int32).view(3, 5, -1)
    summer = of(memory)
    before = summer.start(1)
    before.add(range(3), [2], [0])
    if change == "bit":
        words[1, 2, 17] ^= 1 << 30
    elif change == "swap":
        words[1, 2, [3, 40]] = words[1, 2, [40, 3]]
    else:
        words[[0, 2], 2] = words[[2, 0], 2]
    after = summer.start(1)
    after.add(range(3), [2], [0])
    assert after.values() != before.values()
    assert (after.values()[0] != before.values()[0]) == (change == "bit")


def test_only_the_first_bytes_of_each_layer_of_a_block_are_summed(of: Callable[[Tensor], BlockSums]) -> None:
    memory = noise((3, 5, 2, 2, 4, 4))
    first = memory.view(3, 5, -1).view(torch.uint8)[:, :, :80]
    summer = of(first)
    assert summer.block_bytes == 3 * 80
    sums = summer.start(2)
    sums.add(range(3), [4, 1], [0, 1])
    assert sums.values() == (*naive(first, 4), *naive(first, 1))


def test_whatever_layer_lies_there_is_weighted_as_that_layer(of: Callable[[Tensor], BlockSums]) -> None:
    """Memory that one layer after the other is put into, in the place of any block."""
    layers = noise((3, 1, 96), torch.uint8)
    there = torch.zeros((7, 96), dtype=torch.uint8)
    sums = of(there.expand(3, 7, 96)).start(1)
    for layer, place in ((2, 6), (0, 3), (1, 6)):
        there[place] = layers[layer, 0]
        sums.add(range(layer, layer + 1), [place], [0])
    assert sums.values() == naive(layers, 0)
