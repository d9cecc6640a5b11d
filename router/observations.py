"""What a router knows at a moment, for a planner. It thinks in another thread: nothing of it changes any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from router.admission import Gate
from router.candidate import WorkerId
from router.history import History
from router.observation import LearntTimes, Observation
from router.observing import Observing
from router.step_costs import StepCosts
from router.step_models import UNKNOWN
from router.traffic_sharing import TrafficSharing
from router.workers import WorkerTable


class Observations:
    """`others`: what other routers have told."""

    def __init__(
        self,
        table: WorkerTable,
        gate: Gate,
        history: History,
        observing: Observing,
        others: TrafficSharing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._gate = gate
        self._history = history
        self._observing = observing
        self._others = others
        self._clock = clock

    def take(self) -> Observation:
        """With what has come and was answered since the last time."""
        arrived, answered = self._observing.take()
        workers = tuple(self._table.snapshot())
        return Observation(
            self._clock(),
            workers,
            self._gate.num_waiting + self._others.num_waiting_elsewhere,
            arrived,
            answered,
            running=[*self._history.running(), *self._others.running_elsewhere],
            fixed=frozenset(worker.id.name for worker in workers if not worker.flippable),
            block_size=1 if (layout := self._table.layout) is None else layout.block_size,
            models=TimesNow.of(self._table.models, (worker.id for worker in workers)),
        )


@dataclass(frozen=True, slots=True)
class TimesNow:
    """A LearntTimes as it was."""

    by_worker: Mapping[WorkerId, tuple[StepCosts, tuple[float, float]]]

    @classmethod
    def of(cls, models: LearntTimes, worker_ids: Iterable[WorkerId]) -> TimesNow:
        return cls({each: (models.costs_of(each), models.confidences_of(each)) for each in worker_ids})

    def costs_of(self, worker_id: WorkerId) -> StepCosts:
        known = self.by_worker.get(worker_id)
        return UNKNOWN if known is None else known[0]

    def confidences_of(self, worker_id: WorkerId) -> tuple[float, float]:
        known = self.by_worker.get(worker_id)
        return (0.0, 0.0) if known is None else known[1]
