"""Makes the faults of a plan happen: counts occasions, decides, logs and counts. Made only where faults are wanted.

The agent and the client around the product's own ask it about every message and write; services around them tell it
the stages.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable

from kvtransfer import metrics
from kvtransfer.faults import Fault, FaultPlan, FaultRule, Occasions, Stage, Target

logger = logging.getLogger(__name__)

INJECTED = "fault injected:"  # so begins the line of the log that tells of each


def _kill(stage: Stage) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class FaultInjector:
    """Any thread may ask. `kill` ends the process; a test may put something milder there."""

    def __init__(self, plan: FaultPlan, *, kill: Callable[[Stage], None] = _kill) -> None:
        self._kill = kill
        self._lock = threading.Lock()
        self._awaits_write = False
        self.plan = plan

    @property
    def plan(self) -> FaultPlan:
        return self._plan

    @plan.setter
    def plan(self, plan: FaultPlan) -> None:
        """Occasions are counted anew from here on."""
        with self._lock:
            self._plan = plan
            self._num_occasions: Counter[Target | Stage] = Counter()
            self._draws = [random.Random(f"{plan.seed} {number} {rule}") for number, rule in enumerate(plan.rules)]
        logger.warning("faults: %s", plan.text)

    def hits(self, target: Target) -> dict[Fault, float]:
        """What happens to the next of these, with the duration of each in seconds."""
        return {rule.fault: rule.duration_s for rule in self._next(target)}

    def at(self, stage: Stage) -> None:
        """This stage has been reached: the end of the process, if the plan says so."""
        self._awaits_write |= stage is Stage.RESERVED
        if self._next(stage):
            self._kill(stage)

    def wrote(self) -> None:
        """A write was posted; which ticket it was for is known to nobody here."""
        if self._awaits_write:
            self._awaits_write = False
            self.at(Stage.FIRST_WRITE)

    def _next(self, target: Target | Stage) -> list[FaultRule]:
        with self._lock:
            self._num_occasions[target] += 1
            number = self._num_occasions[target]
            hit = [
                rule
                for rule, draw in zip(self._plan.rules, self._draws, strict=True)
                if rule.target is target and _is_one(rule.occasions, number, draw)
            ]
        for rule in hit:
            logger.warning("%s %s %d", INJECTED, rule, number)
            metrics.FAULTS.labels(rule.fault.value, target.value).inc()
        return hit


def _is_one(occasions: Occasions, number: int, draw: random.Random) -> bool:
    return occasions.first <= number <= occasions.last and (occasions.share >= 1 or draw.random() < occasions.share)
