"""Changes of roles: what is told to leave, when one is over and how, and which are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from protos import workers_pb2
from protos.client import PdserveClient
from protos.errors import FailedPrecondition, NotFound
from protos.values import Sampling
from router.candidate import Role
from router.decisions import Decisions
from router.dispatch import Dispatch
from router.flip import Flip, FlipState
from router.flips import MAX_FLIPS, Flips
from router.placement import Placement
from router.shared_records import SentLoad
from router.store import MemoryStore
from router.worker import Worker
from router.workers import WorkerTable
from tests.router.asking import PROMPT, answer
from tests.router.fakes import FakeFleet, plain_loop, ready_load
from tests.router.test_workers import READY, Clock, candidate, profile

DEADLINE_S = 60.0


class Pools:
    """Two workers of each role, and one that keeps its role."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.table = WorkerTable("t1", self.clock)
        self.decisions = Decisions(MemoryStore(), lambda: "here")
        self.flips = Flips(self.table, self.decisions, DEADLINE_S, self.clock)
        self.workers: dict[str, Worker] = {}
        for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
            self.workers[name] = self.table.register(profile(name, role), READY)
        self.workers["fixed"] = self.table.register(profile("fixed", Role.DECODE, flippable=False), READY)

    def dispatched(self, prefill: str | None, decode: str) -> Dispatch:
        first = None if prefill is None else candidate(self.table, prefill)
        return self.table.dispatch(Placement(first, candidate(self.table, decode)), num_tokens=40, num_blocks=3)

    def flip(self, name: str, role: Role) -> None:
        self.flips.set_roles({name: role}, "a test", "ann")

    def states(self, name: str) -> list[FlipState]:
        """Newest first."""
        self.flips.look()
        return [flip.state for flip in self.flips.newest() if flip.worker == name]

    async def log(self) -> list[tuple[str, str, str]]:
        return [(each.what, each.worker, each.reason) for each in await self.decisions.newest(100)]


@pytest.fixture
def pools() -> Pools:
    return Pools()


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_what_decodes_is_told_to_leave_and_the_flip_lasts_until_it_has(pools: Pools) -> None:
    done = counted("pdserve_router_flips_total", outcome="done")
    moves, took = counted("pdserve_router_flip_moves_total"), counted("pdserve_router_flip_seconds_sum")
    first, second, elsewhere = (pools.dispatched("p0", name) for name in ("d0", "d0", "d1"))
    for dispatch in (first, second, elsewhere):
        dispatch.prefilled()
    pools.flip("d0", Role.PREFILL)
    assert [each.leaving.is_set() for each in (first, second, elsewhere)] == [True, True, False]
    assert (candidate(pools.table, "d0").role, candidate(pools.table, "d0").is_ready) == (Role.PREFILL, True)
    pools.clock.now += 1.0
    first.handed_over()
    first.end()
    assert pools.states("d0") == [FlipState.RUNNING]
    (running,) = pools.flips.newest()
    assert (running.took_s, running.num_moved) == (1.0, 1)
    pools.clock.now += 0.5
    second.end()  # it came to its end there
    pools.flips.look()
    (flip,) = pools.flips.newest()
    wanted = Flip("d0", Role.DECODE, Role.PREFILL, flip.at, "a test", FlipState.DONE, 1.5, 1)
    assert flip == wanted
    (decision,) = await pools.decisions.newest(10)
    assert (decision.what, decision.worker, decision.role, decision.by) == ("flip done", "d0", "prefill", "ann")
    assert (decision.reason, decision.took_s, decision.num_moved) == ("a test", 1.5, 1)
    assert counted("pdserve_router_flips_total", outcome="done") == done + 1
    assert counted("pdserve_router_flip_moves_total") == moves + 1
    assert counted("pdserve_router_flip_seconds_sum") == took + 1.5


async def test_prompts_are_finished_where_they_are_queued(pools: Pools) -> None:
    queued = pools.dispatched("p0", "d0")
    pools.clock.now += 1
    pools.table.report(pools.workers["p0"], replace(READY, queued_prefill_tokens=40))
    pools.flip("p0", Role.DECODE)
    pools.clock.now += 1
    local = pools.dispatched(None, "p0")  # which this decode worker may prefill itself
    assert not queued.leaving.is_set()
    assert pools.states("p0") == [FlipState.RUNNING]
    queued.prefilled()
    assert pools.states("p0") == [FlipState.RUNNING]  # another router's may be queued there
    pools.table.report(pools.workers["p0"], READY)
    assert pools.states("p0") == [FlipState.DONE]
    assert not local.leaving.is_set() and not local.is_prefilled


