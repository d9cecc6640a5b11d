"""The receiver's side of KV in eight bits: blocks in which the packed bytes of each layer lie at its beginning become
what they were, in their place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from kvtransfer.coding import codings
from kvtransfer.eight_bit import Coding, EightBit
from model.block_sums import BlockSums
from model.kv_layout import KVLayout

_BLOCKS_AT_ONCE = 64  # bounds what is copied out of the way for a moment


class Unpacking:
    """`memory` is the cache [L, N, H, V, B, D]. On a CUDA device it has a stream of its own, as `Packing` has."""

    def __init__(self, layout: KVLayout, memory: Tensor) -> None:
        self._layout = layout
        self._memory = memory
        self._bytes = memory.view(layout.num_layers, memory.shape[1], -1).view(torch.uint8)  # [L, N, bytes]
        self._stream = torch.cuda.Stream(memory.device) if memory.device.type == "cuda" else None

    @property
    def codings(self) -> tuple[str, ...]:
        return codings(self._layout)

    def sums(self, coding: str) -> BlockSums:
        """Of packed bytes where they lie."""
        return BlockSums(self._bytes[:, :, : self._codec(coding).packed_bytes])

    def unpack(self, coding: str, block_ids: Sequence[int]) -> None:
        """Takes its time; any thread may call it. Nobody else may read or write these blocks meanwhile."""
        codec = self._codec(coding)
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for start in range(0, len(block_ids), _BLOCKS_AT_ONCE):
                some = block_ids[start : start + _BLOCKS_AT_ONCE]
                indices = torch.tensor(some, device=self._memory.device)
                for layer, packed in zip(self._memory, self._bytes[:, :, : codec.packed_bytes], strict=True):
                    codec.unpack(packed.index_select(0, indices), layer, some)
        if self._stream is not None:
            self._stream.synchronize()

    def _codec(self, coding: str) -> EightBit:
        return EightBit(self._layout, Coding(coding))
