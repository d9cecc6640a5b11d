"""How fast this worker's steps have been lately, for whoever places work on it."""

from __future__ import annotations

from collections.abc import Sequence

from model.runner import Chunk, StepOutput

_WEIGHT = 0.1  # of the newest step


class StepMeter:
    """Decayed means over steps: seconds where every sequence ran one token, tokens per second where one ran more."""

    def __init__(self) -> None:
        self.decode_step_s = 0.0
        self.prefill_tokens_per_s = 0.0

    def observe(self, chunks: Sequence[Chunk], output: StepOutput) -> None:
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        if num_tokens == len(chunks):
            self.decode_step_s = _decayed(self.decode_step_s, output.compute_s)
        elif output.compute_s > 0:
            self.prefill_tokens_per_s = _decayed(self.prefill_tokens_per_s, num_tokens / output.compute_s)


def _decayed(mean: float, newest: float) -> float:
    return newest if mean == 0.0 else mean + _WEIGHT * (newest - mean)
