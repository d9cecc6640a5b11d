"""A KV cache of plain bytes, and hashes of made-up prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from model.block_pool import hash_blocks
from model.kv_layout import KVLayout

LAYOUT = KVLayout(model_digest="tiny", dtype="float32", num_layers=3, num_kv_heads=2, head_dim=4, block_size=4)
NUM_BLOCKS = 32


class Cache:
    """Laid out as [L, N, bytes of one layer's part of a block]; noise, unless filled."""

    def __init__(self, layout: KVLayout = LAYOUT, num_blocks: int = NUM_BLOCKS, *, fill: int | None = None) -> None:
        shape = (layout.num_layers, num_blocks, layout.layer_block_bytes)
        if fill is None:
            self.array = np.random.default_rng(7).integers(0, 255, shape, dtype=np.uint8)
        else:
            self.array = np.full(shape, fill, dtype=np.uint8)
        self.address = self.array.ctypes.data
        self.num_bytes = self.array.nbytes

    def blocks(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        return self.array[:, list(block_ids)]


def hashes_of(num_tokens: int, first: int = 0, layout: KVLayout = LAYOUT) -> list[bytes]:
    """Of the full blocks of tokens first, first + 1, ..."""
    return hash_blocks(range(first, first + num_tokens), layout.block_size)
