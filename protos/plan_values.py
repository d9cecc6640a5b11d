"""How the pools are planned, as `PdserveClient` tells of it: frozen values, and how messages become them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from protos import plans_pb2
from protos.status_values import ROLE_NAMES

MODES = {
    "auto": plans_pb2.PLAN_MODE_AUTO,
    "manual": plans_pb2.PLAN_MODE_MANUAL,
    "frozen": plans_pb2.PLAN_MODE_FROZEN,
}
_MODE_NAMES = {mode: name for name, mode in MODES.items()}
_STATES = {
    plans_pb2.FLIP_STATE_RUNNING: "running",
    plans_pb2.FLIP_STATE_DONE: "done",
    plans_pb2.FLIP_STATE_FAILED: "failed",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the pools, in a plan. `goodput`: requests a second that are predicted to meet both SLOs."""

    epoch: int
    num_prefill: int
    num_decode: int
    reason: str
    goodput: float
    confidence: float  # 0 to 1

    @staticmethod
    def from_message(message: plans_pb2.PoolPlan) -> Sizes:
        return Sizes(
            epoch=message.epoch,
            num_prefill=message.num_prefill,
            num_decode=message.num_decode,
            reason=message.reason,
            goodput=message.goodput,
            confidence=message.confidence,
        )


@dataclass(frozen=True, slots=True)
class Ratio:
    """What pools of these sizes are predicted to give. Times are infinite where a pool cannot keep up."""

    num_prefill: int
    num_decode: int
    ttft_s: float
    tpot_s: float
    goodput: float
    attainment: float
    classes: Mapping[str, float] = field(default_factory=dict)  # attainment by SLO class, where several are expected

    @staticmethod
    def from_message(message: plans_pb2.RatioForecast) -> Ratio:
        return Ratio(
            num_prefill=message.num_prefill,
            num_decode=message.num_decode,
            ttft_s=message.ttft_s,
            tpot_s=message.tpot_s,
            goodput=message.goodput,
            attainment=message.attainment,
            classes={each.slo_class: each.attainment for each in message.classes},
        )


@dataclass(frozen=True, slots=True)
class SloClass:
    """The SLOs of one class: times in seconds, and the share of its requests that is to meet both."""

    name: str
    ttft_s: float
    tpot_s: float
    share: float

    @staticmethod
    def from_message(message: plans_pb2.SloClass) -> SloClass:
        return SloClass(message.name, message.slo.ttft_s, message.slo.tpot_s, message.slo.percentile)


@dataclass(frozen=True, slots=True)
class Flip:
    """A change of a worker's role, as it went, or (with no state) as it would be."""

    worker_id: str
    before: str  # prefill, decode, both
    after: str
    at: datetime  # in UTC
    state: str  # running, done, failed
    took_s: float
    num_moved: int
    reason: str
    problem: str  # of one that failed

    @staticmethod
    def from_message(message: plans_pb2.Flip) -> Flip:
        return Flip(
            worker_id=message.worker_id,
            before=ROLE_NAMES.get(message.before, "unknown"),
            after=ROLE_NAMES.get(message.after, "unknown"),
            at=message.at.ToDatetime(UTC),
            state=_STATES.get(message.state, ""),
            took_s=message.took_s,
            num_moved=message.num_moved,
            reason=message.reason,
            problem=message.problem,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Who sizes the pools, how large they are, and what the planner says."""

    mode: str  # auto, manual, frozen
    dry_run: bool
    num_prefill: int  # as roles are now; a worker that does both counts in both
    num_decode: int
    num_both: int  # those
    in_force: Sizes | None
    proposed: Sizes | None
    proposed_gain: float  # requests a second within the SLOs
    ratios: tuple[Ratio, ...]
    slo_ttft_s: float
    slo_tpot_s: float
    slo_share: float
    manual_for_s: float | None
    flips: tuple[Flip, ...]  # newest first
    would_flip: tuple[Flip, ...]  # of a preview
    planned_by: str  # address of the router that plans; empty while that is not known
    planned_ago_s: float | None
    slo_classes: tuple[SloClass, ...] = ()  # beside the default one, whose SLOs are those above

    @staticmethod
    def from_message(message: plans_pb2.PlanStatus) -> Plan:
        is_planned = message.HasField("proposed")
        return Plan(
            mode=_MODE_NAMES.get(message.mode, "unknown"),
            dry_run=message.dry_run,
            num_prefill=message.num_prefill,
            num_decode=message.num_decode,
            num_both=message.num_both,
            in_force=Sizes.from_message(message.plan) if message.HasField("plan") else None,
            proposed=Sizes.from_message(message.proposed) if is_planned else None,
            proposed_gain=message.proposed_gain,
            ratios=tuple(map(Ratio.from_message, message.ratios)),
            slo_ttft_s=message.slo.ttft_s,
            slo_tpot_s=message.slo.tpot_s,
            slo_share=message.slo.percentile,
            manual_for_s=message.manual_for_s if message.HasField("manual_for_s") else None,
            flips=tuple(map(Flip.from_message, message.flips)),
            would_flip=tuple(map(Flip.from_message, message.would_flip)),
            planned_by=message.planned_by,
            planned_ago_s=message.planned_ago_s if is_planned else None,
            slo_classes=tuple(map(SloClass.from_message, message.slo_classes)),
        )
