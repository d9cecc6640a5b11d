"""The tensor that holds keys and values of all blocks, and how many blocks a given memory has room for.

Letters as in `model.kv_layout`: the cache is [L, N, H, 2, B, D]. On the CPU it starts on a page of its own, so that it
can be registered for transfers, and takes memory only as blocks are first written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from model.huge_pages import allocate
from model.kv_layout import KVLayout

GIB = 1 << 30


class CacheDoesNotFit(ValueError):
    """The memory given or available is too little for the cache that is needed. Names bytes and the flag to turn."""


def num_blocks_that_fit(layout: KVLayout, num_bytes: int) -> int:
    return num_bytes // layout.block_bytes


class PagedKVCache:
    """`memory` is [L, N, H, 2, B, D]; a slot is block id * B + offset of the token in it."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.memory = _allocate(layout, num_blocks, device)

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def keys(self, layer: int) -> Tensor:
        return self.memory[layer, :, :, 0]  # [N, H, B, D]

    def values(self, layer: int) -> Tensor:
        return self.memory[layer, :, :, 1]  # [N, H, B, D]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values [T, H, D] of T tokens into their slots [T]."""
        blocks, offsets = slots // self.layout.block_size, slots % self.layout.block_size
        self.keys(layer)[blocks, :, offsets] = keys.to(self.memory.dtype)
        self.values(layer)[blocks, :, offsets] = values.to(self.memory.dtype)

    def move(self, sources: Sequence[int], targets: Sequence[int], num_layers: int) -> None:
        """Keys and values of the first layers from slots to slots, as if all were read before one is written."""
        size = self.layout.block_size
        old, new = (torch.tensor(slots, device=self.memory.device) for slots in (sources, targets))
        moved = self.memory[:num_layers, old // size, :, :, old % size]  # a copy
        self.memory[:num_layers, new // size, :, :, new % size] = moved


def check_memory(layout: KVLayout, num_blocks: int, max_sequence_tokens: int, available_bytes: int) -> None:
    """Raises CacheDoesNotFit unless one sequence of full length fits the blocks, and the blocks the memory."""
    needed = layout.num_blocks(max_sequence_tokens)
    if num_blocks < needed:
        raise CacheDoesNotFit(
            f"a KV cache of {num_blocks} blocks ({_gib(num_blocks * layout.block_bytes)}) cannot hold one sequence of "
            f"{max_sequence_tokens} tokens, which takes {needed} blocks ({_gib(needed * layout.block_bytes)}): raise "
            f"--kv-cache-gb to at least {needed * layout.block_bytes / GIB:.3g} or --num-blocks to {needed}, or cap "
            "sequences with --max-context"
        )
    num_bytes = num_blocks * layout.block_bytes
    if num_bytes > available_bytes:
        raise CacheDoesNotFit(
            f"a KV cache of {num_blocks} blocks takes {num_bytes} bytes ({_gib(num_bytes)}), but {available_bytes} "
            f"({_gib(available_bytes)}) are available beside the weights: lower --kv-cache-gb or --num-blocks"
        )


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken: the GPU's, or the machine's within the limit of this container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, max(0, int(text) - int(used.read_text())))
    return free


def _allocate(layout: KVLayout, num_blocks: int, device: torch.device) -> Tensor:
    heads = (layout.num_kv_heads, layout.num_vectors)
    shape = (layout.num_layers, num_blocks, *heads, layout.block_size, layout.head_dim)
    dtype: torch.dtype = getattr(torch, layout.dtype)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(allocate(num_blocks * layout.block_bytes), dtype=dtype).view(shape)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
