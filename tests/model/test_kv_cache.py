"""Moving tokens in the cache, against the same on a plain list."""

from __future__ import annotations

import random

import pytest
import torch

from model.kv_cache import PagedKVCache
from model.kv_layout import KVLayout


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        ([7, 9, 10], [6, 7, 8]),
        ([3, 2], [2, 3]),  # all are read before one is written
        (random.Random(1).sample(range(24), 9), random.Random(2).sample(range(24), 9)),
    ],
)
def test_slots_are_moved_in_the_first_layers_alone(sources: list[int], targets: list[int]) -> None:
    num_layers, num_blocks, num_heads, size, head_dim = 3, 6, 2, 4, 5
    cache = PagedKVCache(
        KVLayout("digest", "float32", num_layers, num_heads, head_dim, size), num_blocks, torch.device("cpu")
    )
    before = torch.randn(cache.memory.shape, generator=torch.Generator().manual_seed(0))
    cache.memory.copy_(before)
    cache.move(sources, targets, 2)
    expected = before.clone()
    for layer in range(2):
        for source, target in zip(sources, targets, strict=True):
            for head in range(num_heads):
                for kind in range(2):
                    vector = before[layer, source // size, head, kind, source % size]
                    expected[layer, target // size, head, kind, target % size] = vector
    assert torch.equal(cache.memory, expected)
