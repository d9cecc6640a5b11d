"""A router without workers behind it: real gRPC and real doors, in front of a `FakeCluster`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from protos import insights_pb2, insights_pb2_grpc, plans_pb2, plans_pb2_grpc, workers_pb2, workers_pb2_grpc
from protos.caller import Caller, Scope, current_caller
from protos.calls import Context
from protos.errors import InvalidArgument, NotFound, ServiceError, Unauthenticated, Unimplemented
from protos.guard import Guard
from protos.serve import GrpcServer
from protos.tls import TlsFiles
from tests.browser.fake_cluster import BOTH, DECODE, PREFILL, FakeCluster, stamp

AUTO, MANUAL, FROZEN = plans_pb2.PLAN_MODE_AUTO, plans_pb2.PLAN_MODE_MANUAL, plans_pb2.PLAN_MODE_FROZEN
MANUAL_S = 3600.0  # that a manual plan holds, unless it says otherwise
OPERATOR = Caller("operator", "", Scope.INFER | Scope.READ | Scope.OPERATE)
READER = Caller("reader", "", Scope.READ)


class FakeKeys:
    """Implements protos.caller.Authenticator."""

    def __init__(self, callers: Mapping[str, Caller]) -> None:
        self._callers = callers

    def authenticate(self, authorization: str | None) -> Caller:
        key = (authorization or "").removeprefix("Bearer ")
        if not key:
            raise Unauthenticated("an API key is needed: `authorization: Bearer KEY`")
        if key not in self._callers:
            raise Unauthenticated("the API key is not known: it may have been revoked, or be cut off")
        return self._callers[key]


@dataclass
class Planning:
    """What holds of the pools, and what was asked of them."""

    mode: plans_pb2.PlanMode.ValueType = AUTO
    dry_run: bool = False
    manual_for_s: float | None = None
    epoch: int = 41
    refusal: ServiceError | None = None  # of every change, and of previews
    changes: list[plans_pb2.SetPlanRequest] = field(default_factory=list)  # previews among them
    flips: list[plans_pb2.Flip] = field(default_factory=list)
    decisions: list[workers_pb2.Decision] = field(default_factory=list)


class FakePools(workers_pb2_grpc.PoolsServicer):
    def __init__(self, cluster: FakeCluster, planning: Planning) -> None:
        self._cluster = cluster
        self._planning = planning
        self.num_asked = 0

    async def GetStatus(self, request: workers_pb2.GetStatusRequest, context: Context) -> workers_pb2.Status:
        self.num_asked += 1
        return self._cluster.status()

    async def SetRole(self, request: workers_pb2.SetRoleRequest, context: Context) -> workers_pb2.SetRoleResponse:
        raise Unimplemented("the page sets plans, not single roles")

    async def SetDraining(
        self, request: workers_pb2.SetDrainingRequest, context: Context
    ) -> workers_pb2.SetDrainingResponse:
        raise Unimplemented("the page drains nobody")

    async def ListDecisions(
        self, request: workers_pb2.ListDecisionsRequest, context: Context
    ) -> workers_pb2.ListDecisionsResponse:
        return workers_pb2.ListDecisionsResponse(decisions=self._planning.decisions[: request.limit])


class FakePlans(plans_pb2_grpc.PlansServicer):
    def __init__(self, cluster: FakeCluster, planning: Planning) -> None:
        self._cluster = cluster
        self._planning = planning

    async def GetPlan(self, request: plans_pb2.GetPlanRequest, context: Context) -> plans_pb2.PlanStatus:
        return self._status()

    async def SetPlan(self, request: plans_pb2.SetPlanRequest, context: Context) -> plans_pb2.PlanStatus:
        if self._planning.refusal is not None and request.mode == MANUAL:
            raise self._planning.refusal
        would_flip = self._would_flip(request) if request.mode == MANUAL else []
        if request.preview:
            if request.mode == MANUAL:
                self._planning.changes.append(request)
            status = self._status()
            status.would_flip.extend(would_flip)
            return status
        self._planning.changes.append(request)
        self._planning.mode = request.mode
        self._planning.manual_for_s = (request.for_s or MANUAL_S) if request.mode == MANUAL else None
        if request.HasField("dry_run"):
            self._planning.dry_run = request.dry_run
        self._planning.epoch += 1
        for flip in would_flip:
            self._cluster.roles[flip.worker_id] = flip.after
            done = plans_pb2.Flip()
            done.CopyFrom(flip)
            done.state, done.took_s, done.num_moved = plans_pb2.FLIP_STATE_DONE, 0.84, 5
            self._planning.flips.insert(0, done)
        self._decided(request)
        return self._status()

    def _decided(self, request: plans_pb2.SetPlanRequest) -> None:
        what = plans_pb2.PlanMode.Name(request.mode).removeprefix("PLAN_MODE_").lower()
        told = f"{request.num_prefill}:{request.num_decode}" if request.mode == MANUAL else ""
        decision = workers_pb2.Decision(
            at=stamp(), what=what, role=told, key=current_caller.get().key, router="127.0.0.1:8500"
        )
        self._planning.decisions.insert(0, decision)

    def _would_flip(self, request: plans_pb2.SetPlanRequest) -> list[plans_pb2.Flip]:
        total = len(self._cluster.roles)
        if min(request.num_prefill, request.num_decode) < 1:
            raise InvalidArgument("num_prefill and num_decode must be 1 at least", field="num_prefill")
        if request.num_prefill + request.num_decode != total:
            told = (
                f"num_prefill and num_decode are {request.num_prefill + request.num_decode} together; there are {total}"
            )
            raise InvalidArgument(told, field="num_prefill")
        wanted = dict(self._cluster.roles)
        missing = request.num_prefill - list(wanted.values()).count(PREFILL)
        for name, role in sorted(wanted.items(), key=lambda item: item[1] != BOTH):
            if missing > 0 and role != PREFILL:
                wanted[name], missing = PREFILL, missing - 1
            elif missing <= 0 and role == BOTH:
                wanted[name] = DECODE
            elif missing < 0 and role == PREFILL:
                wanted[name], missing = DECODE, missing + 1
        return [
            plans_pb2.Flip(
                worker_id=name,
                before=self._cluster.roles[name],
                after=after,
                at=stamp(),
                state=plans_pb2.FLIP_STATE_RUNNING,
                reason=request.reason or "set by hand",
            )
            for name, after in wanted.items()
            if after != self._cluster.roles[name]
        ]

    def _status(self) -> plans_pb2.PlanStatus:
        prefill, decode, both = self._cluster.counts()
        ratios = self._cluster.ratios()
        if not ratios:
            return plans_pb2.PlanStatus(mode=self._planning.mode, num_prefill=prefill, num_decode=decode, num_both=both)
        best = max(ratios, key=lambda ratio: ratio.goodput)
        now = next((ratio for ratio in ratios if ratio.num_prefill == prefill), best)
        mode = plans_pb2.PlanMode.Name(self._planning.mode).removeprefix("PLAN_MODE_").lower()
        return plans_pb2.PlanStatus(
            mode=self._planning.mode,
            dry_run=self._planning.dry_run,
            plan=plans_pb2.PoolPlan(
                epoch=self._planning.epoch,
                num_prefill=now.num_prefill,
                num_decode=now.num_decode,
                reason=f"{mode}: the load has been steady for 12 minutes",
                goodput=now.goodput,
                confidence=0.86,
            ),
            proposed=plans_pb2.PoolPlan(
                epoch=self._planning.epoch + 1,
                num_prefill=best.num_prefill,
                num_decode=best.num_decode,
                reason="prompts have grown from 700 to 950 tokens, so that prefill is the bottleneck: the queue there "
                "is predicted to take 0.9 s of the 0.5 s that TTFT may take",
                goodput=best.goodput,
                confidence=0.82,
            ),
            proposed_gain=best.goodput - now.goodput,
            forecast=plans_pb2.LoadForecast(
                requests_per_s=2.4 * len(self._cluster.roles) * self._cluster.load_factor,
                num_prompt_tokens=950,
                num_output_tokens=180,
                hit_rate=0.37,
            ),
            ratios=ratios,
            slo=plans_pb2.Slo(ttft_s=0.5, tpot_s=0.05, percentile=0.9),
            slo_classes=self._cluster.slo_classes(),
            manual_for_s=self._planning.manual_for_s,
            flips=self._planning.flips,
            step_times=_step_times(len(self._cluster.roles)),
            num_prefill=prefill,
            num_decode=decode,
            num_both=both,
            planned_by="127.0.0.1:8500",
            planned_ago_s=2.1,
        )


class FakeInsights(insights_pb2_grpc.InsightsServicer):
    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self.num_running, self.most_running = 0, 0
        self.asked: set[str] = set()

    async def GetTraffic(self, request: insights_pb2.GetTrafficRequest, context: Context) -> insights_pb2.Traffic:
        return self._cluster.traffic(request.window_s)

    async def ListRequests(
        self, request: insights_pb2.ListRequestsRequest, context: Context
    ) -> insights_pb2.ListRequestsResponse:
        listed = self._cluster.requests()
        if request.running_only:
            listed = [each for each in listed if each.state not in ("done", "failed")]
        if request.order == insights_pb2.REQUEST_ORDER_SLOWEST:
            listed.sort(key=lambda each: -each.timeline.total_s)
        return insights_pb2.ListRequestsResponse(requests=listed[: request.limit])

    async def GetWorkerInsights(
        self, request: insights_pb2.GetWorkerInsightsRequest, context: Context
    ) -> insights_pb2.WorkerInsights:
        if request.worker_id not in self._cluster.roles:
            raise NotFound(f"no worker {request.worker_id!r} is registered", field="worker_id")
        self.asked.add(request.worker_id)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(0.005)  # so that several are asked for at once
        finally:
            self.num_running -= 1
        return self._cluster.insights(request.worker_id)


class FakeRouter:
    """`serves_plans`, `serves_insights`: an older router has neither."""

    def __init__(
        self,
        cluster: FakeCluster,
        *,
        port: int = 0,
        keys: Mapping[str, Caller] | None = None,
        serves_plans: bool = True,
        serves_insights: bool = True,
        planning: Planning | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self.cluster = cluster
        self.planning = planning or Planning()
        self.pools = FakePools(cluster, self.planning)
        self.insights = FakeInsights(cluster)
        guard = Guard(None, None if keys is None else FakeKeys(keys))
        self.server = GrpcServer("127.0.0.1", port, guard=guard, tls=tls)
        self.server.add(workers_pb2_grpc.add_PoolsServicer_to_server, self.pools)
        if serves_plans:
            self.server.add(plans_pb2_grpc.add_PlansServicer_to_server, FakePlans(cluster, self.planning))
        if serves_insights:
            self.server.add(insights_pb2_grpc.add_InsightsServicer_to_server, self.insights)

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


@asynccontextmanager
async def running(router: FakeRouter) -> AsyncIterator[FakeRouter]:
    await router.server.start()
    try:
        yield router
    finally:
        await router.server.stop()


def with_history(planning: Planning) -> Planning:
    """Flips and decisions of an hour."""
    draw = random.Random(3)
    states = (plans_pb2.FLIP_STATE_RUNNING, plans_pb2.FLIP_STATE_DONE, plans_pb2.FLIP_STATE_FAILED)
    for i in range(6):
        to_prefill = i % 2 == 0
        planning.flips.append(
            plans_pb2.Flip(
                worker_id=f"decode-{i % 4}" if to_prefill else f"prefill-{i % 3}",
                before=DECODE if to_prefill else PREFILL,
                after=PREFILL if to_prefill else DECODE,
                at=stamp(0.6 + 640 * i),
                state=states[0 if i == 0 else 2 if i == 4 else 1],
                took_s=0.6 if i == 0 else draw.uniform(0.4, 1.9),
                num_moved=draw.randint(0, 14),
                reason="prefill is the bottleneck: +3.1 requests/s" if to_prefill else "prompts have become shorter",
            )
        )
        planning.decisions.append(
            workers_pb2.Decision(
                at=stamp(30 + 640 * i),
                what=("manual", "role", "drain", "auto", "no drain", "role")[i],
                worker_id=("", "decode-2", "decode-1", "", "decode-1", "prefill-0")[i],
                role=("4:4", "prefill", "", "", "", "both")[i],
                key=("operator", "operator", "night-shift", "", "night-shift", "operator")[i],
                router="127.0.0.1:8500",
            )
        )
    return planning


def _step_times(num_workers: int) -> list[plans_pb2.StepTimes]:
    return [
        plans_pb2.StepTimes(
            kind="cpu/onednn, 8 threads",
            prefill_base_s=0.0042,
            prefill_token_s=0.00061,
            prefill_pair_s=2.1e-8,
            decode_base_s=0.0125,
            decode_sequence_s=0.00031,
            decode_context_token_s=1.9e-7,
            decode_expert_s=0.00022,
            tokens_per_step=1.9,
            prefill_confidence=0.91,
            decode_confidence=0.78,
            num_workers=num_workers,
        )
    ]
