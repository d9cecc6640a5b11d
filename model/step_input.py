"""What every layer needs to know about one step, built once per step from its chunks.

A chunk may end in nodes of a tree. Nodes have slots one behind another, in their order, but the position of a node is
as many behind the root as its path is long, and of the slots behind the root it sees those of its path only.

Letters: T tokens of all chunks one after another, S chunks, R rows, C blocks of the longest context, B tokens per
block, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.runner import Chunk

MAX_NODES = 64  # of a tree: bits of a mask


@dataclass(frozen=True, slots=True)
class Trees:
    """What each token sees of the slots of its chunk from `starts` on, and only there: slot starts + j if bit j is set.

    The starts of chunks without a tree are behind their context.
    """

    starts: Tensor  # [S] int32: place of the first node's slot in the sequence
    seen: Tensor  # [T] int64

    def hidden(self, slots: Tensor, chunks: Tensor | int, tokens: Tensor | slice) -> Tensor:
        """Which of these slots of the sequence the tokens do not see for the tree's sake, [tokens, slots] bool."""
        nodes = slots - self.starts[chunks].view(-1, 1)  # [tokens or 1, slots]
        bits = self.seen[tokens].view(-1, 1) >> nodes.clamp(0, MAX_NODES - 1)
        return (nodes >= 0) & (bits & 1 == 0)


@dataclass(frozen=True, slots=True)
class StepInput:
    """Chunk i has tokens [query_starts[i], query_starts[i + 1]) and, with them, a context of context_lens[i] tokens."""

    token_ids: Tensor  # [T] int64
    slots: Tensor  # [T] int64: block id * B + offset
    cosines: Tensor  # [T, D / 2] float32
    sines: Tensor  # [T, D / 2] float32
    block_tables: Tensor  # [S, C] int32, padded with 0
    query_starts: Tensor  # [S + 1] int32
    context_lens: Tensor  # [S] int32
    chunk_lens: tuple[int, ...]  # [S] tokens to run
    chunk_starts: tuple[int, ...]  # [S] position of the first of them
    trees: Trees | None = None  # None: every token sees all tokens before it

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @classmethod
    def of(cls, chunks: Sequence[Chunk], block_size: int, inverse_frequencies: Tensor) -> StepInput:
        """Puts them together in plain Python: beside a short step each call of numpy or torch takes long."""
        device = inverse_frequencies.device
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_starts, context_lens = [0], []
        for chunk in chunks:
            end = chunk.start + len(chunk.token_ids)
            blocks = chunk.block_ids
            token_ids += chunk.token_ids
            positions += range(chunk.start, end)
            slots += [blocks[at // block_size] * block_size + at % block_size for at in range(chunk.start, end)]
            query_starts.append(len(token_ids))
            context_lens.append(end)
        trees = None
        if any(chunk.parents is not None for chunk in chunks):
            trees = _trees(chunks, positions, query_starts, device)
        ids, places, ats = torch.tensor([token_ids, slots, positions], dtype=torch.int64).to(device)
        angles = ats.float()[:, None] * inverse_frequencies
        lens = torch.tensor(query_starts + context_lens, dtype=torch.int32).to(device)
        return cls(
            token_ids=ids,
            slots=places,
            cosines=angles.cos(),
            sines=angles.sin(),
            block_tables=torch.from_numpy(_block_tables(chunks)).to(device),
            query_starts=lens[: len(query_starts)],
            context_lens=lens[len(query_starts) :],
            chunk_lens=tuple(len(chunk.token_ids) for chunk in chunks),
            chunk_starts=tuple(chunk.start for chunk in chunks),
            trees=trees,
        )

    def last_rows(self, counts: Sequence[int]) -> Tensor:
        """The places [R] of the last `counts[i]` tokens of chunk i."""
        ends = np.cumsum(self.chunk_lens).tolist()
        indexes = [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]
        return torch.tensor(indexes, dtype=torch.int64, device=self.token_ids.device)

    def places(self, positions: Sequence[range]) -> Tensor:
        """Where in the step these positions of each chunk's sequence are; the chunk has them."""
        starts = [0, *np.cumsum(self.chunk_lens).tolist()]
        indexes = [
            at - first + start
            for start, first, of_chunk in zip(starts, self.chunk_starts, positions, strict=False)
            for at in of_chunk
        ]
        return torch.tensor(indexes, dtype=torch.int64, device=self.token_ids.device)


def _trees(chunks: Sequence[Chunk], positions: list[int], query_starts: Sequence[int], device: torch.device) -> Trees:
    """Puts right the positions of nodes, which were those of their slots.

    Raises:
        ValueError: a tree has no root.
    """
    starts = []
    seen = [0] * len(positions)
    for chunk, end in zip(chunks, query_starts[1:], strict=True):
        parents = chunk.parents or ()
        first = chunk.start + len(chunk.token_ids) - len(parents)
        starts.append(first)
        if parents and (first < 1 or len(parents) > MAX_NODES):
            raise ValueError(f"a tree of {len(parents)} nodes at slot {first}: at most {MAX_NODES}, behind a token")
        depths, masks = [0], [0]  # of the root and the nodes
        for node, parent in enumerate(parents):
            depths.append(depths[parent + 1] + 1)
            masks.append(masks[parent + 1] | 1 << node)
        count = min(len(parents), len(chunk.token_ids))  # the rest has run before
        positions[end - count : end] = [first - 1 + depth for depth in depths[len(depths) - count :]]
        seen[end - count : end] = [_signed(mask) for mask in masks[len(masks) - count :]]
    return Trees(torch.tensor(starts, dtype=torch.int32).to(device), torch.tensor(seen, dtype=torch.int64).to(device))


def _signed(mask: int) -> int:
    """The number of 64 bits with a sign that has the same bits: torch has no others."""
    return mask - (1 << 64) if mask >> 63 else mask


def _block_tables(chunks: Sequence[Chunk]) -> NDArray[np.int32]:
    tables = np.zeros((len(chunks), max(len(chunk.block_ids) for chunk in chunks)), np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.block_ids)] = chunk.block_ids
    return tables
