"""Which bytes of one cache belong into which bytes of another. Pure arithmetic: it touches no memory.

A rank's cache is one array [L, N, H, V, B, D] (letters in `model.kv_layout`; H are the heads that it holds, V its
vectors per token and head), so blocks with consecutive ids are adjacent within a layer. Caches that are laid out alike
exchange whole blocks (`pieces`), others the vectors of tokens (`token_regions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtransfer.agent import Grid, Indices, Pieces, Region
from kvtransfer.ranks import ONLY, Rank, exchanged_heads
from model.kv_layout import KVLayout

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CacheSpan:
    """Where a cache lies: `num_blocks` blocks of `layout`, of which `rank` holds its heads, from `base_address` on."""

    layout: KVLayout
    base_address: int
    num_blocks: int
    rank: Rank = ONLY
    grid: Grid = field(init=False)  # one piece for each layer's part of each block, as far as the rank holds it

    def __post_init__(self) -> None:
        layout = self.layout
        piece_bytes = layout.layer_block_bytes // layout.num_kv_heads * len(self.heads)
        grid = Grid(self.base_address, piece_bytes, layout.num_layers * self.num_blocks)
        object.__setattr__(self, "grid", grid)  # once: spans live as long as their cache

    @property
    def heads(self) -> range:
        return self.rank.heads(self.layout.num_kv_heads)

    @property
    def num_bytes(self) -> int:
        return self.grid.num_pieces * self.grid.piece_bytes

    def address(self, layer: int, block_id: int) -> int:
        """Of the first byte of one layer's part of one block."""
        return self.base_address + int(self.indices(range(layer, layer + 1), (block_id,))[0]) * self.grid.piece_bytes

    def indices(self, layers: range, block_ids: Sequence[int] | Indices) -> Indices:
        """Of these blocks in the grid, layer by layer."""
        ids, size = np.asarray(block_ids, np.int32), self.num_blocks
        if layers and not 0 <= layers.start < layers.stop <= self.layout.num_layers:
            wrong = layers.start if layers.start < 0 else layers.stop - 1
            raise ValueError(f"layer {wrong} is not one of {self.layout.num_layers}")
        if len(ids) and not 0 <= (least := int(ids.min())) <= (most := int(ids.max())) < size:
            raise ValueError(f"block {least if least < 0 else most} is not one of {size}")
        starts = np.arange(layers.start * size, layers.stop * size, layers.step * size, dtype=np.int32)
        return (starts[:, None] + ids).ravel()


def pieces(
    local: CacheSpan,
    remote: CacheSpan,
    layers: range,
    local_block_ids: Sequence[int] | Indices,
    remote_block_ids: Sequence[int] | Indices,
) -> Pieces:
    """What to copy so that, in these layers, each remote block holds what the local block at the same index holds."""
    if len(local_block_ids) != len(remote_block_ids):
        raise ValueError(f"{len(local_block_ids)} local blocks for {len(remote_block_ids)} remote ones")
    local_indices, remote_indices = local.indices(layers, local_block_ids), remote.indices(layers, remote_block_ids)
    return Pieces(local.grid, remote.grid, local_indices, remote_indices)


def regions(
    local: CacheSpan,
    remote: CacheSpan,
    layer: int,
    local_block_ids: Sequence[int],
    remote_block_ids: Sequence[int],
) -> list[Region]:
    """The pieces of one layer, in as few regions as the block ids allow."""
    return pieces(local, remote, range(layer, layer + 1), local_block_ids, remote_block_ids).regions()


def token_regions(
    source: CacheSpan,
    target: CacheSpan,
    layers: range,
    tokens: range,
    source_block_ids: Sequence[int],
    target_block_ids: Sequence[int],
) -> list[Region]:
    """Bytes to copy so that the target's blocks hold what the source's hold of these layers and tokens.

    Block sizes may differ, and so may the numbers of ranks: of the heads of a token, this pair's share is copied, which
    may be none. `tokens` are consecutive positions in the sequence; on each side the ids are those of all blocks that
    hold one of them. With equal block sizes the last block is copied to its end, beyond the last token.

    Raises:
        ValueError: the layouts do not go together, or layers, tokens and blocks do not.
    """
    if (obstacle := source.layout.obstacle(target.layout, here="at the source", there="at the target")) is not None:
        raise ValueError(obstacle)
    if tokens.step != 1 or tokens.start < 0:
        raise ValueError(f"{tokens} are not consecutive positions")
    heads = exchanged_heads(source.rank, target.rank, source.layout.num_kv_heads)
    if not (heads and tokens and layers):
        return []
    if source.layout.block_size == (size := target.layout.block_size):
        tokens = range(tokens.start, -(-tokens.stop // size) * size)
    runs = _runs(tokens, min(source.layout.block_size, size))
    source_offsets = _offsets(source, layers, heads, runs, source_block_ids)
    target_offsets = _offsets(target, layers, heads, runs, target_block_ids)
    lengths = np.broadcast_to((runs[1] - runs[0])[:, None, None] * source.layout.vector_bytes, source_offsets.shape)
    merged = _merged(source_offsets.ravel(), target_offsets.ravel(), lengths.ravel())
    bases = source.base_address, target.base_address
    return [Region(bases[0] + here, bases[1] + there, size) for here, there, size in zip(*merged, strict=True)]


def _runs(tokens: range, block_size: int) -> _Ints:
    """Starts and ends [2, R] of the pieces that blocks of this size cut these tokens into."""
    cuts = np.arange(tokens.start // block_size + 1, -(-tokens.stop // block_size), dtype=np.int64) * block_size
    return np.array([[tokens.start, *cuts], [*cuts, tokens.stop]], np.int64)


def _offsets(span: CacheSpan, layers: range, heads: range, runs: _Ints, block_ids: Sequence[int]) -> _Ints:
    """From the start of a cache to the first token of each run: [layers, R, heads, V], in bytes."""
    layout, size = span.layout, span.layout.block_size
    first_block = int(runs[0, 0]) // size
    needed = -(-int(runs[1, -1]) // size) - first_block
    if len(block_ids) != needed:
        raise ValueError(
            f"{len(block_ids)} blocks for tokens {runs[0, 0]} to {runs[1, -1]}; {needed} blocks of {size} hold them"
        )
    grid = span.indices(layers, block_ids).astype(np.int64).reshape(len(layers), -1)
    vectors = np.arange(layout.num_vectors) * size
    in_block = (np.arange(heads.start, heads.stop) - span.heads.start)[:, None] * layout.num_vectors * size + vectors
    tokens = runs[0] % size  # [R]
    blocks = grid[:, runs[0] // size - first_block] * span.grid.piece_bytes  # [layers, R]
    offsets: _Ints = blocks[..., None, None] + (tokens[:, None, None] + in_block) * layout.vector_bytes
    return offsets


def _merged(source: _Ints, target: _Ints, lengths: _Ints) -> tuple[list[int], list[int], list[int]]:
    """One piece for each that is contiguous on both sides, by where it goes."""
    order = np.argsort(target, kind="stable")
    source, target, lengths = source[order], target[order], lengths[order]
    goes_on = (np.diff(source) == lengths[:-1]) & (np.diff(target) == lengths[:-1])
    starts = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
    return source[starts].tolist(), target[starts].tolist(), np.add.reduceat(lengths, starts).tolist()
