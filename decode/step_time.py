"""How long a decode step will take: one forward over all rows, and the drafter's steps before it.

The forward costs a base, its rows (flat while memory is the limit, then by the row: so with knees), the context it
reads and the experts it touches. The drafter costs something when asked at all, per step and per token. Both are learnt
from measured steps. Letters: K longest draft, D drafts of all sequences together.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

import numpy as np

from decode.coverage import ExpertCoverage
from decode.time_surface import CLIP, SETTLED, Floats, TimeSurface

_KNEES = np.array([4.0, 8.0, 16.0, 32.0, 64.0, 128.0])
_FLOOR_S = 1e-6
_EXACT_ROWS, _ROWS_PER_OCTAVE, _MOST_ROWS = 16, 8, 4096
_EXACT_SEQUENCES, _SEQUENCES_PER_OCTAVE, _MOST_SEQUENCES = 8, 4, 1024
_UNSEEN_WEIGHT = 0.1  # in steps, of a time that nothing like it was measured of
_DRIFT_RATE = 0.1  # of a step's error: what a virtual machine gets of its processors changes every few seconds
_DRIFT_COUNT = 4.0  # steps of a kind after which its errors count half
_MOST_LOG_DRIFT = math.log(1000.0)
_DRIFT_STEPS = 9
_DRIFT_NOISES = 2.6  # median error of so many steps, in noise, that shows the machine itself to be slower: 5 sigma


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step without prefill did. `longest_draft` and `num_asked_tokens`: as asked of the drafter, without drafts
    that are free (see `decode.outlook`)."""

    num_sequences: int
    num_context_tokens: int
    num_draft_tokens: int = 0
    num_asked_tokens: int = 0
    longest_draft: int = 0


@dataclass(frozen=True, slots=True)
class StepForecast:
    """By number of drafts and length of the longest. `num_seen[D]`: steps like it that were measured, old ones less."""

    verify_s: Floats  # [D + 1], never falling
    draft_s: Floats  # [K + 1], never falling: of the drafter
    draft_token_s: Floats  # [K + 1]: beside that, of each token
    num_seen: Floats  # [D + 1]
    noise: float  # of one step, relative

    @property
    def most_drafts(self) -> int:
        """Of all sequences together: how far it reaches."""
        return len(self.verify_s) - 1

    @property
    def plain_s(self) -> float:
        return float(self.verify_s[0] + self.draft_s[0])

    def drafting_s(self, longest: int, num_drafts: int) -> float:
        """What so many drafts take the drafter, the longest of them of so many tokens."""
        return float(self.draft_s[longest] + self.draft_token_s[longest] * num_drafts)

    @property
    def doubt(self) -> Floats:
        """By how much a step may be faster than forecast, relative, [D + 1]: 25 % and twice the noise if never seen."""
        doubt: Floats = 0.25 / (1.0 + self.num_seen) + 2.0 * min(self.noise, 0.2) / np.sqrt(1.0 + self.num_seen)
        return doubt


