"""What a router is told of the steps that this worker has measured: a few of them about once a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from deploy.step_meter import StepMeter
from router.measured_steps import Steps
from router.step_tally import StepTally

_EVERY_S = 1.0  # a router learns from hundreds of workers


class StepFeed:
    """Listens to `meter` from `begin` until `close`."""

    def __init__(self, meter: StepMeter, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter = meter
        self._clock = clock
        self._tally = StepTally()
        self._told_at = 0.0

    def begin(self) -> None:
        """What was measured before is not told."""
        self._tally.take()
        self._told_at = self._clock()
        if self._tally not in self._meter.tallies:
            self._meter.tallies.append(self._tally)

    def close(self) -> None:
        """It listens no longer, unless it begins again."""
        if self._tally in self._meter.tallies:
            self._meter.tallies.remove(self._tally)

    def next(self) -> Sequence[Steps]:
        """To be asked with each report that goes out; mostly there is nothing to be said."""
        now = self._clock()
        if now - self._told_at < _EVERY_S:
            return ()
        steps = self._tally.take()
        if steps:
            self._told_at = now
        return steps
