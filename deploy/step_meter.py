"""How fast this worker's steps have been lately, for whoever places work on it, and what each took, for who learns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from model.runner import Chunk, StepOutput, VerifiedDraft
from router.step_tally import StepTally

_WEIGHT = 0.1  # of the newest step, if it follows the one before at once
_FORGOTTEN_S = 60.0  # after such a pause it is all that counts: what was before may have been a neighbour's doing


class StepMeter:
    """Decayed means over steps: of those in which every sequence decodes, and of those that compute prompts, too.

    A step decodes where each sequence runs one token beside what it drafts. All are 0 until there was one. `tallies`
    are told of steps that did one of the two and nothing else.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prefilled_at: float | None = None
        self._decoded_at: float | None = None
        self.decode_step_s = 0.0
        self.decode_batch = 0.0  # sequences
        self.tokens_per_step = 0.0  # of a sequence
        self.prefill_tokens_per_s = 0.0
        self.tallies: list[StepTally] = []

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
            if self.tallies:
                num_context_tokens = sum([chunk.start for chunk in chunks]) + len(chunks)
                for tally in self.tallies:
                    tally.decoded(len(chunks), num_context_tokens, output.compute_s, num_sampled / len(chunks))
        elif output.compute_s > 0:
            weight = _weight(self.prefill_age_s)
            self.prefill_tokens_per_s = _decayed(self.prefill_tokens_per_s, num_tokens / output.compute_s, weight)
            self._prefilled_at = self._clock()
            if self.tallies and all(len(chunk.token_ids) > 1 for chunk in chunks):
                num_pairs = 0
                for chunk in chunks:
                    num_pairs += len(chunk.token_ids) * (chunk.start + len(chunk.token_ids))
                for tally in self.tallies:
                    tally.prefilled(num_tokens, num_pairs, output.compute_s)

    def _since(self, at: float | None) -> float:
        return 0.0 if at is None else self._clock() - at


def _weight(age_s: float) -> float:
    """Of a step that comes so long after the one before."""
    return min(1.0, max(_WEIGHT, age_s / _FORGOTTEN_S))


def _decayed(mean: float, newest: float, weight: float) -> float:
    return newest if mean == 0.0 else mean + weight * (newest - mean)
