"""Plans of the pools as messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from google.protobuf.timestamp_pb2 import Timestamp

from protos import plans_pb2
from router.candidate import Role
from router.config import SloPolicy
from router.fleet_models import KindModel
from router.flip import Flip, FlipState
from router.messages import role_value
from router.plan_state import PlanMode, PlanState, Proposed
from router.pool_plan import LoadForecast, PoolPlan, RatioForecast
from router.pool_scaler import PoolSizes
from router.slo_classes import DEFAULT
from router.step_messages import step_times_message

MODES = {
    PlanMode.AUTO: plans_pb2.PLAN_MODE_AUTO,
    PlanMode.MANUAL: plans_pb2.PLAN_MODE_MANUAL,
    PlanMode.FROZEN: plans_pb2.PLAN_MODE_FROZEN,
}
_FLIP_STATES = {
    FlipState.RUNNING: plans_pb2.FLIP_STATE_RUNNING,
    FlipState.DONE: plans_pb2.FLIP_STATE_DONE,
    FlipState.FAILED: plans_pb2.FLIP_STATE_FAILED,
}


def plan_status(
    state: PlanState,
    proposed: Proposed | None,
    sizes: PoolSizes,
    slo: SloPolicy,
    flips: Iterable[Flip],
    now: float,
    planned_by: str = "",
    kinds: Iterable[KindModel] = (),
    slo_classes: Mapping[str, SloPolicy] | None = None,
) -> plans_pb2.PlanStatus:
    status = plans_pb2.PlanStatus(
        mode=MODES[state.mode],
        dry_run=state.dry_run,
        plan=None if state.plan is None else _plan_message(state.plan),
        slo=_slo_message(slo),
        slo_classes=[
            plans_pb2.SloClass(name=name, slo=_slo_message(each)) for name, each in (slo_classes or {}).items()
        ],
        manual_for_s=None if state.until is None else max(0.0, state.until - now),
        flips=map(_flip_message, flips),
        num_prefill=sizes.num_prefill,
        num_decode=sizes.num_decode,
        num_both=sizes.num_both,
        planned_by=planned_by,
        step_times=map(step_times_message, kinds),
    )
    if proposed is not None:
        said = proposed.proposal
        status.proposed.CopyFrom(_plan_message(said.plan))
        status.proposed_gain = said.gain
        status.planned_ago_s = max(0.0, now - proposed.at)
        status.ratios.extend(map(_ratio_message, said.ratios))
        if said.forecast is not None:
            status.forecast.CopyFrom(_forecast_message(said.forecast))
    return status


def would_flip(roles: Mapping[str, Role], now_in: Mapping[str, Role], reason: str) -> list[plans_pb2.Flip]:
    """Of a preview. `now_in`: the roles of the workers in service."""
    return [
        plans_pb2.Flip(worker_id=name, before=role_value(now_in[name]), after=role_value(role), reason=reason)
        for name, role in sorted(roles.items())
        if name in now_in and now_in[name] != role
    ]


def _slo_message(slo: SloPolicy) -> plans_pb2.Slo:
    return plans_pb2.Slo(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s, percentile=slo.percentile)


def _plan_message(plan: PoolPlan) -> plans_pb2.PoolPlan:
    return plans_pb2.PoolPlan(
        epoch=plan.epoch,
        num_prefill=plan.num_prefill,
        num_decode=plan.num_decode,
        reason=plan.reason,
        goodput=plan.goodput,
        confidence=plan.confidence,
    )


def _ratio_message(ratio: RatioForecast) -> plans_pb2.RatioForecast:
    return plans_pb2.RatioForecast(
        num_prefill=ratio.num_prefill,
        num_decode=ratio.num_decode,
        ttft_s=ratio.ttft_s,
        tpot_s=ratio.tpot_s,
        goodput=ratio.goodput,
        attainment=ratio.attainment,
        classes=[
            plans_pb2.ClassForecast(slo_class=name or DEFAULT, attainment=attainment)
            for name, attainment in ratio.classes.items()
        ],
    )


def _forecast_message(forecast: LoadForecast) -> plans_pb2.LoadForecast:
    return plans_pb2.LoadForecast(
        requests_per_s=forecast.requests_per_s,
        num_prompt_tokens=forecast.num_prompt_tokens,
        num_output_tokens=forecast.num_output_tokens,
        hit_rate=forecast.hit_rate,
    )


def _flip_message(flip: Flip) -> plans_pb2.Flip:
    at = Timestamp()
    at.FromMicroseconds(round(flip.at * 1e6))
    return plans_pb2.Flip(
        worker_id=flip.worker,
        before=role_value(flip.before),
        after=role_value(flip.after),
        at=at,
        state=_FLIP_STATES[flip.state],
        took_s=flip.took_s,
        num_moved=flip.num_moved,
        reason=flip.reason,
        problem=flip.problem,
    )
