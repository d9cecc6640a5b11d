"""What every layer needs to know about one step, built once per step from its chunks.

Letters: T tokens of all chunks one after another, S chunks, C blocks of the longest context, B tokens per block,
D head size.
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
        )


def _block_tables(chunks: Sequence[Chunk]) -> NDArray[np.int32]:
    tables = np.zeros((len(chunks), max(len(chunk.block_ids) for chunk in chunks)), np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.block_ids)] = chunk.block_ids
    return tables
