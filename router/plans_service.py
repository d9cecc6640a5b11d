"""The operators' side of planning: what holds, what the planner says, and who decides from now on."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping

from protos import plans_pb2, plans_pb2_grpc
from protos.caller import current_caller
from protos.calls import Context
from protos.errors import InvalidArgument
from router.config import SloPolicy
from router.flips import Flips
from router.plan_messages import plan_status, would_flip
from router.plan_sharing import PlanSharing
from router.plan_state import PlanState
from router.pool_scaler import PoolScaler
from router.steering import Change, Steering
from router.workers import WorkerTable

logger = logging.getLogger(__name__)

MAX_REASON_CHARACTERS = 200
MAX_MANUAL_S = 7 * 86400.0
_MANUAL_S = 3600.0  # if nothing else is said


class PlansService(plans_pb2_grpc.PlansServicer):
    def __init__(
        self,
        slo: SloPolicy,
        table: WorkerTable,
        flips: Flips,
        scaler: PoolScaler,
        sharing: PlanSharing,
        steering: Steering,
        slo_classes: Mapping[str, SloPolicy] | None = None,
    ) -> None:
        self._slo = slo
        self._slo_classes = slo_classes
        self._table = table
        self._flips = flips
        self._scaler = scaler
        self._sharing = sharing
        self._steering = steering

    async def GetPlan(self, request: plans_pb2.GetPlanRequest, context: Context) -> plans_pb2.PlanStatus:
        return self._status(self._steering.state)

    async def SetPlan(self, request: plans_pb2.SetPlanRequest, context: Context) -> plans_pb2.PlanStatus:
        change = self._change(request)
        if not request.preview:
            await self._steering.carry_out(change, current_caller.get().key)
            return self._status(self._steering.state)
        status = self._status(change.state)
        roles_now = {worker.id.name: worker.role for worker in self._table.snapshot() if worker.is_ready}
        status.would_flip.extend(would_flip({**change.soon, **change.roles}, roles_now, change.reason))
        return status

    def _change(self, request: plans_pb2.SetPlanRequest) -> Change:
        """Raises InvalidArgument, FailedPrecondition."""
        reason = request.reason
        if len(reason) > MAX_REASON_CHARACTERS:
            told = f"reason has {len(reason)} characters; it must have at most {MAX_REASON_CHARACTERS}"
            raise InvalidArgument(told, field="reason")
        dry_run = request.dry_run if request.HasField("dry_run") else None
        if request.mode == plans_pb2.PLAN_MODE_MANUAL:
            for_s = _for_s(request)
            return self._steering.to_sizes(request.num_prefill, request.num_decode, for_s, reason, dry_run=dry_run)
        for name in ("num_prefill", "num_decode", "for_s"):
            if getattr(request, name):
                told = f"{name} is {getattr(request, name):g}; only a manual plan has it: set mode to PLAN_MODE_MANUAL"
                raise InvalidArgument(told, field=name)
        if request.mode == plans_pb2.PLAN_MODE_AUTO:
            return self._steering.to_auto(reason, dry_run=dry_run)
        if request.mode == plans_pb2.PLAN_MODE_FROZEN:
            return self._steering.to_frozen(reason, dry_run=dry_run)
        told = f"mode is {request.mode}; it must be PLAN_MODE_AUTO, PLAN_MODE_MANUAL or PLAN_MODE_FROZEN"
        raise InvalidArgument(told, field="mode")

    def _status(self, state: PlanState) -> plans_pb2.PlanStatus:
        return plan_status(
            state,
            self._sharing.proposed,
            self._scaler.sizes(),
            self._slo,
            self._flips.newest(),
            time.time(),
            self._sharing.planned_by,
            self._table.models.kinds(),
            self._slo_classes,
        )


def _for_s(request: plans_pb2.SetPlanRequest) -> float:
    for_s = request.for_s if request.HasField("for_s") else _MANUAL_S
    if not 0 < for_s <= MAX_MANUAL_S or not math.isfinite(for_s):
        told = f"for_s is {for_s:g}; it must be above 0 and at most {MAX_MANUAL_S:g}, which is a week"
        raise InvalidArgument(told, field="for_s")
    return float(for_s)
