"""What a step could draft, and what each way would bring: expected tokens over predicted time.

For each longest draft (the cap) the most likely drafts come first. A draft is never likelier than the one before it in
its sequence, so that each prefix of that list is possible, and it is the best choice of its size; time depends on size
and cap only. So the best prefix over all caps is the best of all choices, as far as forecasts go.
Letters: B sequences, K positions, C caps 0 to K, M drafts that are possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decode.step_time import StepForecast

Floats = NDArray[np.float64]
Choice = tuple[int, int]
"""Cap and length of the prefix: an index into the tables."""


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Tables over caps and prefixes, [C, M + 1]; a choice that is not allowed has rate 0."""

    num_tokens: Floats  # expected to be emitted by all sequences together
    seconds: Floats
    rates: Floats  # tokens per second
    num_drafts: NDArray[np.intp]  # an index into the forecast
    _owners: NDArray[np.intp]  # [M], sequence of each draft
    _positions: NDArray[np.intp]  # [M], from 1
    _num_sequences: int

    @property
    def best(self) -> Choice:
        return self.highest(self.rates)

    def highest(self, table: Floats) -> Choice:
        cap, prefix = np.unravel_index(int(table.argmax()), table.shape)
        return int(cap), int(prefix)

    def draft_lengths(self, choice: Choice) -> list[int]:
        """Drafts per sequence, [B]."""
        cap, prefix = choice
        owners = self._owners[:prefix][self._positions[:prefix] <= cap]
        lengths: list[int] = np.bincount(owners, minlength=self._num_sequences).tolist()
        return lengths


def weigh(survival: Floats, limits: Sequence[int], num_spare_tokens: int, forecast: StepForecast) -> DraftOptions:
    """`survival[i, j]`: that drafts 0 to j of sequence i stand, [B, K]. `limits`: drafts each sequence may have, [B].

    `forecast` must reach as far as they do, together and at most.
    """
    num_sequences, num_positions = survival.shape
    possible = np.arange(num_positions) < np.array(limits)[:, None]
    owners, positions = np.nonzero(possible)
    likely = survival[possible]
    order = np.argsort(-likely, kind="stable")  # of equals, the one before comes first
    owners, positions = owners[order], positions[order] + 1
    caps = np.arange(max(limits, default=0) + 1)
    taken = np.zeros((len(caps), len(order) + 1), dtype=np.bool_)
    taken[:, 1:] = positions <= caps[:, None]
    gains = np.zeros(len(order) + 1)
    gains[1:] = likely[order]
    num_tokens = num_sequences + np.cumsum(taken * gains, axis=1)
    num_drafts = np.cumsum(taken, axis=1, dtype=np.intp)
    seconds = forecast.verify_s[num_drafts]
    seconds += forecast.draft_s[caps, None] + forecast.draft_token_s[caps, None] * num_drafts
    rates = num_tokens / seconds
    if num_spare_tokens < len(order):
        rates[num_drafts > num_spare_tokens] = 0.0
    return DraftOptions(num_tokens, seconds, rates, num_drafts, owners, positions, num_sequences)
