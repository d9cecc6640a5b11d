"""The sender's KV in eight bits: packed from its cache into memory of its own, from where it is written."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvtransfer.agent import Grid, Indices
from kvtransfer.eight_bit import EightBit
from kvtransfer.geometry import CacheSpan
from kvtransfer.staging import Staging
from model.block_sums import BlockSums, RunningSums

NUM_SLOTS, SLOT_BYTES = 64, 1 << 20  # enough that the thread which packs seldom waits for what moves


class Packing:
    """`memory` is the cache [L, N, H, V, B, D]. What is packed goes out from `num_bytes` at `address`, on its device:
    slots of `blocks_per_slot` blocks. But for `start`, all of it is the transfer thread's own.

    On a CUDA device it has a stream of its own, or it would wait for the whole step that is queued.
    """

    def __init__(
        self, codec: EightBit, memory: Tensor, *, num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES
    ) -> None:
        self.coding = codec.coding.value
        self.blocks_per_slot = max(1, slot_bytes // codec.packed_bytes)
        self.staging = Staging(num_slots)
        self._codec = codec
        self._memory = memory
        self._stream = torch.cuda.Stream(memory.device) if memory.device.type == "cuda" else None
        shape = (num_slots * self.blocks_per_slot, codec.packed_bytes)
        self._packed = torch.zeros(shape, dtype=torch.uint8, device=memory.device)
        self._sums = BlockSums(self._packed.expand(codec.layout.num_layers, *shape))  # whatever layer lies there
        self.grid = Grid(self.address, codec.packed_bytes, shape[0])

    @property
    def address(self) -> int:
        return self._packed.data_ptr()

    @property
    def num_bytes(self) -> int:
        return self._packed.nbytes

    def remote_grid(self, span: CacheSpan) -> Grid:
        """Of a peer's cache: the beginning of each layer's part of each block."""
        return Grid(span.base_address, self._codec.packed_bytes, span.grid.num_pieces, span.grid.piece_bytes)

    def start(self, num_blocks: int) -> RunningSums:
        """Sums for `pack`."""
        with self._on_stream():
            return self._sums.start(num_blocks)

    def pack(
        self,
        slot: int,
        layer: int,
        block_ids: Sequence[int],
        num_tokens: int,
        sums: RunningSums | None,
        checked: Sequence[tuple[int, int]],
    ) -> Indices:
        """So many tokens of one layer of these blocks. Returns their indices in `grid`.

        `checked`: indices of blocks whose packed bytes are added to `sums`, each with the slot of its sums."""
        first = slot * self.blocks_per_slot
        end = first + len(block_ids)
        with self._on_stream():
            self._codec.pack(self._memory[layer], block_ids, num_tokens, self._packed[first:end])
            if sums is not None and checked:
                indices, into = zip(*checked, strict=True)
                sums.add(range(layer, layer + 1), [first + index for index in indices], into)
        if self._stream is not None:
            self._stream.synchronize()
        return np.arange(first, end, dtype=np.int32)

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
