"""Coefficients that are never negative, learnt from one measurement after another: recursive least squares.

Old measurements fade, but only where new ones take their place (directional forgetting: Cao and Schwartz, Automatica
2000): a steady load does not make it forget what it has seen of other loads. A measurement that is far off moves it
little (Huber's weights), and several in a row that agree are a change of speed, which is followed at once.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from itertools import combinations, islice

_FIRST_NOISE = 0.1  # relative, of one measurement
_MISS_SHARE = 0.05  # of each measurement in the mean
_NUM_ERRORS = 41  # whose spread tells the noise
_TO_NOISE = 1.4826  # of the median of what is normally distributed
_LEAST_NOISE = 0.005
_CLIP = 2.5  # in noise: what is further off counts as if it were so far
_NUM_AGREEING = 9  # measurements whose median shows a change
_CHANGED = 3.0  # in noise, and
_LEAST_CHANGE = 0.1  # relative
_KEPT = 0.1  # of what was learnt before, when the speed has changed
_RIDGE = 1e-4  # of a measurement: what the prior knows of a direction in which no usual shape goes
_TINY = 1e-12


class LeastSquares:
    """`prior` counts as much as `weight` measurements of `shapes`, the features that are usual. `memory`: so many
    measurements alike count, older ones fade."""

    def __init__(
        self, prior: Sequence[float], shapes: Sequence[Sequence[float]], *, weight: float, memory: float = 300.0
    ) -> None:
        size = len(prior)
        if not prior or min(prior) < 0 or max(prior) == 0 or weight <= 0 or memory <= 1:
            raise ValueError("a prior has no negative value and not only zeros; weight is above 0, memory above 1")
        if not shapes or any(len(shape) != size for shape in shapes):
            raise ValueError(f"there are {size} coefficients, and shapes have to have as many features")
        usual_s = [sum(map(_product, prior, shape)) for shape in shapes]
        self._scales = [1.0 / max(shape[i] / s for shape, s in zip(shapes, usual_s, strict=True)) for i in range(size)]
        self._free = [value / scale for value, scale in zip(prior, self._scales, strict=True)]  # may be negative
        self._information = [[_RIDGE if i == j else 0.0 for j in range(size)] for i in range(size)]
        for shape, seconds in zip(shapes, usual_s, strict=True):
            row = [each / seconds for each in self._scaled(shape)]
            for i in range(size):
                for j in range(size):
                    self._information[i][j] += weight / len(shapes) * row[i] * row[j]
        self._forgetting = 1.0 / memory
        self._memory = memory
        self._errors: deque[float] = deque(maxlen=_NUM_ERRORS)  # logarithms: measured over predicted
        self._miss = 0.0
        self._num_seen = 0.0
        self._weight = weight
        self._bounded = list(self._free)

    @property
    def coefficients(self) -> list[float]:
        return [value * scale for value, scale in zip(self._bounded, self._scales, strict=True)]

    @property
    def confidence(self) -> float:
        """0 to 1: how much was measured, beside what the prior counts for, and how far off predictions are lately."""
        return self._num_seen / (self._num_seen + self._weight + 10.0) / (1.0 + 5.0 * self._miss)

    @property
    def miss(self) -> float:
        """How far off predictions are lately, as the mean of |log(measured / predicted)|; at most 1."""
        return self._miss

    def predict(self, features: Sequence[float]) -> float:
        return sum(map(_product, self._bounded, self._scaled(features)))

    def observe(self, features: Sequence[float], value: float) -> None:
        """Values that are no measurements are left out."""
        if not 0.0 < value < math.inf or not any(features):
            return
        row = self._scaled(features)
        predicted = max(sum(map(_product, self._bounded, row)), _TINY * value)
        error = math.log(value / predicted)
        share = 1.0 / min(self._num_seen + 1.0, 1.0 / _MISS_SHARE)
        self._miss += share * (min(abs(error), 1.0) - self._miss)
        self._errors.append(error)
        if self._has_changed():
            return
        limit = _CLIP * self._noise
        certainty = 1.0 if abs(error) <= limit else limit / abs(error)
        size = math.sqrt(predicted * value)  # errors are relative, to what lies between: both may be far off
        self._learn([each / size for each in row], value / size, certainty)
        self._num_seen = min(self._num_seen + 1.0, self._memory)

    @property
    def _noise(self) -> float:
        """Relative, of one measurement, as far as it is not an error of all of them."""
        if len(self._errors) < _NUM_AGREEING:
            return _FIRST_NOISE
        middle = statistics.median(self._errors)
        return max(_TO_NOISE * statistics.median(abs(error - middle) for error in self._errors), _LEAST_NOISE)

    def _scaled(self, features: Sequence[float]) -> list[float]:
        return [feature * scale for feature, scale in zip(features, self._scales, strict=True)]

    def _has_changed(self) -> bool:
        """Where measurements agree that all is slower or faster, it is so from now on."""
        if len(self._errors) < _NUM_AGREEING:
            return False
        latest = list(islice(self._errors, len(self._errors) - _NUM_AGREEING, None))
        middle, limit = statistics.median(latest), max(_CHANGED * self._noise, _LEAST_CHANGE)
        if abs(middle) <= limit:
            return False
        factor = math.exp(statistics.median(error for error in latest if error * middle > abs(middle) * limit))
        self._free = [value * factor for value in self._free]
        self._bounded = [value * factor for value in self._bounded]
        self._information = [[_KEPT * each for each in line] for line in self._information]
        self._num_seen *= _KEPT
        self._errors.clear()
        return True

    def _learn(self, row: list[float], value: float, certainty: float) -> None:
        information, size = self._information, len(row)
        product = [sum(map(_product, line, row)) for line in information]
        known = sum(map(_product, product, row))
        faded = self._forgetting / known if known > 1.0 else 0.0  # what is hardly known has nothing to lose
        for i in range(size):
            for j in range(size):
                information[i][j] += certainty * row[i] * row[j] - faded * product[i] * product[j]
        error = value - sum(map(_product, self._free, row))
        step = _solved(information, [certainty * each * error for each in row])
        self._free = [each + change for each, change in zip(self._free, step, strict=True)]
        self._bounded = self._free if min(self._free) >= 0.0 else self._nearest()

    def _nearest(self) -> list[float]:
        """The likeliest coefficients of which none is negative: the best of those with some of them 0."""
        size = len(self._free)
        target = [sum(map(_product, line, self._free)) for line in self._information]
        best, best_gain = [0.0] * size, 0.0
        for number in range(1, size + 1):
            for kept in combinations(range(size), number):
                part = [[self._information[i][j] for j in kept] for i in kept]
                values = _solved(part, [target[i] for i in kept])
                gain = sum(map(_product, values, (target[i] for i in kept)))
                if min(values) >= 0.0 and gain > best_gain:
                    best, best_gain = [0.0] * size, gain
                    for index, value in zip(kept, values, strict=True):
                        best[index] = value
        return best


def _product(one: float, other: float) -> float:
    return one * other


def _solved(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Of a positive definite system, by elimination. A direction of which nothing is known stays as it is."""
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for i in range(size):
        pivot = rows[i][i]
        if pivot <= _TINY:
            rows[i] = [0.0] * (size + 1)
            rows[i][i] = 1.0
            continue
        for j in range(i + 1, size):
            factor = rows[j][i] / pivot
            if factor:
                rows[j] = [each - factor * other for each, other in zip(rows[j], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
