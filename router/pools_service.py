"""The workers' and the operators' side of the router: registration streams, status, roles."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence

from protos import workers_pb2, workers_pb2_grpc
from protos.caller import current_caller
from protos.calls import Context
from protos.errors import InvalidArgument, ServiceError
from router.decisions import MAX_DECISIONS, Decisions
from router.flips import Flips
from router.links import Links
from router.messages import (
    changes_from_message,
    command_message,
    decision_message,
    load_from_message,
    profile_from_hello,
    role_from_value,
    status_of,
)
from router.service import InferenceService
from router.steering import Steering
from router.step_messages import steps_from_message
from router.worker import Routers, Worker
from router.workers import WorkerTable

logger = logging.getLogger(__name__)

_DECISIONS = 100  # that are told, if the caller does not say how many


class WorkersService(workers_pb2_grpc.WorkersServicer):
    """`routers` are the addresses of all that live, this one's first."""

    def __init__(self, table: WorkerTable, links: Links, routers: Callable[[], Sequence[str]] = list) -> None:
        self._table = table
        self._links = links
        self._routers = routers

    async def Register(
        self, request_iterator: AsyncIterator[workers_pb2.WorkerReport], context: Context
    ) -> AsyncIterator[workers_pb2.RouterCommand]:
        """The first command confirms the role; then one for whatever the worker is told."""
        first = await anext(request_iterator, None)
        if first is None:
            return
        if not first.HasField("hello"):
            raise InvalidArgument("the first report has no hello: the router does not know who this is", field="hello")
        self._links.check_address(first.hello.address)
        worker = self._table.register(profile_from_hello(first.hello), load_from_message(first.load))
        name = worker.profile.id.name
        logger.info("worker %s registered: %s at %s", name, worker.role.name, worker.profile.address)
        reading = asyncio.create_task(self._take_reports(worker, request_iterator))
        try:
            yield command_message(worker.role)
            if len(routers := self._routers()) > 1:
                yield command_message(Routers(tuple(routers)))
            while (command := await worker.commands.get()) is not None:
                if isinstance(command, ServiceError):
                    raise command
                yield command_message(command)
        finally:
            self._table.lost(worker)  # first: nothing that is still to be waited for may keep it in use
            reading.cancel()
            await asyncio.wait([reading])
            logger.info("worker %s has left", name)
            await self._links.retire(worker.profile.id)

    async def _take_reports(self, worker: Worker, reports: AsyncIterator[workers_pb2.WorkerReport]) -> None:
        try:
            async for report in reports:
                self._table.report(worker, load_from_message(report.load))
                if report.HasField("cache"):
                    self._table.cache_changed(worker, changes_from_message(report.cache))
                if report.HasField("steps"):
                    self._table.steps_measured(worker, steps_from_message(report.steps, "steps"))
        except ServiceError as error:
            worker.commands.put_nowait(error)
        finally:
            worker.commands.put_nowait(None)


class PoolsService(workers_pb2_grpc.PoolsServicer):
    """`metrics_address` is the router's own, once it is known."""

    def __init__(
        self,
        table: WorkerTable,
        model_name: str,
        inference: InferenceService,
        decisions: Decisions,
        flips: Flips,
        steering: Steering,
    ) -> None:
        self._table = table
        self._flips = flips
        self._steering = steering
        self._model_name = model_name
        self._inference = inference
        self._decisions = decisions
        self.metrics_address = ""
        self._started_at = time.monotonic()

    async def GetStatus(self, request: workers_pb2.GetStatusRequest, context: Context) -> workers_pb2.Status:
        return workers_pb2.Status(
            workers=[
                status_of(
                    worker,
                    self._table.state(worker),
                    self._table.age_s(worker),
                    self._table.prefixes.num_blocks(worker.profile.id),
                )
                for worker in self._table.workers()
            ],
            num_requests_in_flight=self._inference.num_in_flight,
            model_name=self._model_name,
            uptime_s=time.monotonic() - self._started_at,
            metrics_address=self.metrics_address,
            draining=self._inference.is_draining,
            num_requests_waiting=self._inference.num_waiting,
        )

    async def SetRole(self, request: workers_pb2.SetRoleRequest, context: Context) -> workers_pb2.SetRoleResponse:
        role, by = role_from_value(request.role, "role"), current_caller.get().key
        is_changed = self._flips.set_roles({request.worker_id: role}, "set by hand", by)
        self._decisions.add("role", request.worker_id, str(role.name).lower(), by=by)
        if is_changed:
            self._steering.role_was_set(request.worker_id, by)
        return workers_pb2.SetRoleResponse()

    async def SetDraining(
        self, request: workers_pb2.SetDrainingRequest, context: Context
    ) -> workers_pb2.SetDrainingResponse:
        self._table.set_draining(request.worker_id, request.draining)
        logger.info("worker %s is %s", request.worker_id, "drained" if request.draining else "no longer drained")
        what = "drain" if request.draining else "no drain"
        self._decisions.add(what, request.worker_id, by=current_caller.get().key)
        return workers_pb2.SetDrainingResponse()

    async def ListDecisions(
        self, request: workers_pb2.ListDecisionsRequest, context: Context
    ) -> workers_pb2.ListDecisionsResponse:
        limit = request.limit if request.HasField("limit") else _DECISIONS
        if not 1 <= limit <= MAX_DECISIONS:
            raise InvalidArgument(f"limit is {limit}; it must be 1 to {MAX_DECISIONS}", field="limit")
        decisions = await self._decisions.newest(limit)
        return workers_pb2.ListDecisionsResponse(decisions=map(decision_message, decisions))
