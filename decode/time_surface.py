"""Seconds of a step as a function of its shape, learnt from steps as they come: a table of means, and a fit over it.

A cell of the table keeps the mean time of one kind of step; it forgets only when that kind is seen again, so what was
learnt at another load stays. The fit has no negative coefficient, so it extrapolates without ever falling. Where a cell
is known it corrects the fit. Letters: G groups, C cells of a group, F features.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_MOST_COUNT = 64.0  # a cell's mean is over about so many steps
_STALE_STEPS = 1000.0  # a cell not seen for so long counts half
_FIRST_SHARE = 0.5  # that a cell's first step counts, which often is slower than those to come
SETTLED = 12.0  # steps after which a cell's mean says what to expect
CLIP = 4.0  # in noise: a step that was disturbed counts as if it had been this much slower
_FEW, _UNSETTLED_CLIP = 4.0, 2.0  # the same from a cell's fifth step on, in means: the first may be odd themselves
_STALL, _MOST_STALLS = 3.0, 3  # a cell's first steps that took so many times what the fit says are left out, so many
_DROP = 0.33  # a new cell's mean is forgotten if a step took so much less, and as many noises: its first one was odd
_DROP_NOISES = 5.0
_FIRST_NOISE, _LEAST_NOISE, _NOISE_RATE = 0.1, 0.02, 0.02
# How cells differ from the fit, about. With noise it takes steps to know that: more of them, since it lasts for some.
_ROUGHNESS, _MOST_DOUBT = 0.02, 30.0
_SWEEPS = 12
_FIRST_STEPS, _REFIT_STEPS = 32, 8  # fitted after each of the first, then after each eighth
_RIDGE = 1e-4


class TimeSurface:
    """`floor_s` is a time too short to matter: errors count relative to the time, but at least to this."""

    def __init__(self, num_groups: int, num_cells: int, num_features: int, *, floor_s: float) -> None:
        self._floor_s = floor_s
        self._counts = np.zeros((num_groups, num_cells))
        self._means = np.zeros((num_groups, num_cells))
        self._features = np.zeros((num_groups, num_cells, num_features))
        self._seen_at = np.zeros((num_groups, num_cells))
        self._num_stalls = np.zeros((num_groups, num_cells), dtype=np.intp)
        self.coefficients = np.zeros(num_features)  # none is negative
        self._num_steps = 0
        self.noise = _FIRST_NOISE  # mean relative error of a settled cell

    @property
    def is_empty(self) -> bool:
        return self._num_steps == 0

    def leave_out(self, group: int, cell: int, features: Floats, seconds: float, ordinary_s: float = 0.0) -> bool:
        """Decides, and counts, whether something else held this step up: it is the first of its kind, and much slower
        than the fit says or, if that says less, than `ordinary_s`. What is believed to be so slow nobody tries again.

        A few times only, so that what is slow indeed is believed in the end.
        """
        expected = max(float(self.fit(features)), ordinary_s)
        is_stall = expected > 0.0 and seconds > _STALL * max(expected, self._floor_s)
        if self._counts[group, cell] or not is_stall or self._num_stalls[group, cell] >= _MOST_STALLS:
            return False
        self._num_stalls[group, cell] += 1
        return True

    def observe(self, group: int, cell: int, features: Floats, seconds: float) -> tuple[float, float]:
        """Takes one step in; returns by how much it missed its cell (relative), and on how many steps that rests."""
        count, mean = self._counts[group, cell], self._means[group, cell]
        as_fitted = (self.fit(features) + self._floor_s) / (self.fit(self._features[group, cell]) + self._floor_s)
        error = (seconds - mean * as_fitted) / max(mean * as_fitted, self._floor_s)
        num_before = float(count)
        if num_before >= SETTLED:
            self.noise += _NOISE_RATE * (max(_LEAST_NOISE, min(abs(error), CLIP * self.noise)) - self.noise)
            seconds = min(seconds, mean + CLIP * self.noise * max(mean, self._floor_s))
        elif error < -max(_DROP, _DROP_NOISES * self.noise):
            count = 0.0
        elif count >= _FEW:
            seconds = min(seconds, _UNSETTLED_CLIP * mean)
        share = 1.0 / (count + _FIRST_SHARE) if count else 1.0
        self._counts[group, cell] = min(count + 1.0, _MOST_COUNT)
        self._means[group, cell] += (seconds - mean) * share
        self._features[group, cell] += (features - self._features[group, cell]) * share
        self._seen_at[group, cell] = self._num_steps
        self._num_steps += 1
        if self._num_steps <= _FIRST_STEPS or self._num_steps % _REFIT_STEPS == 0:
            self._refit()
        return float(error), num_before

    def counts(self, group: int) -> Floats:
        """Steps each cell's mean rests on, less the longer they are ago, [C]."""
        aged = self._counts[group] * 0.5 ** ((self._num_steps - self._seen_at[group]) / _STALE_STEPS)
        return np.asarray(aged)

    def fit(self, features: Floats) -> Floats:
        """Seconds by the fit alone, [*], from features [*, F]."""
        return features @ self.coefficients

    def corrections(self, group: int) -> tuple[NDArray[np.intp], Floats]:
        """The cells of a group that are known, and the factors by which the fit misses their means."""
        known = np.flatnonzero(self._counts[group])
        fitted = self.fit(self._features[group, known])
        factors = (self._means[group, known] + self._floor_s) / (fitted + self._floor_s)
        counts = self._counts[group, known]
        doubt = min((self.noise / _ROUGHNESS) ** 2, _MOST_DOUBT)
        return known, np.asarray(factors ** (counts / (counts + doubt)))

    def _refit(self) -> None:
        """Least squares of relative errors over the known cells, without negative coefficients, by coordinates."""
        known = self._counts > 0
        aged = 0.5 ** ((self._num_steps - self._seen_at[known]) / _STALE_STEPS)
        weights = self._counts[known] * aged / np.maximum(self._means[known], self._floor_s) ** 2
        features = self._features[known]
        weighted = features * weights[:, None]
        matrix = (weighted.T @ features).tolist()
        targets = (weighted.T @ self._means[known]).tolist()
        coefficients = self.coefficients.tolist()
        for _ in range(_SWEEPS):
            for index, row in enumerate(matrix):
                if row[index] > 0.0:
                    others = (
                        sum(a * b for a, b in zip(row, coefficients, strict=True)) - row[index] * coefficients[index]
                    )
                    coefficients[index] = max(0.0, (targets[index] - others) / (row[index] * (1.0 + _RIDGE)))
        self.coefficients = np.array(coefficients)
