"""KV of blocks in eight bits, by the C kernels. What it is says `kvtransfer.eight_bit`, which has it in torch too."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from model.kernels.library import KernelsUnavailable
from model.kernels.parts import TYPES, library


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """Of layers [N, H, V, B, D] in host memory, contiguous. It releases the GIL; nothing is checked here.

    Codes are e4m3, or else integers; scales from `smallest_scale` to `largest_scale`.
    """

    kernels: ctypes.CDLL
    is_e4m3: bool
    smallest_scale: float
    largest_scale: float

    def pack(self, layer: Tensor, block_ids: Sequence[int], num_last_tokens: int, packed: Tensor) -> None:
        """Into `packed` [blocks, bytes]; of the last block so many tokens."""
        _, num_heads, num_vectors, block_size, head_dim = layer.shape
        self.kernels.pack_blocks(
            layer.data_ptr(),
            TYPES[layer.dtype],
            num_heads * num_vectors,
            block_size * head_dim,
            (ctypes.c_long * len(block_ids))(*block_ids),
            len(block_ids),
            num_last_tokens * head_dim,
            self.is_e4m3,
            self.smallest_scale,
            self.largest_scale,
            packed.data_ptr(),
            packed.shape[1],
        )

    def unpack(self, packed: Tensor, layer: Tensor, block_ids: Sequence[int]) -> None:
        _, num_heads, num_vectors, block_size, head_dim = layer.shape
        self.kernels.unpack_blocks(
            packed.data_ptr(),
            packed.shape[1],
            self.is_e4m3,
            num_heads * num_vectors,
            block_size * head_dim,
            layer.data_ptr(),
            TYPES[layer.dtype],
            (ctypes.c_long * len(block_ids))(*block_ids),
            len(block_ids),
        )


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """None where they cannot run."""
    try:
        return library()[1]
    except KernelsUnavailable:
        return None
