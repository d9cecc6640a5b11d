"""A runner that makes KV the way a GPU does: without the host's CPU, at the times that a timing says."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from model.kv_layout import KVLayout
from model.runner import Chunk, LayerDone, SampledToken, StepOutput
from model.timed_runner import StepTiming, TimedRunner

_INSTANT = StepTiming(prefill_base_s=0.0, prefill_token_s=0.0, prefill_pair_s=0.0)


class PacedRunner(TimedRunner):
    """Its cache holds random words from the start, and `execute` writes none: it only says when a layer is there.

    `pace` says how fast. Tokens mean nothing here; whether blocks arrive is shown by their checksums.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks, _INSTANT, vocab_size=1)
        self._ends_at = 0.0  # of the step before, as planned
        rng = np.random.default_rng(0)
        for layer in self._cache:
            layer[...] = rng.integers(0, 2**64, layer.shape, np.uint64)

    @property
    def kernels(self) -> str:
        return "paced"

    def pace(self, token_s: float) -> None:
        self._timing = StepTiming(prefill_base_s=0.0, prefill_token_s=token_s, prefill_pair_s=0.0)

    def renew(self) -> None:
        """Changes a word in every layer of every block: what a peer holds of an earlier prompt is right no more."""
        self._cache[:, :, 0, 0, 0, 0] += np.uint64(1)

    def execute(self, chunks: Sequence[Chunk], layer_done: LayerDone | None = None) -> StepOutput:
        """A prompt's next chunk begins when the one before was planned to end: a GPU has it queued. Whoever wakes up
        late finds several layers done at once, and is not late for the ones behind them."""
        called_at = time.perf_counter()
        starts_at = self._ends_at if chunks[0].start else called_at
        step_s, num_layers = self._timing.step_s(chunks), self.layout.num_layers
        self._ends_at = starts_at + step_s
        for layer in range(num_layers):
            _sleep_until(starts_at + step_s * (layer + 1) / num_layers)
            if layer_done is not None:
                layer_done(layer)
        sampled = tuple(None if chunk.sampling is None else SampledToken(0) for chunk in chunks)
        return StepOutput(sampled, time.perf_counter() - called_at)


def _sleep_until(moment_s: float) -> None:
    remaining_s = moment_s - time.perf_counter()
    if remaining_s > 0:
        time.sleep(remaining_s)