@pytest.mark.parametrize("name, after", [("d0", Role.PREFILL), ("p0", Role.DECODE)])
async def test_what_other_routers_have_there_is_waited_for(pools: Pools, name: str, after: Role) -> None:
    pools.table.sent_elsewhere(pools.workers[name], SentLoad(num_decoding=1, num_unreported_tokens=7))
    pools.flip(name, after)
    assert pools.states(name) == [FlipState.RUNNING]
    pools.table.sent_elsewhere(pools.workers[name], SentLoad())
    assert pools.states(name) == [FlipState.DONE]


async def test_to_do_both_takes_nothing_away(pools: Pools) -> None:
    dispatch = pools.dispatched("p0", "d0")
    pools.flip("d0", Role.BOTH)
    assert pools.states("d0") == [FlipState.DONE]
    assert not dispatch.leaving.is_set()
    pools.flip("d0", Role.BOTH)
    assert len(pools.flips.newest()) == 1  # nothing has changed


async def test_taken_back_while_it_runs(pools: Pools) -> None:
    staying, queued = pools.dispatched("p0", "d0"), None
    pools.flip("d0", Role.PREFILL)
    queued = pools.dispatched("d0", "d1")
    pools.clock.now += 1
    pools.flip("d0", Role.DECODE)
    assert not staying.leaving.is_set()
    assert pools.states("d0") == [FlipState.RUNNING, FlipState.FAILED]
    assert pools.flips.newest()[1].problem == "the role was set to decode meanwhile"
    assert (await pools.log())[0] == ("flip failed", "d0", "a test: the role was set to decode meanwhile")
    queued.prefilled()
    assert pools.states("d0") == [FlipState.DONE, FlipState.FAILED]


async def test_a_worker_that_leaves_ends_it(pools: Pools) -> None:
    failed = counted("pdserve_router_flips_total", outcome="failed")
    for name in ("d0", "d1"):
        pools.dispatched("p0", name)
    pools.flips.set_roles({"d0": Role.PREFILL, "d1": Role.PREFILL}, "a test")
    pools.table.lost(pools.workers["d0"])
    pools.table.register(profile("d1", Role.DECODE, epoch="another"), READY)  # another process of the same name
    assert pools.states("d0") == pools.states("d1") == [FlipState.FAILED]
    assert {flip.problem for flip in pools.flips.newest()} == {"the worker has left"}
    assert counted("pdserve_router_flips_total", outcome="failed") == failed + 2


async def test_one_that_takes_too_long_has_failed_and_its_worker_keeps_the_role(pools: Pools) -> None:
    dispatch = pools.dispatched("p0", "d0")
    pools.flip("d0", Role.PREFILL)
    pools.clock.now += DEADLINE_S - 1
    pools.table.report(pools.workers["d0"], READY)
    assert pools.states("d0") == [FlipState.RUNNING]
    pools.clock.now += 1
    assert pools.states("d0") == [FlipState.FAILED]
    assert candidate(pools.table, "d0").role is Role.PREFILL
    assert dispatch.leaving.is_set()  # and goes on trying


async def test_what_is_refused_changes_nothing(pools: Pools) -> None:
    with pytest.raises(NotFound, match="no worker 'x' is registered; there are: d0, d1, fixed, p0, p1"):
        pools.flips.set_roles({"d0": Role.PREFILL, "x": Role.DECODE}, "a test")
    with pytest.raises(FailedPrecondition, match="worker 'fixed' cannot change its role"):
        pools.flips.set_roles({"d0": Role.PREFILL, "fixed": Role.PREFILL}, "a test")
    with pytest.raises(FailedPrecondition, match="no worker in service prefills but 'p0' and 'p1'") as caught:
        pools.flips.set_roles({"p0": Role.DECODE, "p1": Role.DECODE}, "a test")
    assert caught.value.field == "role"
    assert [candidate(pools.table, name).role for name in ("d0", "p0", "p1")] == [Role.DECODE, *[Role.PREFILL] * 2]
    assert pools.flips.newest() == []
    pools.flips.set_roles({"fixed": Role.DECODE}, "a test")


async def test_one_that_is_not_in_service_does_not_count_as_left(pools: Pools) -> None:
    pools.table.set_draining("p1", True)
    with pytest.raises(FailedPrecondition, match="no worker in service prefills but 'p0'"):
        pools.flip("p0", Role.DECODE)
    pools.flip("p0", Role.BOTH)
    pools.flip("p1", Role.DECODE)  # nobody misses it


