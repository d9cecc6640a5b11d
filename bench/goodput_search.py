"""The highest rate at which enough requests keep to their SLOs, by doubling and halving. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FIRST_FACTOR = 1.5  # from one rate to the next, until one has been too high and one has not
ENOUGH = 0.9  # of the requests within their SLOs


@dataclass(slots=True)
class RateSearch:
    """Ask `next_per_s`, try it, and `tried` it; as often as there is time for."""

    next_per_s: float
    best_per_s: float = 0.0  # the highest that was not too high
    least_bad_per_s: float = math.inf
    rates: list[tuple[float, float]] = field(default_factory=list)  # and attainments

    def tried(self, attainment: float) -> None:
        per_s = self.next_per_s
        self.rates.append((per_s, attainment))
        if attainment >= ENOUGH:
            self.best_per_s = max(self.best_per_s, per_s)
        else:
            self.least_bad_per_s = min(self.least_bad_per_s, per_s)
        if self.best_per_s and math.isfinite(self.least_bad_per_s):
            self.next_per_s = math.sqrt(self.best_per_s * self.least_bad_per_s)
        elif self.best_per_s:
            self.next_per_s = per_s * FIRST_FACTOR
        else:
            self.next_per_s = per_s / FIRST_FACTOR
