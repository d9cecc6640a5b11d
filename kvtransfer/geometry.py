"""Which bytes of one cache belong into which bytes of another. Pure arithmetic: it touches no memory.

A cache is one array [L, N, H, 2, B, D] (letters in `model.kv_layout`), so blocks with consecutive ids are adjacent
within a layer, and a run that is consecutive on both sides is one region.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtransfer.agent import Region
from model.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class CacheSpan:
    """Where a worker's cache lies: `num_blocks` blocks of `layout` from `base_address` on."""

    layout: KVLayout
    base_address: int
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    def address(self, layer: int, block_id: int) -> int:
        """Of the first byte of one layer's part of one block."""
        if not 0 <= layer < self.layout.num_layers:
            raise ValueError(f"layer {layer} is not one of {self.layout.num_layers}")
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} is not one of {self.num_blocks}")
        return self.base_address + (layer * self.num_blocks + block_id) * self.layout.layer_block_bytes


def regions(
    local: CacheSpan,
    remote: CacheSpan,
    layer: int,
    local_block_ids: Sequence[int],
    remote_block_ids: Sequence[int],
) -> list[Region]:
    """Bytes of one layer to copy so that each remote block holds what the local block at the same index holds."""
    if len(local_block_ids) != len(remote_block_ids):
        raise ValueError(f"{len(local_block_ids)} local blocks for {len(remote_block_ids)} remote ones")
    block_bytes = local.layout.layer_block_bytes
    return [
        Region(
            local.address(layer, local_block_ids[start]),
            remote.address(layer, remote_block_ids[start]),
            (end - start) * block_bytes,
        )
        for start, end in _runs(local_block_ids, remote_block_ids)
    ]


def _runs(local_block_ids: Sequence[int], remote_block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Index ranges [start, end) over which both sides count upwards by one."""
    start = 0
    for index in range(1, len(local_block_ids) + 1):
        is_end = index == len(local_block_ids)
        if (
            is_end
            or local_block_ids[index] != local_block_ids[index - 1] + 1
            or remote_block_ids[index] != remote_block_ids[index - 1] + 1
        ):
            yield start, index
            start = index
