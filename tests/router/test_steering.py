"""The planning loop with a scripted planner: what it carries out, what it leaves alone, and which router it is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from protos.errors import FailedPrecondition, InvalidArgument
from router.candidate import Role
from router.config import SteeringPolicy
from router.decisions import Decisions
from router.flips import Flips
from router.observation import Arrival, Observation
from router.plan_sharing import LEASE_S, PlanSharing
from router.plan_state import PlanMode, PlanState
from router.pool_plan import PoolPlan, Proposal
from router.pool_scaler import FlipScaler, PoolSizes
from router.steering import Steering
from router.store import StoreAway
from router.workers import WorkerTable
from tests.router.test_sharing import Clock, MovableStore
from tests.router.test_workers import READY, candidate, profile

EVERY_S = 10.0
TWO_AND_TWO = {"w0": Role.PREFILL, "w1": Role.PREFILL, "w2": Role.DECODE, "w3": Role.DECODE}
TO_DECODE = Proposal(PoolPlan(7, 1, 3, "decode is short", 9.0, 0.8), {"w0": Role.DECODE}, gain=2.5)
NOTHING = Proposal(PoolPlan(7, 2, 2, "as it is", 7.0, 0.8))


class Scripted:
    """Says the same until it is told otherwise. `meanwhile` happens while it thinks."""

    def __init__(self) -> None:
        self.said: Proposal | Exception = NOTHING
        self.seen: list[Observation] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self.threads: set[int] = set()

    def propose(self, observation: Observation) -> Proposal:
        self.seen.append(observation)
        self.threads.add(threading.get_ident())
        self.meanwhile()
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


class Router:
    def __init__(self, store: MovableStore, clock: Clock, name: str, state: PlanState) -> None:
        self.clock = clock
        self.table = WorkerTable("t1", clock)
        for worker, role in TWO_AND_TWO.items():
            self.table.register(profile(worker, role), READY)
        self.decisions = Decisions(store, lambda: name, now=clock)
        self.flips = Flips(self.table, self.decisions, clock=clock, now=clock)
        self.sharing = PlanSharing(store, state, lambda: name, clock)
        self.scaler = FlipScaler(self.table, self.flips)
        self.planner = Scripted()
        self.arrived: list[Arrival] = []
        policy = SteeringPolicy(every_s=EVERY_S)
        self.steering = Steering(
            policy, self.sharing, self.scaler, self.decisions, self._observe, self.planner, clock, clock
        )

    def _observe(self) -> Observation:
        arrived, self.arrived = self.arrived, []
        return Observation(self.clock(), tuple(self.table.snapshot()), 3, arrived, [])

    @property
    def mode(self) -> PlanMode:
        return self.steering.state.mode

    @property
    def roles(self) -> Mapping[str, Role]:
        return {name: candidate(self.table, name).role for name in TWO_AND_TWO}

    async def log(self) -> list[tuple[str, int, int, str]]:
        """Oldest first, without what became of flips."""
        listed = reversed(await self.decisions.newest(100))
        return [(e.what, e.num_prefill, e.num_decode, e.reason) for e in listed if not e.what.startswith("flip")]


class Routers:
    def __init__(self, number: int = 1, state: PlanState | None = None) -> None:
        self.clock = Clock()
        self.store = MovableStore(self.clock)
        state = state or PlanState(PlanMode.AUTO)
        self.all = [Router(self.store, self.clock, f"r{index}", state) for index in range(number)]

    async def exchange(self) -> None:
        for router in self.all:
            with suppress(StoreAway):
                await router.sharing.exchange()

    async def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.clock.now += 1
            for router in self.all:
                for worker in router.table.workers():
                    router.table.report(worker, READY)
            await self.exchange()
            for router in self.all:
                await router.steering.look()


@pytest.fixture
def routers() -> Routers:
    return Routers()


@pytest.fixture
def router(routers: Routers) -> Router:
    return routers.all[0]


async def test_what_is_proposed_is_carried_out_and_told(routers: Routers, router: Router) -> None:
    router.planner.said = TO_DECODE
    router.arrived = [Arrival(1.0, 20, 30)]
    await routers.pass_time(EVERY_S - 1)
    assert router.planner.seen == []
    await routers.pass_time(1)
    (seen,) = router.planner.seen
    assert (seen.now_s, seen.num_waiting, seen.arrived) == (routers.clock.now, 3, [Arrival(1.0, 20, 30)])
    assert {worker.id.name: worker.role for worker in seen.workers} == TWO_AND_TWO
    assert router.roles == TWO_AND_TWO | {"w0": Role.DECODE}
    (flip,) = router.flips.newest()
    assert (flip.worker, flip.reason) == ("w0", "decode is short")
    assert router.sharing.state.plan == replace(TO_DECODE.plan, epoch=1)
    assert await router.log() == [("plan", 1, 3, "decode is short")]
    assert (await router.decisions.newest(1))[0].gain == 2.5
    assert threading.get_ident() not in router.planner.threads  # streams go on while it thinks
    assert router.sharing.proposed is not None
    assert (router.sharing.proposed.proposal, router.sharing.proposed.at) == (TO_DECODE, routers.clock.now)
    await routers.pass_time(3 * EVERY_S)  # it is so now, and not told again
    assert len(router.planner.seen) == 4
    assert await router.log() == [("plan", 1, 3, "decode is short")]
    router.planner.said = Proposal(PoolPlan(8, 2, 2, "back", 9.0, 0.8), {"w0": Role.PREFILL})
    await routers.pass_time(EVERY_S)
    assert router.roles == TWO_AND_TWO
    assert router.sharing.state.plan == replace(router.planner.said.plan, epoch=2)


async def test_in_a_dry_run_it_only_says_so_once(routers: Routers, router: Router) -> None:
    await router.steering.carry_out(router.steering.to_auto("try it", dry_run=True))
    router.planner.said = TO_DECODE
    await routers.pass_time(3 * EVERY_S)
    assert router.roles == TWO_AND_TWO
    assert await router.log() == [("auto", 0, 0, "try it"), ("proposal", 1, 3, "decode is short")]
    assert router.sharing.state.plan is None
    router.planner.said = NOTHING
    await routers.pass_time(EVERY_S)
    router.planner.said = TO_DECODE
    await routers.pass_time(EVERY_S)  # anew
    assert [what for what, *_ in await router.log()] == ["auto", "proposal", "proposal"]
    await router.steering.carry_out(router.steering.to_auto(dry_run=False))
    await routers.pass_time(EVERY_S)
    assert router.roles == TWO_AND_TWO | {"w0": Role.DECODE}


async def test_a_frozen_plan_is_left_alone_while_the_planner_says_on(routers: Routers, router: Router) -> None:
    await router.steering.carry_out(router.steering.to_frozen("a holiday"), "ann")
    router.planner.said = TO_DECODE
    await routers.pass_time(2 * EVERY_S)
    assert router.roles == TWO_AND_TWO
    assert router.sharing.proposed is not None and router.sharing.proposed.proposal is TO_DECODE
    assert await router.log() == [("frozen", 0, 0, "a holiday")]
    assert router.sharing.state.plan == PoolPlan(1, 2, 2, "a holiday", 0.0, 1.0)


async def test_a_role_set_by_hand_freezes_the_plan(routers: Routers, router: Router) -> None:
    router.planner.said = TO_DECODE
    router.flips.set_roles({"w2": Role.BOTH}, "a test")
    router.steering.role_was_set("w2", "ann")
    await routers.pass_time(2 * EVERY_S)
    assert router.roles == TWO_AND_TWO | {"w2": Role.BOTH}
    assert await router.log() == [("frozen", 0, 0, "the role of w2 was set by hand")]
    assert router.mode is PlanMode.FROZEN
    router.steering.role_was_set("w2", "ann")  # it is frozen: nothing to tell
    assert len(await router.log()) == 1
    await router.steering.carry_out(router.steering.to_auto())
    await routers.pass_time(EVERY_S)
    assert router.roles["w0"] is Role.DECODE


async def test_sizes_set_by_hand_hold_until_they_run_out_and_the_planner_goes_on(
    routers: Routers, router: Router
) -> None:
    router.planner.said = TO_DECODE
    change = router.steering.to_sizes(3, 1, 25.0, "a burst", dry_run=False)
    assert set(change.roles.values()) == {Role.PREFILL}
    assert router.roles == TWO_AND_TWO
    await router.steering.carry_out(change, "ann")
    assert router.scaler.sizes() == PoolSizes(3, 1, 0)
    await routers.pass_time(24)
    assert (router.mode, router.scaler.sizes()) == (PlanMode.MANUAL, PoolSizes(3, 1, 0))
    await routers.pass_time(1)
    assert (router.mode, router.scaler.sizes()) == (PlanMode.AUTO, PoolSizes(3, 1, 0))
    over = ("auto", 0, 0, "the time of what was set by hand is over")
    assert await router.log() == [("manual", 3, 1, "a burst"), over]
    await routers.pass_time(EVERY_S)
    assert router.roles["w0"] is Role.DECODE


async def test_behind_sizes_set_by_hand_a_frozen_plan_is_as_it_was(routers: Routers, router: Router) -> None:
    await router.steering.carry_out(router.steering.to_frozen())
    await router.steering.carry_out(router.steering.to_sizes(3, 1, 20.0))
    await routers.pass_time(5)
    await router.steering.carry_out(router.steering.to_sizes(1, 3, 10.0))
    assert router.scaler.sizes() == PoolSizes(1, 3, 0)
    await routers.pass_time(9)
    assert router.mode is PlanMode.MANUAL
    await routers.pass_time(1)
    assert (router.mode, router.roles) == (PlanMode.FROZEN, TWO_AND_TWO)


async def test_what_was_set_by_hand_meanwhile_stays(routers: Routers, router: Router) -> None:
    await router.steering.carry_out(router.steering.to_frozen())
    await router.steering.carry_out(router.steering.to_sizes(1, 3, 10.0))
    (flipped,) = (name for name, role in router.roles.items() if role != TWO_AND_TWO[name])
    router.steering.role_was_set(flipped, "ann")
    await routers.pass_time(10)
    assert router.mode is PlanMode.FROZEN
    assert router.roles[flipped] is Role.DECODE


async def test_what_an_operator_says_while_the_planner_thinks_holds(routers: Routers, router: Router) -> None:
    router.planner.said = TO_DECODE
    frozen = router.steering.to_frozen("stop")
    router.planner.meanwhile = lambda: router.sharing.set(frozen.state)
    await routers.pass_time(EVERY_S)
    assert len(router.planner.seen) == 1
    assert router.roles == TWO_AND_TWO


async def test_what_cannot_be_carried_out_changes_nothing_and_is_counted(routers: Routers, router: Router) -> None:
    failures = REGISTRY.get_sample_value("pdserve_router_planner_failures_total") or 0.0
    router.planner.said = replace(TO_DECODE, roles={"w0": Role.DECODE, "w1": Role.DECODE})
    await routers.pass_time(EVERY_S)
    assert router.roles == TWO_AND_TWO
    assert REGISTRY.get_sample_value("pdserve_router_planner_failures_total") == failures + 1
    assert await router.log() == []
    router.planner.said = replace(TO_DECODE, roles={"w0": Role.DECODE, "gone": Role.PREFILL})
    await routers.pass_time(EVERY_S)
    assert router.roles == TWO_AND_TWO | {"w0": Role.DECODE}


async def test_one_plans_and_another_one_once_that_is_gone() -> None:
    routers = Routers(2)
    first, second = routers.all
    first.planner.said = second.planner.said = TO_DECODE
    await routers.pass_time(2 * EVERY_S)
    assert (len(first.planner.seen), len(second.planner.seen)) == (2, 0)
    assert [router.sharing.planned_by for router in routers.all] == ["r0", "r0"]
    await routers.pass_time(1)
    assert second.sharing.proposed == first.sharing.proposed
    assert second.sharing.state.plan == first.sharing.state.plan is not None
    await second.steering.carry_out(second.steering.to_frozen("at the other one"))
    await routers.pass_time(2)
    assert first.mode is PlanMode.FROZEN
    routers.all = [second]  # the first is killed
    await routers.pass_time(LEASE_S + 3)
    assert second.sharing.plans_here and second.sharing.planned_by == "r1"
    num_asked = len(second.planner.seen)
    await second.sharing.leave()
    assert not second.sharing.plans_here
    routers.all = [first]
    await routers.pass_time(3)
    assert first.sharing.plans_here
    assert len(second.planner.seen) == num_asked


async def test_who_finds_the_lease_with_another_one_plans_no_more() -> None:
    routers = Routers(2)
    first, second = routers.all
    await routers.pass_time(1)
    assert first.sharing.plans_here
    routers.store.lose_all()
    routers.clock.now += 2
    await second.sharing.exchange()
    await first.sharing.exchange()
    assert (first.sharing.plans_here, second.sharing.plans_here) == (False, True)


async def test_while_the_store_is_away_nobody_flips_and_it_goes_on_after() -> None:
    routers = Routers(2)
    first, second = routers.all
    await routers.pass_time(1)
    assert (first.sharing.plans_here, second.sharing.plans_here) == (True, False)
    routers.store.is_away = True
    await routers.pass_time(EVERY_S)
    first.planner.said = second.planner.said = TO_DECODE
    await routers.pass_time(3 * EVERY_S)
    assert not first.sharing.plans_here and not second.sharing.plans_here
    assert first.roles == second.roles == TWO_AND_TWO
    first.flips.set_roles({"w3": Role.BOTH}, "an operator may")
    routers.store.is_away = False
    await routers.pass_time(EVERY_S + 3)
    assert [router.sharing.plans_here for router in routers.all].count(True) == 1
    assert Role.DECODE in (first.roles["w0"], second.roles["w0"])


async def test_a_planner_that_fails_is_asked_again(
    routers: Routers, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.steering._LOOK_S", 0.0)
    failures = REGISTRY.get_sample_value("pdserve_router_planner_failures_total") or 0.0
    await routers.exchange()
    router.planner.said = ValueError("as the test wants it")
    running = asyncio.create_task(router.steering.run())

    async def planned(number: int) -> None:
        routers.clock.now += EVERY_S
        await router.sharing.exchange()
        for worker in router.table.workers():
            router.table.report(worker, READY)
        async with asyncio.timeout(10):
            while len(router.planner.seen) < number:
                await asyncio.sleep(0.001)

    await planned(1)
    router.planner.said = TO_DECODE
    await planned(2)
    async with asyncio.timeout(10):
        while router.roles["w0"] is not Role.DECODE:
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.wait([running])
    assert REGISTRY.get_sample_value("pdserve_router_planner_failures_total") == failures + 1


async def test_sizes_that_cannot_be_had_are_refused(router: Router) -> None:
    with pytest.raises(InvalidArgument, match="num_decode is 0; it must be at least 1"):
        router.steering.to_sizes(4, 0, 10.0)
    router.table.register(profile("w0", Role.PREFILL, epoch="e2", flippable=False), READY)
    router.table.register(profile("w1", Role.PREFILL, epoch="e2", flippable=False), READY)
    with pytest.raises(FailedPrecondition, match=r"num_prefill is 1, but w0 \(prefill\), w1 \(prefill\) are fixed"):
        router.steering.to_sizes(1, 3, 10.0)
    assert router.steering.state == PlanState(PlanMode.AUTO)
