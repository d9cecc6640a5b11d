"""The runner that computes: a checkpoint, its cache and the transformer over it, in this process.

It knows nothing of sequences, pools or other processes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from model import huge_pages
from model.backend import Backend, choose_backend
from model.checkpoint import map_weights, model_digest
from model.config import DTYPES, ModelConfig
from model.kv_cache import PagedKVCache, available_bytes, check_memory, num_blocks_that_fit
from model.kv_layout import KVLayout
from model.layer_events import LayerEvents
from model.logprobs import scored_tokens
from model.runner import Chunk, LayerDone, NoDrafting, StepOutput
from model.sampling import Row, sample
from model.step_input import StepInput
from model.transformer import ForwardOutput, Transformer

logger = logging.getLogger(__name__)

_SCORED_AT_ONCE = (
    64  # rows of the prompt with logits: of a large vocabulary each takes half a megabyte, some times over
)
_COPIED_SHARE = 0.2  # of the memory that is available: the copies of several processes have to fit


class TorchRunner(NoDrafting):
    """Implements `ModelRunner`. Made by `load`."""

    def __init__(self, config: ModelConfig, model: Transformer, cache: PagedKVCache, backend: Backend) -> None:
        self.config = config
        self.kernels = backend.name
        self.backend = backend
        self.model = model
        self.cache = cache

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        num_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        kv_cache_share: float | None = None,
        block_size: int = 16,
        max_context_tokens: int | None = None,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        device: str = "cpu",
        num_threads: int | None = None,
        kernels: str = "auto",
        num_draft_layers: int = 0,
        drafter: str = "",
        draft_weights: Iterable[Tensor] = (),
    ) -> TorchRunner:
        """Reads the checkpoint and takes the cache: `num_blocks` or as many as fit `kv_cache_bytes` or
        `kv_cache_share` of the memory that the weights leave. It has to hold a sequence of `max_context_tokens`
        (None: of the model's whole context).

        On a CPU the weights are copied into huge pages if they take little of the memory; else they are read where the
        page cache has them, which processes share.

        `dtype` is that of the computation; "auto" is the checkpoint's. The C kernels always compute in float32, on
        the weights as they are stored. `kv_dtype` is "auto" for `dtype`. `num_threads` is torch's, for this process.
        `draft_weights` will be placed later: room is left for them.

        Raises:
            UnreadableModel, UnsupportedModel: the folder holds no model that can be computed here.
            CacheDoesNotFit: the cache is too small for one sequence, or too large for the memory there is.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        config = ModelConfig.from_folder(folder)
        dtype = _named_dtype("dtype", dtype, config.dtype)
        kv_dtype = _named_dtype("kv_dtype", kv_dtype, dtype)
        layout = KVLayout(
            model_digest=model_digest(folder),
            dtype=kv_dtype,
            num_layers=config.num_layers + num_draft_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            drafter=drafter,
        )
        weights = map_weights(folder, config)
        backend = choose_backend(kernels, config, torch.device(device), getattr(torch, dtype))
        weight_bytes = sum(backend.placed_bytes(tensor) for tensor in weights.values())
        for_drafts = backend.for_drafts()
        draft_bytes = sum(for_drafts.placed_bytes(tensor) for tensor in draft_weights)
        free_bytes = available_bytes(torch.device(device)) - weight_bytes - draft_bytes
        num_blocks = _num_blocks(layout, num_blocks, kv_cache_bytes, kv_cache_share, free_bytes)
        check_memory(layout, num_blocks, max_context_tokens or config.max_position_embeddings, free_bytes)
        cache = PagedKVCache(layout, num_blocks, torch.device(device))
        weights = {name: backend.place(tensor) for name, tensor in weights.items()}
        if device == "cpu" and weight_bytes < available_bytes(torch.device(device)) * _COPIED_SHARE:
            weights = huge_pages.copied(weights)
        return cls(config, Transformer(config, weights, backend, cache), cache, backend)

    @property
    def layout(self) -> KVLayout:
        return self.cache.layout

    @property
    def num_blocks(self) -> int:
        return self.cache.num_blocks

    @property
    def cache_address(self) -> int:
        return self.cache.address

    @property
    def cache_memory(self) -> Tensor:
        return self.cache.memory

    @property
    def cache_device_id(self) -> int:
        device = self.cache.memory.device
        return -1 if device.type == "cpu" else device.index or 0

    @torch.inference_mode()
    def execute(self, chunks: Sequence[Chunk], layer_done: LayerDone | None = None) -> StepOutput:
        begin = time.perf_counter()
        try:
            output = self.forward(chunks, layer_done)
            self.score_prompts(chunks, output)
            wanting = [Row.behind(chunk) for chunk in chunks if chunk.sampling is not None]
            outcomes = iter(sample(output.logits, wanting) if wanting else ())
        finally:  # also after an error: the blocks of a step may go to others as soon as it is over
            self.wait_for_device()
        sampled = tuple(next(outcomes) if chunk.sampling is not None else None for chunk in chunks)
        load = output.expert_load
        return StepOutput(sampled, time.perf_counter() - begin, load.tolist() if load is not None else ())

    @torch.inference_mode()
    def forward(
        self,
        chunks: Sequence[Chunk],
        layer_done: LayerDone | None = None,
        *,
        num_rows: Sequence[int] | None = None,
        taps: Sequence[int] = (),
    ) -> ForwardOutput:
        """One forward. Rows are the last `num_rows[i]` tokens of chunk i: by default one where a token is wanted."""
        step = StepInput.of(chunks, self.layout.block_size, self.model.inverse_frequencies)
        if num_rows is None:
            num_rows = [int(chunk.sampling is not None) for chunk in chunks]
        rows = step.last_rows(num_rows)
        positions = _scored_positions(chunks)
        unread = step.places(positions) if any(positions) else None
        if layer_done is None or not self._queues_work:
            return self.model.forward(step, rows, layer_done, taps, unread)
        events = LayerEvents(layer_done, self.cache.memory.device)
        output = self.model.forward(step, rows, events.queued, taps, unread)
        events.wait()
        return output

    def score_prompts(self, chunks: Sequence[Chunk], output: ForwardOutput) -> None:
        """Adds to the scores of chunks whose prompts are to be scored. `output` is of them, once."""
        start = 0
        for chunk, positions in zip(chunks, _scored_positions(chunks), strict=True):
            for first in range(0, len(positions), _SCORED_AT_ONCE):
                part = positions[first : first + _SCORED_AT_ONCE]
                assert chunk.scores is not None and output.unread is not None
                logits = self.model.logits(output.unread[start : start + len(part)])
                next_ids = torch.tensor(chunk.history[part.start + 1 : part.stop + 1], device=logits.device)
                chunk.scores.add(scored_tokens(logits, next_ids, chunk.scores.num_alternatives))
                start += len(part)

    def keep_paths(self, paths: Sequence[tuple[Chunk, Sequence[int]]]) -> None:
        """Moves the KV of these nodes of trees that chunks ended in, in order, to the first slots behind the root.

        So a path becomes a part of the sequence; nothing of the other nodes does. Before anybody else reads its blocks.
        """
        size = self.layout.block_size
        moves = []
        for chunk, path in paths:
            first = chunk.start + len(chunk.token_ids) - len(chunk.parents or ())
            for place, node in enumerate(path):
                old, new = (chunk.block_ids[at // size] * size + at % size for at in (first + node, first + place))
                moves += [(old, new)] if old != new else []
        if moves:
            sources, targets = zip(*moves, strict=True)
            self.cache.move(sources, targets, self.config.num_layers)

    @property
    def _queues_work(self) -> bool:
        return self.cache.memory.device.type == "cuda"

    def wait_for_device(self) -> None:
        if self._queues_work:
            torch.cuda.current_stream(self.cache.memory.device).synchronize()


def _scored_positions(chunks: Sequence[Chunk]) -> list[range]:
    """Of each chunk those whose next token is to be scored."""
    ends = [chunk.start + len(chunk.token_ids) for chunk in chunks]
    return [
        range(0) if chunk.scores is None else chunk.scores.wanted(end) for chunk, end in zip(chunks, ends, strict=True)
    ]


def _named_dtype(name: str, value: str, default: str) -> str:
    if value not in ("auto", *DTYPES):
        raise ValueError(f"{name} is {value!r}; it must be one of auto, {', '.join(DTYPES)}")
    return default if value == "auto" else value


def _num_blocks(
    layout: KVLayout, num_blocks: int | None, num_bytes: int | None, share: float | None, free_bytes: int
) -> int:
    if sum(size is not None for size in (num_blocks, num_bytes, share)) != 1:
        raise ValueError("give one of num_blocks, kv_cache_bytes and kv_cache_share")
    if num_blocks is not None:
        return num_blocks
    if num_bytes is None:
        num_bytes = int(max(0, free_bytes) * (share or 0.0))
    return num_blocks_that_fit(layout, num_bytes)
