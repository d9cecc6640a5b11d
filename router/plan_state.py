"""Who decides how large the pools are, what was decided, and the form of it that routers share. Pure."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from router.candidate import Role
from router.pool_plan import LoadForecast, PoolPlan, Proposal, RatioForecast

_UNREADABLE = (KeyError, TypeError, AttributeError, OverflowError, RecursionError, ValueError)


class PlanMode(enum.Enum):
    """`MANUAL`: sizes are set by hand, for a while. `FROZEN`: nobody changes a role but who asks for just that."""

    AUTO = "auto"
    MANUAL = "manual"
    FROZEN = "frozen"


@dataclass(frozen=True, slots=True)
class PlanState:
    """`plan`: in force; None while nobody has decided anything. A manual one ends at `until`, in seconds since 1970.
    The mode is `then` as before it, and workers get the roles that they had `before` back, unless a planner decides."""

    mode: PlanMode
    dry_run: bool = False
    plan: PoolPlan | None = None
    until: float | None = None
    then: PlanMode = PlanMode.AUTO
    before: Mapping[str, Role] = field(default_factory=dict)

    def has_run_out(self, now: float) -> bool:
        return self.until is not None and now >= self.until

    def planned(self, plan: PoolPlan) -> PoolPlan:
        """The same, numbered behind the one in force: only another size is another plan."""
        if self.plan is None:
            return _numbered(plan, 1)
        is_same = (plan.num_prefill, plan.num_decode) == (self.plan.num_prefill, self.plan.num_decode)
        return _numbered(plan, self.plan.epoch + (not is_same))


@dataclass(frozen=True, slots=True)
class VersionedState:
    """Version 0 is how a router was started: nobody has decided anything yet."""

    state: PlanState
    version: int = 0
    writer: str = ""

    @property
    def rank(self) -> tuple[int, str]:
        """The greater one holds, wherever the two meet."""
        return self.version, self.writer

    def to_bytes(self) -> bytes:
        state = self.state
        record = {
            "mode": state.mode.value,
            "dry_run": state.dry_run,
            "plan": None if state.plan is None else asdict(state.plan),
            "until": state.until,
            "then": state.then.value,
            "before": {name: role.value for name, role in state.before.items()},
            "version": self.version,
            "writer": self.writer,
        }
        return json.dumps(record).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> VersionedState:
        """Raises ValueError."""
        try:
            record: dict[str, Any] = json.loads(raw)
            state = PlanState(
                mode=PlanMode(record["mode"]),
                dry_run=bool(record["dry_run"]),
                plan=None if record["plan"] is None else _plan(record["plan"]),
                until=None if record["until"] is None else float(record["until"]),
                then=PlanMode(record["then"]),
                before={str(name): Role(role) for name, role in record["before"].items()},
            )
            return cls(state, int(record["version"]), str(record["writer"]))
        except _UNREADABLE as error:
            raise ValueError(f"not who plans the pools: {error}") from error


@dataclass(frozen=True, slots=True)
class Proposed:
    """What the planner has said last, and when, in seconds since 1970."""

    proposal: Proposal
    at: float

    def to_bytes(self) -> bytes:
        said = self.proposal
        record = {
            "at": self.at,
            "plan": asdict(said.plan),
            "roles": {name: role.value for name, role in said.roles.items()},
            "forecast": None if said.forecast is None else asdict(said.forecast),
            "ratios": [_ratio_record(ratio) for ratio in said.ratios],
            "gain": said.gain,
        }
        return json.dumps(record).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Proposed:
        """Raises ValueError."""
        try:
            record: dict[str, Any] = json.loads(raw)
            said = Proposal(
                plan=_plan(record["plan"]),
                roles={str(name): Role(role) for name, role in record["roles"].items()},
                forecast=None if record["forecast"] is None else LoadForecast(**record["forecast"]),
                ratios=tuple(RatioForecast(**ratio) for ratio in record["ratios"]),
                gain=float(record["gain"]),
            )
            return cls(said, float(record["at"]))
        except _UNREADABLE as error:
            raise ValueError(f"not what a planner says: {error}") from error


def _ratio_record(ratio: RatioForecast) -> dict[str, Any]:
    """Without classes where there are none: routers of versions before there were any read it."""
    record = asdict(ratio)
    return record if record["classes"] else {name: value for name, value in record.items() if name != "classes"}


def _plan(record: Mapping[str, Any]) -> PoolPlan:
    sizes = int(record["num_prefill"]), int(record["num_decode"])
    figures = float(record["goodput"]), float(record["confidence"])
    return PoolPlan(int(record["epoch"]), *sizes, str(record["reason"]), *figures)


def _numbered(plan: PoolPlan, epoch: int) -> PoolPlan:
    return PoolPlan(epoch, plan.num_prefill, plan.num_decode, plan.reason, plan.goodput, plan.confidence)
