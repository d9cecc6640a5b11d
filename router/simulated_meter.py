"""How fast a simulated worker says its steps have been: the means of `deploy.step_meter`, over many steps at once."""

from __future__ import annotations

_WEIGHT = 0.1  # of the newest step


class SimulatedMeter:
    def __init__(self) -> None:
        self.decode_step_s = 0.0
        self.decode_batch = 0.0
        self.tokens_per_step = 0.0
        self.prefill_tokens_per_s = 0.0

    def prefilled(self, num_tokens: int, step_s: float) -> None:
        if step_s > 0:
            self.prefill_tokens_per_s = _decayed(self.prefill_tokens_per_s, 1, num_tokens / step_s, 0.0)

    def decoded(
        self, num_rounds: int, num_sequences: int, first_s: float, last_s: float, tokens_per_step: float
    ) -> None:
        """Steps of so many rounds, each a little longer than the one before, from the first to the last."""
        num_steps = max(1, round(num_rounds / tokens_per_step))
        more_s = (last_s - first_s) / (num_steps - 1) if num_steps > 1 else 0.0
        self.decode_step_s = _decayed(self.decode_step_s, num_steps, first_s, more_s)
        self.decode_batch = _decayed(self.decode_batch, num_steps, num_sequences, 0.0)
        self.tokens_per_step = _decayed(self.tokens_per_step, num_steps, tokens_per_step, 0.0)


def _decayed(mean: float, number: int, first: float, more: float) -> float:
    """Of `first`, `first + more` and so on: the mean lags behind a straight line, by what is left of where it was."""
    if mean == 0.0:
        mean = first
    lag = more / _WEIGHT
    return first + number * more - lag + (1 - _WEIGHT) ** number * (mean - first + lag)
