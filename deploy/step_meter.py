"""How fast this worker's steps have been lately, for whoever places work on it."""

from __future__ import annotations

from collections.abc import Sequence

from model.runner import Chunk, StepOutput, VerifiedDraft

_WEIGHT = 0.1  # of the newest step


class StepMeter:
    """Decayed means over steps: of those in which every sequence decodes, and of those that compute prompts, too.

    A step decodes where each sequence runs one token beside what it drafts. All are 0 until there was one.
    """

    def __init__(self) -> None:
        self.decode_step_s = 0.0
        self.decode_batch = 0.0  # sequences
        self.tokens_per_step = 0.0  # of a sequence
        self.prefill_tokens_per_s = 0.0

    def observe(self, chunks: Sequence[Chunk], output: StepOutput) -> None:
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        if num_tokens == len(chunks):
            num_sampled = sum(
                len(outcome.tokens) if isinstance(outcome, VerifiedDraft) else 1 for outcome in output.sampled
            )
            self.decode_step_s = _decayed(self.decode_step_s, output.compute_s)
            self.decode_batch = _decayed(self.decode_batch, len(chunks))
            self.tokens_per_step = _decayed(self.tokens_per_step, num_sampled / len(chunks))
        elif output.compute_s > 0:
            self.prefill_tokens_per_s = _decayed(self.prefill_tokens_per_s, num_tokens / output.compute_s)


def _decayed(mean: float, newest: float) -> float:
    return newest if mean == 0.0 else mean + _WEIGHT * (newest - mean)
