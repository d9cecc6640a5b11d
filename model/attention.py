"""Attention over the paged cache: the seam where a kernel library for some device slots in, and its plain torch form.

Letters: T tokens of all chunks, S chunks, Q query heads, H KV heads, G = Q / H heads that share one, D head size,
C context tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from model.config import ModelConfig
from model.kv_cache import PagedKVCache
from model.linear import rms_norm
from model.step_input import StepInput

ROWS_AT_ONCE = 256  # bounds the mask of a long chunk over a long context


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [D] of the norms over each query and key head, where a family has them."""

    query: Tensor
    key: Tensor


class AttentionBackend(Protocol):
    """Works on the cache it was made with; what is the same for all layers of a step comes in `step`."""

    def store(self, layer: int, qkv: Tensor, step: StepInput) -> Tensor:
        """Rotates queries and keys of [T, (Q + 2 H) D], stores keys and values, returns queries [T, Q, D].

        Queries may be left out; then none are returned. ValueError may say that a row is of another width.
        """
        ...

    def attend(self, layer: int, queries: Tensor, step: StepInput) -> Tensor:
        """Each token over its own context, itself included: [T, Q, D] -> [T, Q D]."""
        ...


class TorchAttention:
    """Gathers the context of a chunk and calls torch: any device and dtype; other backends are tested against it."""

    def __init__(self, config: ModelConfig, cache: PagedKVCache, head_norms: Sequence[HeadNorms | None]) -> None:
        self._config = config
        self._cache = cache
        self._head_norms = head_norms

    def store(self, layer: int, qkv: Tensor, step: StepInput) -> Tensor:
        config = self._config
        heads = qkv.view(step.num_tokens, -1, config.head_dim)  # [T, Q + 2 H, D]
        num_queries = heads.shape[1] - 2 * config.num_kv_heads
        queries, keys, values = heads.split((num_queries, config.num_kv_heads, config.num_kv_heads), dim=1)
        norms = self._head_norms[layer]
        if norms is not None:
            queries = rms_norm(queries, norms.query, config.norm_eps)
            keys = rms_norm(keys, norms.key, config.norm_eps)
        self._cache.write(layer, step.slots, rotate(keys, step), values)
        return rotate(queries, step)

    def attend(self, layer: int, queries: Tensor, step: StepInput) -> Tensor:
        outputs = torch.empty_like(queries)
        decoding = [index for index, num_tokens in enumerate(step.chunk_lens) if num_tokens == 1]
        if decoding:
            chosen = torch.tensor(decoding, device=queries.device)
            rows = step.query_starts[chosen]
            outputs[rows] = self._attend_single(layer, queries[rows], chosen, step)
        first = 0
        for index, num_tokens in enumerate(step.chunk_lens):
            if num_tokens > 1:
                rows_of_chunk = slice(first, first + num_tokens)
                outputs[rows_of_chunk] = self._attend_chunk(layer, queries[rows_of_chunk], index, first, step)
            first += num_tokens
        return outputs.flatten(1)

    def _attend_single(self, layer: int, queries: Tensor, chosen: Tensor, step: StepInput) -> Tensor:
        """Chunks of one token together; the group of a KV head is folded into the query length."""
        num_kv_heads = self._config.num_kv_heads
        keys, values = self._context(layer, step.block_tables[chosen], queries.dtype)  # [S, H, C, D]
        grouped = queries.view(len(chosen), num_kv_heads, -1, self._config.head_dim)  # [S, H, G, D]
        slots = torch.arange(keys.shape[2], device=queries.device)
        mask = slots < step.context_lens[chosen, None]  # [S, C]
        if step.trees is not None:
            mask &= ~step.trees.hidden(slots, chosen, step.query_starts[chosen])
        keys, values = keys.masked_fill(~mask[:, None, :, None], 0), values.masked_fill(~mask[:, None, :, None], 0)
        output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask[:, None, None, :])
        return output.reshape(queries.shape)

    def _attend_chunk(self, layer: int, queries: Tensor, index: int, row: int, step: StepInput) -> Tensor:
        """One chunk, some rows at a time, each piece over no more than the context it can see. `row` is its first."""
        start, group = step.chunk_starts[index], self._config.num_heads // self._config.num_kv_heads
        keys, values = self._context(layer, step.block_tables[index : index + 1], queries.dtype)
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)  # [1, Q, C, D]
        pieces = []
        for first, piece in zip(range(0, len(queries), ROWS_AT_ONCE), queries.split(ROWS_AT_ONCE), strict=True):
            seen = start + first + len(piece)
            slots = torch.arange(seen, device=queries.device)
            mask = slots <= slots[seen - len(piece) :, None]  # [rows, C]
            if step.trees is not None:
                mask &= ~step.trees.hidden(slots, index, slice(row + first, row + first + len(piece)))
            rows = piece.transpose(0, 1)[None]  # [1, Q, rows, D]
            output = F.scaled_dot_product_attention(rows, keys[:, :, :seen], values[:, :, :seen], attn_mask=mask)
            pieces.append(output[0].transpose(0, 1))
        return torch.cat(pieces)

    def _context(self, layer: int, tables: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [S, H, C, D] of all blocks in the tables [S, blocks]."""
        blocks = self._cache.memory[layer][tables]  # [S, blocks, H, 2, B, D]
        keys, values = blocks.permute(3, 0, 2, 1, 4, 5).flatten(3, 4).to(dtype)
        return keys, values


def rotate(heads: Tensor, step: StepInput) -> Tensor:
    """Rotary embedding of [T, heads, D]: the first half of a head is the real, the second the imaginary part."""
    cosines, sines = step.cosines[:, None].to(heads.dtype), step.sines[:, None].to(heads.dtype)
    real, imaginary = heads.chunk(2, dim=-1)
    return torch.cat((real * cosines - imaginary * sines, imaginary * cosines + real * sines), dim=-1)
