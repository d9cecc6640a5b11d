"""How fast a simulated worker says it has been: the means and tallies of `deploy.step_meter`, over many steps at once,
and the sums of `kvtransfer.transfer_meter`.
"""

from __future__ import annotations

from collections.abc import Callable

from router.step_tally import StepTally

_WEIGHT = 0.1  # of the newest step, if it follows the one before at once
_FORGOTTEN_S = 60.0  # after such a pause it is all that counts
_HALF_LIFE_S = 30.0  # of what was transferred


class SimulatedMeter:
    """Told of steps when they end, and of transfers when they begin."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.decode_step_s = 0.0
        self.decode_batch = 0.0
        self.tokens_per_step = 0.0
        self.prefill_tokens_per_s = 0.0
        self.tally = StepTally()
        self._clock = clock
        self._prefilled_at: float | None = None
        self._decoded_at: float | None = None
        self._transferred_at = 0.0
        self._transfer_bytes = self._transfer_s = 0.0

    @property
    def prefill_age_s(self) -> float:
        return self._since(self._prefilled_at)

    @property
    def decode_age_s(self) -> float:
        return self._since(self._decoded_at)

    @property
    def transfers(self) -> tuple[float, float]:
        """Bytes, and seconds in which they were under way."""
        kept = 0.5 ** (max(0.0, self._clock() - self._transferred_at) / _HALF_LIFE_S)
        return kept * self._transfer_bytes, kept * self._transfer_s

    def prefilled(self, num_tokens: int, step_s: float, num_pairs: int = 0) -> None:
        """`num_pairs`: of one that computed prompts and nothing else."""
        if step_s > 0:
            if num_pairs:
                self.tally.prefilled(num_tokens, num_pairs, step_s)
            weight = _weight(self.prefill_age_s - step_s)
            self.prefill_tokens_per_s = _decayed(self.prefill_tokens_per_s, 1, num_tokens / step_s, 0.0, weight)
            self._prefilled_at = self._clock()

    def decoded(
        self,
        num_rounds: int,
        num_sequences: int,
        first_s: float,
        last_s: float,
        tokens_per_step: float,
        num_context_tokens: float,
    ) -> None:
        """Steps of so many rounds, each a little longer than the one before, from the first to the last. The context is
        that of the middle one."""
        self.tally.decoded(num_sequences, num_context_tokens, (first_s + last_s) / 2, tokens_per_step)
        num_steps = max(1, round(num_rounds / tokens_per_step))
        more_s = (last_s - first_s) / (num_steps - 1) if num_steps > 1 else 0.0
        weight = _weight(self.decode_age_s - num_steps * (first_s + last_s) / 2)
        self.decode_step_s = _decayed(self.decode_step_s, num_steps, first_s, more_s, weight)
        self.decode_batch = _decayed(self.decode_batch, num_steps, num_sequences, 0.0, weight)
        self.tokens_per_step = _decayed(self.tokens_per_step, num_steps, tokens_per_step, 0.0, weight)
        self._decoded_at = self._clock()

    def transferred(self, num_bytes: float, seconds: float) -> None:
        before_bytes, before_s = self.transfers
        self._transferred_at = self._clock()
        self._transfer_bytes, self._transfer_s = before_bytes + num_bytes, before_s + seconds

    def _since(self, at: float | None) -> float:
        return 0.0 if at is None else self._clock() - at


def _weight(pause_s: float) -> float:
    """Of a step after such a pause."""
    return min(1.0, max(_WEIGHT, pause_s / _FORGOTTEN_S))


def _decayed(mean: float, number: int, first: float, more: float, weight: float) -> float:
    """Of `first`, `first + more` and so on, the first with this weight: a mean lags behind a straight line, by what is
    left of where it was."""
    mean = first if mean == 0.0 else mean + weight * (first - mean)
    lag = more / _WEIGHT
    return first + number * more - lag + (1 - _WEIGHT) ** (number - 1) * (mean - first - more + lag)
