"""What one visitor may ask the routers, with the key that they have shown: each answer as the page takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from protos import insights_pb2, insights_pb2_grpc, plans_pb2, plans_pb2_grpc, workers_pb2
from protos.errors import (
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    ServiceError,
    Unauthenticated,
    Unimplemented,
)
from protos.routers import Routers
from router.dashboard.failures import as_failure
from router.dashboard.plan_change import PlanChange
from router.dashboard.spelling import Plain, plain

MAX_WORKERS = 32  # that are asked for at once: more are not shown at once
_AT_ONCE = 8  # of the questions to workers, of one visitor
_DEADLINE_S = 3.0  # of what is asked for again soon
_CHANGE_S = 10.0
_MODES = {
    "auto": plans_pb2.PLAN_MODE_AUTO,
    "manual": plans_pb2.PLAN_MODE_MANUAL,
    "frozen": plans_pb2.PLAN_MODE_FROZEN,
}
_ORDERS = {"newest": insights_pb2.REQUEST_ORDER_NEWEST, "slowest": insights_pb2.REQUEST_ORDER_SLOWEST}
_HELLO = ("worker_id", "flippable", "runner", "kernels", "num_blocks", "drafter", "max_running", "address")


class Asking:
    """Every question has a deadline, and raises ServiceError. Closed with the routers it was given."""

    def __init__(self, routers: Routers) -> None:
        self._routers = routers
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def close(self) -> None:
        await self._routers.close()

    async def status(self) -> Plain:
        request = workers_pb2.GetStatusRequest()
        answer = await self._routers.ask(lambda router: router.pools.GetStatus(request, timeout=_DEADLINE_S))
        told = plain(answer)
        told["workers"] = [_worker(worker) for worker in told["workers"]]
        return told

    async def plan(self) -> Plain:
        request = plans_pb2.GetPlanRequest()
        return plain(
            await self._routers.ask(
                lambda router: plans_pb2_grpc.PlansStub(router.channel).GetPlan(request, timeout=_DEADLINE_S)
            )
        )

    async def set_plan(self, change: PlanChange) -> Plain:
        settings = change.model_dump(exclude={"mode"})
        request = plans_pb2.SetPlanRequest(mode=_MODES[change.mode], **settings)
        return plain(
            await self._routers.ask(
                lambda router: plans_pb2_grpc.PlansStub(router.channel).SetPlan(request, timeout=_CHANGE_S)
            )
        )

    async def access(self) -> Plain:
        """Whether a key is needed, and whether this one may change plans, as a preview that changes nothing tells."""
        try:
            await self.status()
            await self.set_plan(PlanChange(mode="frozen", preview=True))
        except Unauthenticated as error:
            return {"needs_key": True, "may_operate": False, "why": error.message}
        except PermissionDenied as error:
            return {"needs_key": False, "may_operate": False, "why": error.message}
        except (Unimplemented, InvalidArgument, FailedPrecondition):
            pass  # the caller had been let in
        return {"needs_key": False, "may_operate": True, "why": ""}

    async def traffic(self, window_s: float) -> Plain:
        request = insights_pb2.GetTrafficRequest(window_s=window_s)
        return plain(
            await self._routers.ask(
                lambda router: insights_pb2_grpc.InsightsStub(router.channel).GetTraffic(request, timeout=_DEADLINE_S)
            )
        )

    async def decisions(self, limit: int) -> Plain:
        request = workers_pb2.ListDecisionsRequest(limit=limit)
        return plain(await self._routers.ask(lambda router: router.pools.ListDecisions(request, timeout=_DEADLINE_S)))

    async def requests(self, limit: int, order: str, running_only: bool) -> Plain:
        if order not in _ORDERS:
            raise InvalidArgument(f"order is {order[:50]!r}; it must be {' or '.join(_ORDERS)}", field="order")
        request = insights_pb2.ListRequestsRequest(limit=limit, order=_ORDERS[order], running_only=running_only)
        return plain(
            await self._routers.ask(
                lambda router: insights_pb2_grpc.InsightsStub(router.channel).ListRequests(request, timeout=_DEADLINE_S)
            )
        )

    async def insights(self, worker_ids: Sequence[str]) -> Plain:
        """By worker, what it says or why it says nothing."""
        if len(worker_ids) > MAX_WORKERS:
            raise InvalidArgument(
                f"{len(worker_ids)} workers are asked for; at most {MAX_WORKERS} are at once", field="worker"
            )
        told = await asyncio.gather(*map(self._insights_of, worker_ids))
        return {"workers": dict(zip(worker_ids, told, strict=True))}

    async def _insights_of(self, worker_id: str) -> Plain:
        request = insights_pb2.GetWorkerInsightsRequest(worker_id=worker_id)
        async with self._places:
            try:
                answer = await self._routers.ask(
                    lambda router: insights_pb2_grpc.InsightsStub(router.channel).GetWorkerInsights(
                        request, timeout=_DEADLINE_S
                    )
                )
            except ServiceError as error:
                return {"data": None, "error": as_failure(error)}
        return {"data": plain(answer), "error": None}


def _worker(status: Plain) -> Plain:
    """In one piece, without what the page shows nothing of: there may be hundreds, twice a second."""
    hello, load = status["hello"] or {}, status["load"] or {}
    return {
        **{name: hello.get(name) for name in _HELLO},
        **load,
        "role": status["role"],
        "reported_ago_s": status["reported_ago_s"],
        "num_requests": status["num_requests"],
        "num_known_blocks": status["num_known_blocks"],
    }