async def test_roles_may_be_swapped_at_once(pools: Pools) -> None:
    pools.table.set_draining("p1", True)
    for name in ("d1", "fixed"):
        pools.table.set_draining(name, True)
    pools.flips.set_roles({"p0": Role.DECODE, "d0": Role.PREFILL}, "a test")
    assert (candidate(pools.table, "p0").role, candidate(pools.table, "d0").role) == (Role.DECODE, Role.PREFILL)


async def test_what_another_router_was_asked_for_is_shown_and_told_by_that_one(pools: Pools) -> None:
    done = counted("pdserve_router_flips_total", outcome="done")
    pools.flips.follow("d0", Role.PREFILL)
    assert pools.states("d0") == [FlipState.DONE]
    assert await pools.log() == []
    assert counted("pdserve_router_flips_total", outcome="done") == done


async def test_the_newest_are_kept(pools: Pools) -> None:
    for _ in range(MAX_FLIPS):
        for role in (Role.BOTH, Role.DECODE):
            pools.flip("d0", role)
            pools.flips.look()
    pools.dispatched("p0", "d1")
    pools.flip("d1", Role.PREFILL)
    newest = pools.flips.newest()
    assert len(newest) == MAX_FLIPS
    assert (newest[0].worker, newest[0].state, newest[1].worker) == ("d1", FlipState.RUNNING, "d0")
    assert [flip.at for flip in newest] == sorted((flip.at for flip in newest), reverse=True)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.002)


async def test_where_nobody_has_room_it_lasts_until_the_answer_ends(fleet: FakeFleet, client: PdserveClient) -> None:
    go_on = asyncio.Event()

    async def hold(attempt_id: str, count: int) -> None:
        if count == len(PROMPT) + 5:
            await go_on.wait()
        await asyncio.sleep(0.001)

    for name in ("d0", "d1"):
        fleet.workers[name].hooks["decode.token"] = hold
    answering = asyncio.create_task(answer(client, Sampling(max_tokens=60)))
    await until(lambda: any(fleet.workers[name].decodes for name in ("d0", "d1")))
    source, other = ("d0", "d1") if fleet.workers["d0"].decodes else ("d1", "d0")
    fleet.workers[other].report(ready_load(num_free_blocks=3))
    await until(lambda: candidate(fleet.router.table, other).num_free_blocks == 3)
    await client.set_role(source, "prefill")
    await asyncio.sleep(0.3)  # it is tried again and again
    (flip,) = (await client.get_plan()).flips
    assert (flip.worker_id, flip.state) == (source, "running")
    go_on.set()
    tokens, _, summary = await answering
    assert tokens == plain_loop(PROMPT, 60)
    assert summary.usage.num_moves == 0 and not fleet.workers[source].departures
    async with asyncio.timeout(10):
        while (flip := (await client.get_plan()).flips[0]).state == "running":
            await asyncio.sleep(0.01)
    assert (flip.state, flip.num_moved) == ("done", 0)


@pytest.mark.usefixtures("told_one_by_one")
async def test_a_prompt_on_its_way_to_a_worker_is_decoded_elsewhere(fleet: FakeFleet, client: PdserveClient) -> None:
    """Its decode worker prefills from now on, before there is a first token; that one may take long."""
    flipped: list[str] = []

    async def flip_first(attempt_id: str, count: int) -> None:
        if not flipped:
            (worker,) = (each for each in fleet.router.table.workers() if each.dispatches.num_coming)
            flipped.append(worker.profile.id.name)
            await client.set_role(flipped[0], "prefill")
            await asyncio.sleep(1.0)

    async def slowly(attempt_id: str, count: int) -> None:
        await asyncio.sleep(0.01)

    for name in ("p0", "p1"):
        fleet.workers[name].hooks["prefill.start"] = flip_first
    for name in ("d0", "d1"):
        fleet.workers[name].hooks["decode.token"] = slowly
    tokens, _, summary = await answer(client, Sampling(max_tokens=120))
    assert tokens == plain_loop(PROMPT, 120)
    assert summary.usage.num_moves == 1
    assert (await client.get_plan()).flips[0].num_moved == 1
    (arrival,) = fleet.workers["d1" if flipped == ["d0"] else "d0"].decodes
    assert len(arrival.token_ids) < len(PROMPT) + 60  # soon after its first token, not seconds later
    assert workers_pb2.ROLE_PREFILL in fleet.workers[flipped[0]].commands
