"""The worker table as other routers see it, and what they change in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from protos.errors import ServiceError
from router.candidate import WorkerId
from router.flips import Flips
from router.shared_records import Assignment, SentLoad
from router.worker import Routers, Worker, WorkerState
from router.workers import WorkerTable

logger = logging.getLogger(__name__)


class SharedWorkers:
    """For `router.sharing`: it is its SharedTable."""

    def __init__(self, table: WorkerTable, flips: Flips) -> None:
        self._table = table
        self._flips = flips

    def sent_loads(self) -> Mapping[WorkerId, SentLoad]:
        """Of workers that have any."""
        now = self._table.snapshot().now
        loads = {worker.profile.id: _sent(worker, now) for worker in self._table.workers()}
        return {worker: load for worker, load in loads.items() if load != SentLoad()}

    def set_sent_elsewhere(self, loads: Mapping[WorkerId, SentLoad]) -> None:
        for worker in self._present():
            self._table.sent_elsewhere(worker, loads.get(worker.profile.id, SentLoad()))

    def started_as(self, worker_id: WorkerId) -> Assignment:
        role = next(worker.profile.role for worker in self._present() if worker.profile.id == worker_id)
        return Assignment(role, is_drained=False)

    def assignments(self) -> Mapping[WorkerId, Assignment]:
        return {worker.profile.id: Assignment(worker.role, worker.is_drained) for worker in self._present()}

    def assign(self, worker_id: WorkerId, assignment: Assignment) -> None:
        try:
            self._flips.follow(worker_id.name, assignment.role)
            self._table.set_draining(worker_id.name, assignment.is_drained)
        except ServiceError as error:  # it has left, or keeps its role
            logger.warning("worker %s is not used as another router wants it: %s", worker_id.name, error)

    def tell_routers(self, addresses: Sequence[str]) -> None:
        for worker in self._present():
            worker.commands.put_nowait(Routers(tuple(addresses)))

    def _present(self) -> list[Worker]:
        return [worker for worker in self._table.workers() if worker.load.state is not WorkerState.LOST]


def _sent(worker: Worker, now: float) -> SentLoad:
    sent = worker.dispatches
    return SentLoad(
        sent.num_decoding,
        sent.num_coming_blocks,
        sent.num_unreported_tokens,
        sent.num_coming,
        round(sent.spilled.num_tokens_at(now)),
    )
