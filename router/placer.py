"""Finds workers for an attempt and counts its load there at once: nothing is awaited between the two.

A new request goes through the gate. What was admitted does not wait behind new ones: it goes on at once elsewhere.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from protos.errors import DeadlineExceeded, NoWorker
from router.admission import Gate
from router.breaker import Breakers
from router.dispatch import Dispatch
from router.placement import Demand, Placement, WorkerId, place
from router.turns import Admitted, Ask
from router.validation import Request
from router.workers import WorkerTable

DEFAULT_PRIORITY = 5  # of a request that does not say


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an attempt needs. `demand` is asked each time: workers come that tell what a block is."""

    num_tokens: int  # to be prefilled
    demand: Callable[[], Demand]
    avoid: Collection[WorkerId] = ()
    deadline_at: float | None = None


class Placer:
    def __init__(
        self, table: WorkerTable, gate: Gate, breakers: Breakers, wait_for_worker_s: float, rng: random.Random
    ) -> None:
        self._table = table
        self._gate = gate
        self._breakers = breakers
        self._wait_for_worker_s = wait_for_worker_s
        self._rng = rng

    async def admit(self, wanted: Wanted, request: Request, tenant: str) -> Admitted:
        """Raises what the gate raises; end the dispatch, and tell the gate what it was `answered`."""
        ask = Ask(
            tenant=tenant,
            priority=getattr(request, "priority", DEFAULT_PRIORITY),
            num_prompt_tokens=wanted.num_tokens,
            max_tokens=request.sampling.max_tokens,
            deadline_at=wanted.deadline_at,
            find=lambda held: self._find(wanted, held),
            dispatch=lambda placement: self._count(wanted, placement),
        )
        return await self._gate.admit(ask)

    async def place_again(self, wanted: Wanted) -> tuple[Placement, Dispatch]:
        """Waits a little for a worker to come (back), if none fits now. Raises NoWorker, DeadlineExceeded."""
        give_up_at = time.monotonic() + self._wait_for_worker_s
        while True:
            remaining_s = math.inf if wanted.deadline_at is None else wanted.deadline_at - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineExceeded("the deadline passed before the answer could go on elsewhere")
            try:
                placement = self._find(wanted, ())
            except NoWorker:
                remaining_s = min(give_up_at - time.monotonic(), remaining_s)
                if remaining_s <= 0:
                    raise
                await self._table.wait_changed(remaining_s)
            else:
                return placement, self._count(wanted, placement)

    def _find(self, wanted: Wanted, held: Collection[WorkerId]) -> Placement:
        """Raises NoWorker."""
        workers = [worker for worker in self._table.snapshot() if worker.id not in held]
        avoid = {*wanted.avoid, *self._breakers.avoided(time.monotonic())}
        return place(workers, wanted.demand(), avoid, self._rng)

    def _count(self, wanted: Wanted, placement: Placement) -> Dispatch:
        for worker in placement.workers:
            self._breakers.placed(worker.id, time.monotonic())
        return self._table.dispatch(placement, wanted.num_tokens, wanted.demand().num_blocks)
