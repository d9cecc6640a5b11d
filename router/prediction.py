"""How long what is placed on a worker will take, from what the worker has measured. Pure.

The models are simple on purpose. A prompt takes its uncached tokens, and what waits before it, at the worker's mean
speed. A decode step has a fixed part, worth `FIXED_SEQUENCES` sequences, and one that grows with the batch. Nothing
else knows by what workers are compared, nor what becomes of a measurement with time; what is told of a first token is
finer (`router.first_token`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.candidate import Candidate

EXPECTED_OUTPUT_TOKENS = 256  # of an answer: before it has ended only a bound is known
FIXED_SEQUENCES = 24  # reading the weights takes as long as so many sequences add; of a 135M model on two cores, 22
FRESH_S = 10.0  # so long a measurement counts fully
FORGOTTEN_S = 60.0  # and then less and less, until nothing is known of the worker any more
DOUBTED_TRANSFER_S = 0.05  # of hand-overs: so many seconds of them count half
SPEED_STEP = 1.49  # speeds are told apart in such steps: equal machines measure what differs by 20 %, either way
_FAR_SLOWER = 3  # steps from which on a link is told apart: up to there hand-overs hide behind computing, and waver
_LEAST_S, _MOST_S = 1e-9, 1e6
_LEAST_BYTE_S, _MOST_BYTE_S = 1e-13, 1.0
_LEAST_TRANSFER_S = 1e-4  # less than that, aged, says nothing
_MOST_STAYS = 2.0  # looked ahead: should answers have become longer meanwhile, no more than twice what runs will wait
_HORIZON_S = 2.0  # of what becomes of blocks: later than that, answers will have ended that nobody knows of


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast one worker is. None: not known yet."""

    token_s: float | None  # to prefill a token
    sequence_s: float | None  # what one sequence adds to the time for a token of each
    byte_s: float | None = None  # to hand over a byte of KV

    @staticmethod
    def of(worker: Candidate) -> Pace:
        """As it has measured itself. Drafts that are accepted make a worker faster: several tokens come of a step."""
        token_s = sequence_s = None
        if worker.prefill_tokens_per_s > 0:
            token_s = _believable(1 / worker.prefill_tokens_per_s)
        if worker.decode_step_s > 0:
            per_sequence_s = worker.decode_step_s / (FIXED_SEQUENCES + worker.decode_batch)
            sequence_s = _believable(per_sequence_s / max(1.0, worker.tokens_per_step))
        return Pace(token_s, sequence_s, _byte_s(worker))

    def aged(self, worker: Candidate, typical: Pace) -> Pace:
        """As it is to be taken now: what was measured long ago says little, and then others say more."""
        return Pace(
            _faded(self.token_s, _weight_at(worker.prefill_age_s), typical.token_s),
            _faded(self.sequence_s, _weight_at(worker.decode_age_s), typical.sequence_s),
            _faded(self.byte_s, _weight_of(worker.transfer_s), typical.byte_s),
        )

    def prefill_s(self, num_tokens: int) -> float | None:
        return None if self.token_s is None else self.token_s * num_tokens

    def tpot_s(self, num_sequences: int) -> float | None:
        """With so many sequences, those that come among them."""
        return None if self.sequence_s is None else tpot_of(self.sequence_s, num_sequences)


def _believable(seconds: float) -> float:
    """Whatever a worker says: nothing takes no time, or for ever."""
    return min(max(seconds, _LEAST_S), _MOST_S)


def _byte_s(worker: Candidate) -> float | None:
    if worker.transfer_s < _LEAST_TRANSFER_S or worker.transfer_bytes <= 0:
        return None
    return min(max(worker.transfer_s / worker.transfer_bytes, _LEAST_BYTE_S), _MOST_BYTE_S)


def _weight_at(age_s: float) -> float:
    """A worker that was slow once gets nothing and measures nothing: it is to be tried again, the sooner the less slow
    it was."""
    return min(1.0, max(0.0, (FORGOTTEN_S - age_s) / (FORGOTTEN_S - FRESH_S)))


def _weight_of(transfer_s: float) -> float:
    return transfer_s / (transfer_s + DOUBTED_TRANSFER_S)


def _faded(seconds: float | None, weight: float, typical_s: float | None) -> float | None:
    if seconds is None or typical_s is None or weight == 1.0:
        return seconds
    return float(typical_s * (seconds / typical_s) ** weight)


@dataclass(frozen=True, slots=True)
class Speed:
    """In steps from what is typical, more of them the slower. Within half a step of that all are alike."""

    token: int = 0
    sequence: int = 0
    link: int = 0  # only where it is far slower

    @staticmethod
    def of(pace: Pace, typical: Pace) -> Speed:
        link = _steps(pace.byte_s, typical.byte_s)
        return Speed(
            _steps(pace.token_s, typical.token_s),
            _steps(pace.sequence_s, typical.sequence_s),
            link if link >= _FAR_SLOWER else 0,
        )

    def pace(self, typical: Pace) -> Pace:
        return Pace(stepped(typical.token_s, self.token), stepped(typical.sequence_s, self.sequence))


def _steps(seconds: float | None, typical_s: float | None) -> int:
    """Two that differ by a whole step or more never have the same number."""
    if seconds is None or typical_s is None:
        return 0
    return math.floor(math.log(seconds / typical_s) / math.log(SPEED_STEP) + 0.5)


def stepped(typical_s: float | None, num_steps: int) -> float | None:
    return None if typical_s is None else typical_s * SPEED_STEP**num_steps


def tpot_of(sequence_s: float, num_sequences: int) -> float:
    """Seconds per token of each, with a step's fixed part shared."""
    return sequence_s * (FIXED_SEQUENCES + num_sequences)


def num_active_at(worker: Candidate, now: float, in_s: float, most: int) -> float:
    """Sequences that will run or wait there then, of those that do or are on their way, if `most` run at once.

    Each stays for so long in the mean, and those on their way come evenly until then: they went before whoever will be
    there only then. However many there are, no more leave than can run.
    """
    num_ended = sum(now <= at <= now + in_s for at, _ in worker.releases)
    num_known = float(worker.num_active - num_ended)
    if in_s <= 0.0 or worker.stay_s <= 0.0:
        return num_known
    stays = min(in_s / worker.stay_s, _MOST_STAYS)
    num_coming = min(worker.num_coming, worker.num_active)
    num_left = (worker.num_active - num_coming) * math.exp(-stays)
    num_left += num_coming * -math.expm1(-stays) / stays
    return min(num_known, max(num_left, worker.num_active - most * stays))


def num_free_blocks_at(worker: Candidate, now: float, in_s: float, sequence_s: float | None, block_size: int) -> float:
    """Blocks that will be free then, as far as is known: sequences grow until then, and some reach their last token."""
    in_s = min(in_s, _HORIZON_S)
    num_released = sum(num_blocks for at, num_blocks in worker.releases if now <= at <= now + in_s)
    if sequence_s is None:
        return worker.num_free_blocks + num_released
    num_tokens = worker.num_active * in_s / tpot_of(sequence_s, worker.num_active)
    return worker.num_free_blocks + num_released - num_tokens / block_size
