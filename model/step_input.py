"""What every layer needs to know about one step, built once per step from its chunks.

A chunk may end in nodes of a tree. Nodes have slots one behind another, in their order, but the position of a node is
as many behind the root as its path is long, and of the slots behind the root it sees those of its path only.

Letters: T tokens of all chunks one after another, S chunks, R rows, C blocks of the longest context, B tokens per
block, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.runner import Chunk

Ints = NDArray[np.int64]

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
        device = inverse_frequencies.device
        starts = tuple(chunk.start for chunk in chunks)
        lens = tuple(len(chunk.token_ids) for chunk in chunks)
        query_starts = np.concatenate(([0], np.cumsum(lens)))
        token_ids = np.fromiter(chain.from_iterable(chunk.token_ids for chunk in chunks), np.int64, query_starts[-1])
        positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], lens)
        tables = _block_tables(chunks)
        rows = np.repeat(np.arange(len(chunks)), lens)
        slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
        trees = None
        if any(chunk.parents is not None for chunk in chunks):
            trees, positions = _trees(chunks, positions, query_starts, device)
        angles = torch.from_numpy(positions).to(device).float()[:, None] * inverse_frequencies
        return cls(
            token_ids=torch.from_numpy(token_ids).to(device),
            slots=torch.from_numpy(slots).to(device),
            cosines=angles.cos(),
            sines=angles.sin(),
            block_tables=torch.from_numpy(tables).to(device),
            query_starts=torch.from_numpy(query_starts.astype(np.int32)).to(device),
            context_lens=torch.from_numpy(np.add(starts, lens).astype(np.int32)).to(device),
            chunk_lens=lens,
            chunk_starts=starts,
            trees=trees,
        )

    def last_rows(self, counts: Sequence[int]) -> Tensor:
        """The places [R] of the last `counts[i]` tokens of chunk i."""
        ends = np.cumsum(self.chunk_lens).tolist()
        indexes = [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]
        return torch.tensor(indexes, dtype=torch.int64, device=self.token_ids.device)


def _trees(chunks: Sequence[Chunk], positions: Ints, query_starts: Ints, device: torch.device) -> tuple[Trees, Ints]:
    """With the positions of all tokens, which were those of their slots. Raises ValueError for a tree with no root."""
    starts = np.empty(len(chunks), np.int32)
    seen = np.zeros(len(positions), np.uint64)
    positions = positions.copy()
    for index, (chunk, end) in enumerate(zip(chunks, query_starts[1:].tolist(), strict=True)):
        parents = chunk.parents or ()
        starts[index] = first = chunk.start + len(chunk.token_ids) - len(parents)
        if parents and (first < 1 or len(parents) > MAX_NODES):
            raise ValueError(f"a tree of {len(parents)} nodes at slot {first}: at most {MAX_NODES}, behind a token")
        depths, masks = [0], [0]  # of the root and the nodes
        for node, parent in enumerate(parents):
            depths.append(depths[parent + 1] + 1)
            masks.append(masks[parent + 1] | 1 << node)
        count = min(len(parents), len(chunk.token_ids))  # the rest has run before
        positions[end - count : end] = np.array(depths[len(depths) - count :]) + first - 1
        seen[end - count : end] = masks[len(masks) - count :]
    trees = Trees(torch.from_numpy(starts).to(device), torch.from_numpy(seen.view(np.int64)).to(device))
    return trees, positions


def _block_tables(chunks: Sequence[Chunk]) -> NDArray[np.int32]:
    tables = np.zeros((len(chunks), max(len(chunk.block_ids) for chunk in chunks)), np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.block_ids)] = chunk.block_ids
    return tables