class StepTime:
    """Learns from `observe`, answers with `forecast`. Without `coverage` the model is taken to be dense.

    When all steps get slower or faster together (another process took a core) that is *drift*, a factor on everything:
    a plain step's time measured before then still compares with a drafted one's measured after.
    """

    def __init__(self, longest_draft: int, coverage: ExpertCoverage | None = None) -> None:
        self._longest_draft = longest_draft
        self._coverage = coverage
        num_groups = _bin(_MOST_SEQUENCES, _EXACT_SEQUENCES, _SEQUENCES_PER_OCTAVE) + 1
        num_cells = _bin(_MOST_ROWS, _EXACT_ROWS, _ROWS_PER_OCTAVE) + 1
        self._verify = TimeSurface(num_groups, num_cells, 4 + len(_KNEES), floor_s=_FLOOR_S)
        self._draft = TimeSurface(num_groups, longest_draft + 1, 4, floor_s=_FLOOR_S)
        self._cell_of_rows = np.array([_bin(n, _EXACT_ROWS, _ROWS_PER_OCTAVE) for n in range(1, _MOST_ROWS + 1)])
        self._rows_of_cell = np.array([np.flatnonzero(self._cell_of_rows == c).mean() + 1 for c in range(num_cells)])
        self._log_drift = 0.0
        self._errors: deque[float] = deque(maxlen=_DRIFT_STEPS)

    @property
    def is_known(self) -> bool:
        """False until a step was measured: a forecast would be zeros."""
        return not self._verify.is_empty

    @property
    def drift(self) -> float:
        """How much slower than at first the machine is, all kinds of steps together."""
        return math.exp(self._log_drift)

    def observe(self, shape: StepShape, verify_s: float, draft_s: float) -> None:
        """`verify_s`: of the step but for the drafter. Times that are no times are left out, and
        the first few of a kind of step that something else seems to have held up."""
        if not (0.0 < verify_s < math.inf and 0.0 <= draft_s < math.inf and shape.num_sequences > 0):
            return
        group = _bin(min(shape.num_sequences, _MOST_SEQUENCES), _EXACT_SEQUENCES, _SEQUENCES_PER_OCTAVE)
        num_rows = shape.num_sequences + shape.num_draft_tokens
        features = self._verify_features(shape.num_sequences, shape.num_context_tokens, np.array([float(num_rows)]))[0]
        cell = self._cell_of_rows[min(num_rows, _MOST_ROWS) - 1]
        longest = min(shape.longest_draft, self._longest_draft)
        asked = np.array([1.0, longest > 0, longest, shape.num_asked_tokens], dtype=np.float64)
        ordinary_s = float(self._verify.fit(features))  # a draft is not thought to take longer than its verification
        if self._verify.leave_out(group, cell, features, verify_s / self.drift) or self._draft.leave_out(
            group, longest, asked, draft_s / self.drift, ordinary_s
        ):
            return
        drift = self.drift
        self._follow_drift(*self._verify.observe(group, cell, features, verify_s / drift))
        self._draft.observe(group, longest, asked, draft_s / drift)

    def forecast(
        self, num_sequences: int, num_context_tokens: int, num_draft_tokens: int, longest_draft: int
    ) -> StepForecast:
        """For 0 to `num_draft_tokens` drafts together, 0 to `longest_draft` in one sequence."""
        group = _bin(min(num_sequences, _MOST_SEQUENCES), _EXACT_SEQUENCES, _SEQUENCES_PER_OCTAVE)
        num_rows = np.arange(num_sequences, num_sequences + num_draft_tokens + 1, dtype=np.float64)
        verify_s = self._verify.fit(self._verify_features(num_sequences, num_context_tokens, num_rows))
        known, factors = self._verify.corrections(group)
        if len(known):
            verify_s = verify_s * np.interp(num_rows, self._rows_of_cell[known], factors)
        cells = self._cell_of_rows[np.minimum(num_rows, _MOST_ROWS).astype(np.intp) - 1]
        num_seen = self._verify.counts(group)[cells]
        return StepForecast(
            np.maximum(isotonic(verify_s, num_seen + _UNSEEN_WEIGHT) * self.drift, _FLOOR_S),
            *self._draft_s(group, longest_draft),
            num_seen,
            self._verify.noise,
        )

    def _draft_s(self, group: int, longest_draft: int) -> tuple[Floats, Floats]:
        lengths = np.arange(longest_draft + 1, dtype=np.float64)
        idle, asked, per_step, per_token = self._draft.coefficients.tolist()
        seconds = idle + asked * (lengths > 0) + per_step * lengths
        known, factors = self._draft.corrections(group)
        scale = np.interp(lengths, known, factors) if len(known) else np.ones(len(lengths))
        num_seen = self._draft.counts(group)[: len(lengths)]
        return isotonic(seconds * scale, num_seen + _UNSEEN_WEIGHT) * self.drift, per_token * scale * self.drift

    def _verify_features(self, num_sequences: int, num_context_tokens: int, num_rows: Floats) -> Floats:
        features = np.zeros((len(num_rows), 4 + len(_KNEES)))
        features[:, 0] = 1.0
        features[:, 1] = num_context_tokens
        if self._coverage is not None:
            features[:, 2] = self._coverage.predict(num_sequences, num_rows)
        features[:, 3] = num_rows
        np.maximum(num_rows[:, None] - _KNEES, 0.0, out=features[:, 4:])
        return features

    def _follow_drift(self, error: float, count: float) -> None:
        """A little with every step, and at once where steps of settled kinds agree that it is much."""
        most = CLIP * self._verify.noise  # as for the means: with another clip slow steps would drive the two apart
        change = _DRIFT_RATE * count / (count + _DRIFT_COUNT) * min(error, most)
        self._log_drift = max(-_MOST_LOG_DRIFT, min(self._log_drift + change, _MOST_LOG_DRIFT))
        if count < SETTLED:
            return
        self._errors.append(error)
        limit = _DRIFT_NOISES * self._verify.noise
        if len(self._errors) == _DRIFT_STEPS and abs(statistics.median(self._errors)) > limit:
            self._log_drift += math.log1p(statistics.median(e for e in self._errors if abs(e) > limit))
            self._errors.clear()


def isotonic(values: Floats, weights: Floats) -> Floats:
    """The sequence nearest to `values` that never falls, by weighted squares: pool adjacent violators.

    So a value that rests on little does not lift those behind it that are well known.
    """
    if not (values[1:] < values[:-1]).any():
        return values
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        length = 1
        while pools and pools[-1][0] > value:
            mean, of_mean, before = pools.pop()
            value, weight = (value * weight + mean * of_mean) / (weight + of_mean), weight + of_mean
            length += before
        pools.append((value, weight, length))
    return np.repeat([mean for mean, _, _ in pools], [length for _, _, length in pools])


def _bin(count: int, num_exact: int, num_per_octave: int) -> int:
    """Small counts have a bin each, larger ones share theirs with counts a little larger or smaller. From 0."""
    if count <= num_exact:
        return count - 1
    return num_exact - 1 + math.ceil(num_per_octave * math.log2(count / num_exact))
