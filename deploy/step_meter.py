"""How fast this worker's steps have been lately, for whoever places work on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from model.runner import Chunk, StepOutput, VerifiedDraft

_WEIGHT = 0.1  # of the newest step, if it follows the one before at once
_FORGOTTEN_S = 60.0  # after such a pause it is all that counts: what was before may have been a neighbour's doing


class StepMeter:
    """Decayed means over steps: of those in which every sequence decodes, and of those that compute prompts, too.

    A step decodes where each sequence runs one token beside what it drafts. All are 0 until there was one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prefilled_at: float | None = None
        self._decoded_at: float | None = None
        self.decode_step_s = 0.0
        self.decode_batch = 0.0  # sequences
        self.tokens_per_step = 0.0  # of a sequence
        self.prefill_tokens_per_s = 0.0

    @property
    def prefill_age_s(self) -> float:
        """Since a step last counted; 0 before the first."""
        return self._since(self._prefilled_at)

    @property
    def decode_age_s(self) -> float:
        return self._since(self._decoded_at)

    def observe(self, chunks: Sequence[Chunk], output: StepOutput) -> None:
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        if num_tokens == len(chunks):
            num_sampled = sum(
                len(outcome.tokens) if isinstance(outcome, VerifiedDraft) else 1 for outcome in output.sampled
            )
            weight = _weight(self.decode_age_s)
            self.decode_step_s = _decayed(self.decode_step_s, output.compute_s, weight)
            self.decode_batch = _decayed(self.decode_batch, len(chunks), weight)
            self.tokens_per_step = _decayed(self.tokens_per_step, num_sampled / len(chunks), weight)
            self._decoded_at = self._clock()
        elif output.compute_s > 0:
            weight = _weight(self.prefill_age_s)
            self.prefill_tokens_per_s = _decayed(self.prefill_tokens_per_s, num_tokens / output.compute_s, weight)
            self._prefilled_at = self._clock()

    def _since(self, at: float | None) -> float:
        return 0.0 if at is None else self._clock() - at


def _weight(age_s: float) -> float:
    """Of a step that comes so long after the one before."""
    return min(1.0, max(_WEIGHT, age_s / _FORGOTTEN_S))


def _decayed(mean: float, newest: float, weight: float) -> float:
    return newest if mean == 0.0 else mean + weight * (newest - mean)
