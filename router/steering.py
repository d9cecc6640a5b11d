"""The planning loop: what was seen goes to a planner, and what it proposes is carried out, if that is wanted.

Of routers that share a store one plans at a time. Sizes set by hand hold until they run out. Event loop only; a planner
thinks in a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from protos.errors import ServiceError
from router import metrics
from router.candidate import Role
from router.config import SteeringPolicy
from router.decisions import Decisions
from router.observation import Observation
from router.plan_sharing import PlanSharing
from router.plan_state import PlanMode, PlanState, Proposed
from router.pool_plan import PoolPlan, Proposal
from router.pool_scaler import PoolScaler

logger = logging.getLogger(__name__)

_LOOK_S = 0.25  # between looks at whether something is due


class Planner(Protocol):
    def propose(self, observation: Observation) -> Proposal:
        """Gets one observation after another, whether or not the last proposal was carried out. May take a while."""
        ...


@dataclass(frozen=True, slots=True)
class Change:
    """Of who decides: `roles` change with it, and `soon`, if the planner goes on to say so."""

    state: PlanState
    reason: str
    roles: Mapping[str, Role] = field(default_factory=dict)
    soon: Mapping[str, Role] = field(default_factory=dict)


class Steering:
    """`observe` gives what was seen since it was called last. `run` it beside the server."""

    def __init__(
        self,
        policy: SteeringPolicy,
        sharing: PlanSharing,
        scaler: PoolScaler,
        decisions: Decisions,
        observe: Callable[[], Observation],
        planner: Planner | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._policy = policy
        self._sharing = sharing
        self._scaler = scaler
        self._decisions = decisions
        self._observe = observe
        self._planner = planner
        self._clock = clock
        self._now = now
        self._asked_at = clock()
        self._would: tuple[int, int, Mapping[str, Role]] | None = None  # was logged, in a dry run

    @property
    def state(self) -> PlanState:
        """A manual plan that has run out holds no longer, whether or not the router that plans has seen to it."""
        state = self._sharing.state
        return _after(state) if state.has_run_out(self._now()) else state

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.look()
            except Exception:  # planning is not to end for one defect
                metrics.PLANNER_FAILURES.inc()
                logger.exception("the pools stay as they are for now")

    async def look(self) -> None:
        """Does what is due."""
        if not self._sharing.plans_here:  # what comes here is told to the router that plans
            return
        await self._end_manual()
        if self._clock() - self._asked_at < self._policy.every_s:
            return
        self._asked_at = self._clock()
        observation = self._observe()
        if self._planner is not None:
            await self._plan(self._planner, observation)

    def to_auto(self, reason: str = "", *, dry_run: bool | None = None) -> Change:
        """The planner decides."""
        state, proposed = self.state, self._sharing.proposed
        is_dry = state.dry_run if dry_run is None else dry_run
        soon = {} if is_dry or proposed is None else proposed.proposal.roles
        return Change(PlanState(PlanMode.AUTO, is_dry, state.plan), reason, soon=soon)

    def to_frozen(self, reason: str = "", *, dry_run: bool | None = None) -> Change:
        """The sizes stay as they are."""
        state = self.state
        is_dry = state.dry_run if dry_run is None else dry_run
        return Change(PlanState(PlanMode.FROZEN, is_dry, state.planned(_as_they_are(self._scaler, reason))), reason)

    def to_sizes(
        self, num_prefill: int, num_decode: int, for_s: float, reason: str = "", *, dry_run: bool | None = None
    ) -> Change:
        """By hand. Raises InvalidArgument, FailedPrecondition: these cannot be had."""
        state = self.state
        roles = self._scaler.roles_for(num_prefill, num_decode)
        changed = PlanState(
            PlanMode.MANUAL,
            state.dry_run if dry_run is None else dry_run,
            state.planned(PoolPlan(0, num_prefill, num_decode, reason or "set by hand", 0.0, 1.0)),
            until=self._now() + for_s,
            then=state.mode if state.until is None else state.then,
            before=state.before,
        )
        return Change(changed, reason, roles)

    async def carry_out(self, change: Change, by: str = "") -> None:
        """`by`: the name of a key. Raises ServiceError: nothing was changed."""
        state = change.state
        if change.roles and state.plan is not None:
            before = await self._scaler.apply(state.plan, change.roles, by)
            state = replace(state, before={**before, **state.before})
        self._set(state, by, change.reason)

    def role_was_set(self, name: str, by: str) -> None:
        """By an operator: a planner is not to undo it."""
        state = self.state
        if state.mode is PlanMode.AUTO:
            reason = f"the role of {name} was set by hand"
            self._set(self.to_frozen(reason).state, by, reason)
        elif name in state.before:  # and it is not to become what it was
            before = {other: role for other, role in state.before.items() if other != name}
            self._sharing.set(replace(state, before=before))

    async def _plan(self, planner: Planner, observation: Observation) -> None:
        before = self._sharing.state
        proposal = await asyncio.to_thread(planner.propose, observation)
        self._sharing.propose(Proposed(proposal, self._now()))
        is_as_before = self._sharing.state == before and self._sharing.plans_here  # while the planner thought
        if self.state.mode is PlanMode.AUTO and is_as_before:
            await self._follow(proposal)

    async def _follow(self, proposal: Proposal) -> None:
        state, said = self._sharing.state, proposal.plan
        plan = state.planned(said)
        if not proposal.roles:
            self._would = None
            if not state.dry_run and (state.plan is None or plan.epoch != state.plan.epoch):
                self._sharing.set(replace(state, plan=plan))
            return
        if state.dry_run:
            would = said.num_prefill, said.num_decode, dict(proposal.roles)
            if would != self._would:
                self._would = would
                self._log("proposal", said, reason=said.reason, gain=proposal.gain)
                logger.info("would plan %d prefill and %d decode: %s", said.num_prefill, said.num_decode, said.reason)
            return
        try:
            changed = await self._scaler.apply(plan, proposal.roles)
        except ServiceError as error:
            metrics.PLANNER_FAILURES.inc()
            logger.warning("a plan cannot be carried out: %s", error)
            return
        if changed:
            self._sharing.set(replace(state, plan=plan))
            self._log("plan", said, reason=said.reason, gain=proposal.gain)

    async def _end_manual(self) -> None:
        state = self._sharing.state
        if not state.has_run_out(self._now()):
            return
        after, reason = _after(state), "the time of what was set by hand is over"
        if after.mode is PlanMode.FROZEN:
            try:
                await self._scaler.apply(_as_they_are(self._scaler, reason), state.before)
            except ServiceError as error:
                logger.warning("roles do not become what they were before: %s", error)
        self._set(replace(after, plan=after.planned(_as_they_are(self._scaler, reason))), "", reason)

    def _set(self, state: PlanState, by: str, reason: str) -> None:
        self._sharing.set(state)
        self._would = None
        self._log(state.mode.value, state.plan if state.mode is PlanMode.MANUAL else None, by=by, reason=reason)
        logger.info("pools: %s%s", state.mode.value, f", {reason}" if reason else "")

    def _log(self, what: str, plan: PoolPlan | None, *, by: str = "", reason: str = "", gain: float = 0.0) -> None:
        num_prefill, num_decode = (0, 0) if plan is None else (plan.num_prefill, plan.num_decode)
        self._decisions.add(what, by=by, reason=reason, gain=gain, num_prefill=num_prefill, num_decode=num_decode)


def initial_state(policy: SteeringPolicy) -> PlanState:
    return PlanState(PlanMode.AUTO if policy.is_automatic else PlanMode.FROZEN, policy.dry_run)


def _after(state: PlanState) -> PlanState:
    """A manual plan, once its time is over."""
    return PlanState(state.then, state.dry_run, state.plan)


def _as_they_are(scaler: PoolScaler, reason: str) -> PoolPlan:
    sizes = scaler.sizes()
    return PoolPlan(0, sizes.num_prefill, sizes.num_decode, reason, 0.0, 1.0)
