"""What a step could draft, and what each way would bring: expected tokens over predicted time.

For each length that drafts may have at most (the cap, which free drafts need not keep to) the most likely drafts come
first. A draft is never likelier than the one before it in its sequence, so that each prefix of that list is possible,
and it is the best choice of its size; time depends on size and cap only, but for the little that the drafter takes for
each token that is not free. So the best prefix over all caps is the best of all choices, as far as forecasts go.
Letters: B sequences, K positions, C caps 0 to K, M drafts that are possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decode.step_time import StepForecast

Floats = NDArray[np.float64]
_LEAST_SURVIVAL = 0.01  # a draft that hardly ever stands brings nothing, and many of them make large tables

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
    _likely: Floats  # [M], that each stands: the likeliest first
    _least_caps: NDArray[np.intp]  # [M], under which each may be had
    _num_sequences: int

    @property
    def best(self) -> Choice:
        return self.highest(self.rates)

    def highest(self, table: Floats) -> Choice:
        cap, prefix = np.unravel_index(int(table.argmax()), table.shape)
        return int(cap), int(prefix)

    def least_chance(self, choice: Choice) -> float:
        """That the least likely of its drafts, of which there must be some, stands."""
        cap, prefix = choice
        return float(self._likely[:prefix][self._least_caps[:prefix] <= cap][-1])

    def draft_lengths(self, choice: Choice) -> list[int]:
        """Drafts per sequence, [B]."""
        cap, prefix = choice
        owners = self._owners[:prefix][self._least_caps[:prefix] <= cap]
        lengths: list[int] = np.bincount(owners, minlength=self._num_sequences).tolist()
        return lengths


def weigh(
    survival: Floats, limits: Sequence[int], are_free: Sequence[bool], num_spare_tokens: int, forecast: StepForecast
) -> DraftOptions:
    """`survival[i, j]`: that draft j of sequence i stands, with those it is behind, [B, K], falling along K. `limits`:
    drafts each sequence may have, `are_free`: whose take the drafter no time, [B] each. Drafts that hardly ever stand
    are left out.

    `forecast` must reach as far as they do, together and at most.
    """
    num_sequences, num_positions = survival.shape
    possible = (np.arange(num_positions) < np.array(limits)[:, None]) & (survival >= _LEAST_SURVIVAL)
    owners, positions = np.nonzero(possible)
    likely = survival[possible]
    order = np.argsort(-likely, kind="stable")  # of equals, the one before comes first
    owners, positions = owners[order], positions[order]
    is_free = np.array(are_free, dtype=np.bool_)[owners]
    least_caps = np.where(is_free, 0, positions + 1)
    caps = np.arange(int(least_caps.max(initial=0)) + 1)
    taken = np.zeros((len(caps), len(order) + 1), dtype=np.bool_)
    taken[:, 1:] = least_caps <= caps[:, None]
    gains = np.zeros(len(order) + 1)
    gains[1:] = likely[order]
    num_tokens = num_sequences + np.cumsum(taken * gains, axis=1)
    num_drafts = np.cumsum(taken, axis=1, dtype=np.intp)
    seconds = forecast.verify_s[num_drafts]
    num_made = np.zeros_like(num_drafts)
    num_made[:, 1:] = np.cumsum(taken[:, 1:] & ~is_free, axis=1)
    seconds += forecast.draft_s[caps, None] + forecast.draft_token_s[caps, None] * num_made
    rates = num_tokens / seconds
    if num_spare_tokens < len(order):
        rates[num_drafts > num_spare_tokens] = 0.0
    return DraftOptions(num_tokens, seconds, rates, num_drafts, owners, gains[1:], least_caps, num_sequences)
