"""The service Plans: what it tells, what it changes, what it refuses; and what routers share of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from protos import plans_pb2, plans_pb2_grpc, workers_pb2
from protos.channel import open_channel, service_errors
from protos.client import PdserveClient
from protos.errors import FailedPrecondition, InvalidArgument, PermissionDenied
from protos.plan_values import SloClass
from protos.values import Sampling
from router.candidate import Role
from router.config import SloPolicy, SteeringPolicy
from router.observation import Answered, Arrival, Observation
from router.observations import TimesNow
from router.observing import Observing
from router.plan_sharing import PlanSharing
from router.plan_state import PlanMode, PlanState, Proposed, VersionedState
from router.pool_plan import LoadForecast, PoolPlan, Proposal, RatioForecast
from router.store import MemoryStore
from router.worker import WorkerState
from tests.router.asking import PROMPT, answer
from tests.router.fakes import CARD, POLICY, FakeFleet, running_fleet
from tests.router.test_decisions import Users
from tests.router.test_sharing import Clock
from tests.router.test_workers import READY, profile

PLAN = PoolPlan(3, 2, 5, "why", 12.5, 0.75)
INFINITE = RatioForecast(1, 6, float("inf"), 0.03, 0.0, 0.0)
PROPOSAL = Proposal(
    PLAN,
    {"d1": Role.PREFILL},
    LoadForecast(4.0, 900.5, 120.25, 0.3),
    (INFINITE, RatioForecast(2, 5, 0.4, 0.04, 12, 1)),
    2.5,
)


@pytest.fixture
async def plans(fleet: FakeFleet) -> AsyncIterator[plans_pb2_grpc.PlansStub]:
    async with open_channel(fleet.router.address) as channel:
        yield plans_pb2_grpc.PlansStub(channel)


def roles(fleet: FakeFleet) -> dict[str, Role]:
    return {worker.profile.id.name: worker.role for worker in fleet.router.table.workers()}


async def test_what_holds_at_first(plans: plans_pb2_grpc.PlansStub, fleet: FakeFleet) -> None:
    async with asyncio.timeout(10):
        while not (status := await plans.GetPlan(plans_pb2.GetPlanRequest())).planned_by:
            await asyncio.sleep(0.01)
    slo = plans_pb2.Slo(ttft_s=1.0, tpot_s=0.1, percentile=0.9)
    wanted = plans_pb2.PlanStatus(
        mode=plans_pb2.PLAN_MODE_AUTO, slo=slo, num_prefill=2, num_decode=2, planned_by=fleet.router.address
    )
    (times,) = status.step_times
    assert times.num_workers == 4
    status.ClearField("step_times")
    assert status == wanted


async def test_a_preview_names_who_would_flip_and_changes_nothing(
    plans: plans_pb2_grpc.PlansStub, fleet: FakeFleet, client: PdserveClient
) -> None:
    before = roles(fleet)
    manual = plans_pb2.SetPlanRequest(mode=plans_pb2.PLAN_MODE_MANUAL, num_prefill=1, num_decode=3, reason="more")
    manual.preview, manual.for_s, manual.dry_run = True, 90, True
    status = await plans.SetPlan(manual)
    (flip,) = status.would_flip
    assert (flip.before, flip.after, flip.state) == (workers_pb2.ROLE_PREFILL, workers_pb2.ROLE_DECODE, 0)
    assert flip.worker_id in ("p0", "p1")
    assert (status.mode, status.dry_run, status.plan.num_prefill, status.plan.num_decode, status.plan.reason) == (
        *(plans_pb2.PLAN_MODE_MANUAL, True, 1, 3),
        "more",
    )
    assert 85 < status.manual_for_s <= 90
    assert (status.num_prefill, status.num_decode) == (2, 2)
    for mode in (plans_pb2.PLAN_MODE_AUTO, plans_pb2.PLAN_MODE_FROZEN):
        assert not (await plans.SetPlan(plans_pb2.SetPlanRequest(mode=mode, preview=True))).would_flip
    assert roles(fleet) == before
    after = await plans.GetPlan(plans_pb2.GetPlanRequest())
    assert (after.mode, after.dry_run, len(after.flips)) == (plans_pb2.PLAN_MODE_AUTO, False, 0)
    assert await client.list_decisions(deadline_s=10) == []


async def test_sizes_are_set_by_hand(fleet: FakeFleet, client: PdserveClient) -> None:
    plan = await client.set_plan("manual", num_prefill=3, num_decode=1, reason="a burst")
    assert (plan.mode, plan.num_prefill, plan.num_decode) == ("manual", 3, 1)
    assert plan.manual_for_s is not None and 3590 < plan.manual_for_s <= 3600
    assert plan.in_force is not None and (plan.in_force.epoch, plan.in_force.reason) == (1, "a burst")
    (flip,) = plan.flips
    assert roles(fleet)[flip.worker_id] is Role.PREFILL and flip.worker_id in ("d0", "d1")
    assert (flip.before, flip.after, flip.reason) == ("decode", "prefill", "a burst")
    listed = await client.list_decisions(deadline_s=10)
    manual = next(each for each in listed if each.what == "manual")
    assert (manual.num_prefill, manual.num_decode, manual.reason, manual.worker_id) == (3, 1, "a burst", "")
    assert (await client.set_plan("frozen", dry_run=True)).dry_run
    assert (await client.set_plan("auto")).dry_run  # as it was
    assert not (await client.set_plan("auto", dry_run=False)).dry_run


def manual(num_prefill: int = 2, num_decode: int = 2, **fields: Any) -> plans_pb2.SetPlanRequest:
    mode = plans_pb2.PLAN_MODE_MANUAL
    return plans_pb2.SetPlanRequest(mode=mode, num_prefill=num_prefill, num_decode=num_decode, **fields)


AUTO, FROZEN = plans_pb2.PLAN_MODE_AUTO, plans_pb2.PLAN_MODE_FROZEN
WRONG = [
    (plans_pb2.SetPlanRequest(), "mode", "mode is 0; it must be PLAN_MODE_AUTO, PLAN_MODE_MANUAL or PLAN_MODE_FROZEN"),
    (manual(0, 4), "num_prefill", "num_prefill is 0; it must be at least 1"),
    (manual(4, 0), "num_decode", "num_decode is 0; it must be at least 1"),
    (manual(2, 3), "num_prefill", "num_prefill and num_decode are 5 together; they must be 4"),
    (manual(for_s=0), "for_s", "for_s is 0; it must be above 0 and at most 604800"),
    (manual(for_s=-1), "for_s", "for_s is -1; it must be above 0 and at most 604800"),
    (manual(for_s=604801), "for_s", "for_s is 604801; it must be above 0 and at most 604800"),
    (manual(for_s=float("nan")), "for_s", "for_s is nan; it must be above 0"),
    (manual(reason="x" * 201), "reason", "reason has 201 characters; it must have at most 200"),
    (
        plans_pb2.SetPlanRequest(mode=AUTO, num_prefill=2),
        "num_prefill",
        "num_prefill is 2; only a manual plan has it",
    ),
    (
        plans_pb2.SetPlanRequest(mode=FROZEN, for_s=9),
        "for_s",
        "for_s is 9; only a manual plan has it",
    ),
]


@pytest.mark.parametrize("request_, field, told", WRONG, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("preview", [False, True])
async def test_what_is_wrong_is_told(
    plans: plans_pb2_grpc.PlansStub,
    fleet: FakeFleet,
    request_: plans_pb2.SetPlanRequest,
    field: str,
    told: str,
    preview: bool,
) -> None:
    asked = plans_pb2.SetPlanRequest()
    asked.CopyFrom(request_)
    asked.preview = preview
    before = roles(fleet)
    with pytest.raises(InvalidArgument, match=told) as caught, service_errors():
        await plans.SetPlan(asked)
    assert caught.value.field == field
    assert roles(fleet) == before
    assert (await plans.GetPlan(plans_pb2.GetPlanRequest())).mode == plans_pb2.PLAN_MODE_AUTO


async def test_fixed_workers_are_named(plans: plans_pb2_grpc.PlansStub, fleet: FakeFleet) -> None:
    for name in ("x0", "x1", "x2"):
        fixed = profile(name, Role.PREFILL, flippable=False, tokenizer_digest=CARD.tokenizer_digest)
        layout = next(iter(fleet.router.table.workers())).profile.layout
        fleet.router.table.register(replace(fixed, layout=layout), READY)
    told = r"num_prefill is 2, but x0 \(prefill\), x1 \(prefill\), x2 \(prefill\) are fixed and cannot be flipped"
    with pytest.raises(FailedPrecondition, match=told) as caught, service_errors():
        await plans.SetPlan(manual(2, 5))
    assert caught.value.field == "num_prefill"


async def test_who_may_only_read_may_not_set_it() -> None:
    async with (
        running_fleet(authenticator=Users()) as fleet,
        PdserveClient(fleet.router.address, api_key="eve") as eve,
    ):
        with pytest.raises(PermissionDenied, match="needs the scope read"):
            await eve.get_plan(deadline_s=10)
        with pytest.raises(PermissionDenied, match="needs the scope operate"):
            await eve.set_plan("frozen", deadline_s=10)


async def test_a_router_begins_as_it_was_told() -> None:
    policy, slo = SteeringPolicy(is_automatic=False, dry_run=True), SloPolicy(0.2, 0.03, 0.99)
    told: dict[str, Any] = {"steering": policy, "slo": slo, "slo_classes": {"batch": SloPolicy(30.0, 0.5, 0.6)}}
    async with running_fleet(1, 1, **told) as fleet, PdserveClient(fleet.router.address) as client:
        plan = await client.get_plan()
        assert plan.slo_classes == (SloClass("batch", 30.0, 0.5, 0.6),)
        assert (plan.mode, plan.dry_run) == ("frozen", True)
        assert (plan.slo_ttft_s, plan.slo_tpot_s, plan.slo_share) == (0.2, 0.03, 0.99)


class Saying:
    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def propose(self, observation: Observation) -> Proposal:
        self.seen.append(observation)
        return PROPOSAL


async def test_what_the_planner_says_is_told() -> None:
    policy = SteeringPolicy(is_automatic=False, every_s=0.01)
    async with (
        running_fleet(2, 2, steering=policy, planner=Saying()) as fleet,
        PdserveClient(fleet.router.address) as client,
    ):
        async with asyncio.timeout(10):
            while (plan := await client.get_plan()).proposed is None:
                await asyncio.sleep(0.02)
        assert (plan.proposed.num_prefill, plan.proposed.num_decode, plan.proposed.reason) == (2, 5, "why")
        assert (plan.proposed.goodput, plan.proposed.confidence, plan.proposed_gain) == (12.5, 0.75, 2.5)
        assert [(each.num_prefill, each.ttft_s, each.goodput) for each in plan.ratios] == [
            (1, float("inf"), 0.0),
            (2, 0.4, 12.0),
        ]
        assert plan.planned_ago_s is not None and 0 <= plan.planned_ago_s < 10
        async with open_channel(fleet.router.address) as channel:
            status = await plans_pb2_grpc.PlansStub(channel).GetPlan(plans_pb2.GetPlanRequest())
        forecast = plans_pb2.LoadForecast(
            requests_per_s=4.0, num_prompt_tokens=900.5, num_output_tokens=120.25, hit_rate=0.3
        )
        assert status.forecast == forecast
        preview = await client.set_plan("auto", preview=True)
        assert [(each.worker_id, each.after) for each in preview.would_flip] == [("d1", "prefill")]
        assert roles(fleet)["d1"] is Role.DECODE
        assert not (await client.set_plan("auto", dry_run=True, preview=True)).would_flip
        await client.set_plan("auto")
        async with asyncio.timeout(10):
            while roles(fleet)["d1"] is Role.DECODE:
                await asyncio.sleep(0.02)


def test_records_come_back_as_they_were() -> None:
    state = PlanState(PlanMode.MANUAL, True, PLAN, 1234.5, PlanMode.FROZEN, {"a": Role.BOTH, "b": Role.DECODE})
    for each in (VersionedState(state, 7, "w"), VersionedState(PlanState(PlanMode.AUTO))):
        assert VersionedState.from_bytes(each.to_bytes()) == each
    classed = replace(PROPOSAL, ratios=(INFINITE, replace(INFINITE, classes={"": 0.5, "chat": 1.0})))
    for said in (Proposed(PROPOSAL, 5.5), Proposed(Proposal(PLAN), 6.0), Proposed(classed, 7.0)):
        assert Proposed.from_bytes(said.to_bytes()) == said
    first, second = json.loads(Proposed(classed, 7.0).to_bytes())["ratios"]
    assert second.keys() - first.keys() == {"classes"}  # which routers of older versions do not know


@pytest.mark.parametrize("raw", [b"\xff", b"[]", b"{}", b'{"mode": "sometimes"}', b"[" * 10**5, b"null"])
async def test_records_that_cannot_be_read_are_left_alone(raw: bytes) -> None:
    for read in (VersionedState.from_bytes, Proposed.from_bytes):
        with pytest.raises(ValueError, match="not w"):
            read(raw)
    store = MemoryStore()
    for name in ("state", "proposed", "lease"):
        await store.put("plan", name, raw, 60)
    sharing = PlanSharing(store, PlanState(PlanMode.FROZEN), lambda: "here", Clock())
    await sharing.exchange()
    assert (sharing.state, sharing.proposed) == (PlanState(PlanMode.FROZEN), None)
    assert (sharing.planned_by, sharing.plans_here) == ("", False)


async def test_the_later_state_holds_and_what_the_store_has_lost_is_put_again() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    one, other = (PlanSharing(store, PlanState(PlanMode.AUTO), lambda: "here", clock) for _ in range(2))
    one.set(PlanState(PlanMode.FROZEN))
    other.set(PlanState(PlanMode.AUTO, dry_run=True))
    other.set(PlanState(PlanMode.AUTO, dry_run=True, plan=PLAN))
    for _ in range(2):
        await one.exchange()
        await other.exchange()
    assert one.state == other.state == PlanState(PlanMode.AUTO, dry_run=True, plan=PLAN)
    await store.remove("plan", "state")
    await one.exchange()
    third = PlanSharing(store, PlanState(PlanMode.FROZEN), lambda: "here", clock)
    await third.exchange()
    assert third.state == one.state
    assert json.loads((await store.records("plan"))["state"])["version"] == 2


async def test_the_planner_is_told_of_requests_and_workers() -> None:
    """As they come, while they run, and once they are answered."""
    saying, go_on = Saying(), asyncio.Event()

    async def hold(attempt_id: str, count: int) -> None:
        if count == len(PROMPT) + 5:
            await go_on.wait()

    steering = SteeringPolicy(is_automatic=False, every_s=0.01)
    async with (
        running_fleet(1, 1, planner=saying, steering=steering) as fleet,
        PdserveClient(fleet.router.address) as client,
    ):
        fixed = profile("f", Role.PREFILL, flippable=False, tokenizer_digest=CARD.tokenizer_digest)
        layout = next(iter(fleet.router.table.workers())).profile.layout
        fleet.router.table.register(replace(fixed, layout=layout), replace(READY, state=WorkerState.DRAINING))
        fleet.workers["d0"].hooks["decode.token"] = hold
        answering = asyncio.create_task(answer(client, Sampling(max_tokens=8)))
        async with asyncio.timeout(10):
            while not any(each.num_output_tokens == 5 for seen in saying.seen for each in seen.running):
                await asyncio.sleep(0.01)
        go_on.set()
        await answering
        await answer(client, Sampling(max_tokens=1))
        async with asyncio.timeout(10):
            while len([each for seen in saying.seen for each in seen.answered]) < 2:
                await asyncio.sleep(0.01)
        await fleet.settled()
    arrived = [each for seen in saying.seen for each in seen.arrived]
    assert [(each.num_prompt_tokens, each.max_tokens) for each in arrived] == [(21, 8), (21, 1)]
    answered = [each for seen in saying.seen for each in seen.answered]
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in answered] == [(21, 8), (21, 1)]
    assert [each.tpot_s is None for each in answered] == [False, True]
    running = next(each for seen in saying.seen for each in seen.running)
    assert (running.num_prompt_tokens, running.arrived_at_s <= arrived[0].at_s) == (21, True)
    last = saying.seen[-1]
    assert (last.fixed, {worker.id.name for worker in last.workers}) == ({"f"}, {"p0", "d0", "f"})
    assert isinstance(last.models, TimesNow)  # as they were: in another thread
    assert last.models.confidences_of(last.workers[0].id) == (0.0, 0.0)


async def test_one_that_waits_is_none_that_workers_have() -> None:
    saying, steering = Saying(), SteeringPolicy(is_automatic=False, every_s=0.01)
    policy = replace(POLICY, wait_for_worker_s=30.0)
    async with (
        running_fleet(1, 0, policy=policy, planner=saying, steering=steering) as fleet,
        PdserveClient(fleet.router.address) as client,
    ):
        waiting = asyncio.create_task(answer(client, Sampling(max_tokens=6)))
        async with asyncio.timeout(10):
            while not any(seen.num_waiting for seen in saying.seen):
                await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])
    assert [each for seen in saying.seen for each in seen.running] == []


def test_of_very_many_the_newest_are_kept_and_means_stand_for_those_that_were_not_read() -> None:
    clock = Clock()
    observing = Observing(clock, most=3)
    observing.refused(had_arrived=False)  # nobody knows how long it would be
    for number in range(10):
        observing.arrived(Arrival(clock.now + number, number, 5))
        observing.answered(Answered(1.0, 2.0, number, 0, 1, 0.1, None))
    arrived, answered = observing.take()
    assert arrived == [Arrival(1000.0 + number, number, 5) for number in (7, 8, 9)]
    assert [each.num_prompt_tokens for each in answered] == [7, 8, 9]
    observing = Observing(clock)
    observing.arrived(Arrival(1.0, 100, 40))
    observing.refused(had_arrived=True)
    observing.refused(had_arrived=False)
    assert observing.take() == ([Arrival(1.0, 100, 40), Arrival(clock.now, 100, 40)], [])
