"""Checksums of KV blocks, by which a decode worker sees whether what it received is what was sent.

Of the words w_0, w_1, ... of a block, 32 bits each, little-endian, layer after layer: the sum of w_i and that of
(i + 1) w_i, modulo 2^64. They show a changed word, words that changed places, and old content; sums of layers add up.
Letters as in `model.kv_layout`; W words of one layer's part of a block.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from model.kernels.library import KernelsUnavailable
from model.kernels.parts import library

_MODULUS = 1 << 64


class RunningSums(Protocol):
    """Not for two threads at once."""

    def add(self, layers: range, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """The layers of each block, to the sums at its slot. Each layer of a block counts once."""
        ...

    def values(self) -> tuple[int, ...]:
        """Both sums of slot 0, then of slot 1, ..."""
        ...


class BlockSums:
    """Of a cache [L, N, H, 2, B, D]: in C where it lies in host memory and the kernels can run, else in torch.

    Or of a tensor [L, N, bytes] whose bytes are contiguous, such as the first ones of each layer's part of each block.
    """

    def __init__(self, memory: Tensor) -> None:
        self._words = memory.view(memory.shape[0], memory.shape[1], -1).view(torch.int32)  # [L, N, W]
        self._kernels: ctypes.CDLL | None = None
        if memory.device.type == "cpu":
            with contextlib.suppress(KernelsUnavailable):
                _, self._kernels = library()

    @property
    def layers(self) -> range:
        return range(len(self._words))

    @property
    def block_bytes(self) -> int:
        return self._words[:, 0].numel() * 4

    def clear(self, num_blocks: int) -> None:
        """The first blocks, with zeros."""
        self._words[:, :num_blocks] = 0

    def start(self, num_blocks: int) -> RunningSums:
        """Sums of that many blocks, zero at first."""
        if self._kernels is not None:
            return _KernelSums(self._kernels, self._words, num_blocks)
        return _TorchSums(self._words, num_blocks)


class _KernelSums:
    """Releases the GIL while it adds."""

    def __init__(self, kernels: ctypes.CDLL, words: Tensor, num_blocks: int) -> None:
        self._kernels, self._words = kernels, words
        self._sums = (ctypes.c_uint64 * (2 * num_blocks))()

    def add(self, layers: range, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        per_layer, per_block, _ = self._words.stride()
        array = ctypes.c_long * len(block_ids)
        self._kernels.block_sums(
            self._words.data_ptr(),
            per_layer,
            per_block,
            self._words.shape[2],
            layers.start,
            layers.stop,
            array(*block_ids),
            array(*slots),
            len(block_ids),
            self._sums,
        )

    def values(self) -> tuple[int, ...]:
        return tuple(self._sums)


class _TorchSums:
    """int64 that overflows is arithmetic modulo 2^64."""

    def __init__(self, words: Tensor, num_blocks: int) -> None:
        self._words = words
        self._sums = torch.zeros((num_blocks, 2), dtype=torch.int64, device=words.device)

    def add(self, layers: range, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        device, num_words = self._words.device, self._words.shape[2]
        blocks, into = torch.tensor(block_ids, device=device), torch.tensor(slots, device=device)
        places = torch.arange(1, num_words + 1, device=device)
        for layer in layers:
            words = self._words[layer, blocks].long() & 0xFFFFFFFF  # [number of blocks, W]
            sums = torch.stack((words.sum(1), (words * (places + layer * num_words)).sum(1)), dim=1)
            self._sums.index_add_(0, into, sums)

    def values(self) -> tuple[int, ...]:
        return tuple(value % _MODULUS for value in self._sums.flatten().tolist())
