"""How long what is placed on a worker will take, from what the worker has measured. Pure.

The models are simple on purpose. A prompt takes its uncached tokens, and what waits before it, at the worker's mean
speed. A decode step has a fixed part, worth `FIXED_SEQUENCES` sequences, and one that grows with the batch. Finer ones
take the place of `Pace` and its two functions: nothing else knows how times come about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.candidate import Candidate

EXPECTED_OUTPUT_TOKENS = 256  # of an answer: before it has ended only a bound is known
FIXED_SEQUENCES = 24  # reading the weights takes as long as so many sequences add; of a 135M model on two cores, 22
_STEPS = 4  # of speeds that are told apart, between one and its double
_LEAST_S, _MOST_S = 1e-9, 1e6
_HORIZON_S = 2.0  # of what becomes of blocks: later than that, answers will have ended that nobody knows of


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast one worker is. None: not known yet."""

    token_s: float | None  # to prefill a token
    sequence_s: float | None  # what one sequence adds to the time for a token of each

    @staticmethod
    def of(worker: Candidate) -> Pace:
        """As it has measured itself. Drafts that are accepted make a worker faster: several tokens come of a step."""
        token_s = sequence_s = None
        if worker.prefill_tokens_per_s > 0:
            token_s = _believable(1 / worker.prefill_tokens_per_s)
        if worker.decode_step_s > 0:
            per_sequence_s = worker.decode_step_s / (FIXED_SEQUENCES + worker.decode_batch)
            sequence_s = _believable(per_sequence_s / max(1.0, worker.tokens_per_step))
        return Pace(token_s, sequence_s)

    def rounded(self) -> Pace:
        """To a few values: measurements are noisy, and machines that are alike had better look alike."""
        return Pace(_rounded(self.token_s), _rounded(self.sequence_s))

    def prefill_s(self, num_tokens: int) -> float | None:
        return None if self.token_s is None else self.token_s * num_tokens

    def tpot_s(self, num_sequences: int) -> float | None:
        """With so many sequences, those that come among them."""
        return None if self.sequence_s is None else tpot_of(self.sequence_s, num_sequences)


def _believable(seconds: float) -> float:
    """Whatever a worker says: nothing takes no time, or for ever."""
    return min(max(seconds, _LEAST_S), _MOST_S)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else 2.0 ** (round(math.log2(seconds) * _STEPS) / _STEPS)


def tpot_of(sequence_s: float, num_sequences: int) -> float:
    """Seconds per token of each, with a step's fixed part shared."""
    return sequence_s * (FIXED_SEQUENCES + num_sequences)


def num_free_blocks_at(worker: Candidate, now: float, in_s: float, sequence_s: float | None, block_size: int) -> float:
    """Blocks that will be free then, as far as is known: sequences grow until then, and some reach their last token."""
    in_s = min(in_s, _HORIZON_S)
    num_released = sum(num_blocks for at, num_blocks in worker.releases if now <= at <= now + in_s)
    if sequence_s is None:
        return worker.num_free_blocks + num_released
    num_tokens = worker.num_active * in_s / tpot_of(sequence_s, worker.num_active)
    return worker.num_free_blocks + num_released - num_tokens / block_size
