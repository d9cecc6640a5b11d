"""Memory in pages of 2 MiB. Every step reads all weights and the context once, and with pages of 4 KiB as much time may
go into finding the pages as into reading them: measured in a virtual machine, 12 GB/s against 26.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

PAGE_BYTES = 2 << 20
ALIGNMENT = 64  # a cache line, as the kernels like it


def allocate(num_bytes: int) -> mmap.mmap:
    """Private, zero, and taken from the machine only as it is first written. Where there are none, of small pages."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class Arena:
    """Hands out such memory for tensors, each on a cache line of its own, from pieces of at least so many bytes."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._free = torch.empty(0, dtype=torch.uint8)

    def copied(self, tensor: Tensor) -> Tensor:
        num_bytes = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if num_bytes > len(self._free):
            self._free = _whole_pages(max(num_bytes, self._piece_bytes))
        memory, self._free = self._free[: tensor.nbytes], self._free[num_bytes:]
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors in such memory. Tensors that share memory share their copy."""
    distinct = {_place(tensor): tensor for tensor in tensors.values()}
    arena = Arena(sum(tensor.nbytes + ALIGNMENT for tensor in distinct.values()))
    copies = {place: arena.copied(tensor) for place, tensor in distinct.items()}
    return {name: copies[_place(tensor)].view(tensor.dtype).view(tensor.shape) for name, tensor in tensors.items()}


def _whole_pages(num_bytes: int) -> Tensor:
    pages = allocate(-(-max(num_bytes, 1) // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE_BYTES :]


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes
