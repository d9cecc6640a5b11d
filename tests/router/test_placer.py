"""From a request to its placement and the load it is: what is hashed, what is counted, and where sessions were."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from model.block_pool import BlockPool
from model.kv_layout import KVLayout
from model.sampling_params import SamplingParams
from model.sequence import Sequence
from protos import inference_pb2 as pb
from protos.caller import ANYONE
from router import metrics
from router.account import Account
from router.admission import Gate
from router.breaker import BreakerPolicy, Breakers
from router.cache_changes import CacheChanges
from router.candidate import Candidate, Role, WorkerId
from router.config import AdmissionPolicy, PlacementPolicy
from router.placement import Placement
from router.placer import Placer, Wanted
from router.rate_limits import RateLimits
from router.request import Request
from router.sessions import Sessions
from router.timeline import RequestClock
from router.worker import WorkerLoad, WorkerState
from router.workers import WorkerTable
from tests.router.test_workers import Clock, profile

LAYOUT = KVLayout("m1", "float32", 2, 2, 8, block_size=4)
READY = WorkerLoad(WorkerState.READY, num_free_blocks=100)
SAMPLING = SamplingParams(max_tokens=20)
PROMPT = tuple(range(3, 44))  # 41 tokens: 10 blocks and one more


def request(**fields: object) -> Request:
    return replace(Request("r", PROMPT, SAMPLING), **fields)  # type: ignore[arg-type]


def two_pools() -> tuple[WorkerTable, Clock]:
    clock = Clock()
    table = WorkerTable("t1", clock)
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
        table.register(profile(name, role, layout=LAYOUT), READY)
    return table, clock


def found(table: WorkerTable, name: str) -> Candidate:
    return next(each for each in table.snapshot() if each.id.name == name)


def placer_of(table: WorkerTable, breakers: Breakers | None = None) -> Placer:
    gate = Gate(AdmissionPolicy(), 0.0)
    return Placer(table, gate, breakers or Breakers(), PlacementPolicy(), random.Random(1))


async def place(placer: Placer, asked: Request) -> Placement:
    hashes = await placer.hashes(asked.token_ids)
    demand = placer.demand(asked, len(asked.token_ids), wants_decode=True, hashes=hashes)
    return placer.place(demand, ())


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 41, 5000])
async def test_what_is_hashed_is_what_a_worker_looks_for(num_tokens: int) -> None:
    table, _ = two_pools()
    pool = BlockPool(4000)
    computed = Sequence("s", list(range(num_tokens + 4)), num_tokens, SAMPLING, LAYOUT.block_size)
    computed.grow(pool, num_tokens + 4)
    computed.num_computed_tokens = num_tokens + 4
    computed.publish(pool)
    asking = Sequence("t", list(range(num_tokens)), num_tokens, SAMPLING, LAYOUT.block_size)
    asking.take_prefix(pool)
    hashes = await placer_of(table).hashes(asking.token_ids)
    assert len(hashes) * LAYOUT.block_size == asking.num_cached_tokens
    assert set(hashes) <= set(pool.findable())


async def test_only_tokens_that_have_to_be_computed_are_load() -> None:
    table, clock = two_pools()
    placer = placer_of(table)
    hashes = await placer.hashes(PROMPT)
    for name, num_blocks in (("p1", 7), ("d1", 3)):
        dump = CacheChanges(1, hashes[:num_blocks], begins_dump=True, ends_dump=True)
        assert not table.prefixes.apply(WorkerId(name, "e1"), dump)
    placement = await place(placer, request())
    assert [worker.id.name for worker in placement.workers] == ["p1", "d1"]
    assert (placement.num_cached_tokens, placement.num_held_tokens) == (28, 12)
    dispatch = placer.dispatch(request(), replace(placement, ttft_s=2.0, tpot_s=0.5), len(PROMPT))
    assert (found(table, "p1").num_queued_tokens, found(table, "p0").num_queued_tokens) == (13, 0)
    assert found(table, "d1").num_free_blocks == 100 - 12  # 11 for the prompt, and one for the answer to begin
    assert found(table, "d1").releases == ((clock.now + 2.0 + 19 * 0.5, 16),)  # 61 tokens in all
    dispatch.prefilled()
    assert found(table, "p1").num_queued_tokens == 0
    dispatch.end()
    assert (found(table, "d1").num_free_blocks, found(table, "d1").releases) == (100, ())


async def test_all_answers_are_counted_as_they_are_let_in() -> None:
    """41 tokens are 10 blocks of 4, a partial one, and one for the answer to begin: the 10 are there once. Another
    answer computes the one token of the partial block."""
    table, _ = two_pools()
    placer, asked = placer_of(table), request(num_choices=3)
    hashes = await placer.hashes(asked.token_ids)
    demand = placer.demand(asked, 41, wants_decode=True, hashes=hashes, num_answers=3)
    assert (demand.num_blocks, demand.num_own_blocks, demand.num_blocks_together) == (12, 2, 16)
    admitted = await placer.admit(Wanted(asked, 41, lambda: demand), "")
    prefill, decode = (found(table, each.id.name) for each in admitted.placement.workers)
    assert (prefill.num_queued_tokens, decode.num_active, decode.num_coming) == (41 + 2 * 1, 3, 3)
    assert decode.num_free_blocks == 100 - 16
    with RateLimits().claimed(ANYONE) as allowance:
        account = Account(allowance)
    first = account.let_in(admitted)
    first.prefilled()
    taken = account.take(admitted.placement)
    assert taken is not None and len(account.kept) == 1
    decode = found(table, decode.id.name)
    assert (decode.num_active, decode.num_coming, decode.num_free_blocks) == (3, 2, 100 - 4)
    assert account.take(replace(admitted.placement)) is None  # it goes where the first was retried: they all do
    assert found(table, decode.id.name).num_active == 2
    for dispatch in (first, taken):
        dispatch.end()
    assert not any(worker.dispatches for worker in table.workers())


async def test_who_fails_again_and_again_gets_nothing_and_then_one_try() -> None:
    table, _ = two_pools()
    breakers = Breakers(BreakerPolicy(open_s=3600.0))
    placer, p0 = placer_of(table, breakers), WorkerId("p0", "e1")
    for _ in range(5):
        breakers.failed(p0, time.monotonic())
    for _ in range(20):
        placement = await place(placer, request())
        assert placement.prefill is not None and placement.prefill.id.name == "p1"
    later = time.monotonic() + 3601.0
    assert breakers.avoided(later) == set()
    table.set_draining("p1", True)
    placement = await place(placer, request())
    assert placement.prefill is not None and placement.prefill.id == p0  # there is no other
    breakers.placed(p0, later)
    assert breakers.avoided(later) == {p0}


async def test_who_fails_again_and_again_gets_no_sequence_that_moves() -> None:
    table, _ = two_pools()
    table.register(profile("d2", Role.DECODE, layout=LAYOUT), READY)
    breakers = Breakers(BreakerPolicy(min_failures=1, open_s=3600.0))
    placer = placer_of(table, breakers)
    source, sick, well = (found(table, name).id for name in ("d0", "d1", "d2"))
    demand = placer.demand(request(), 41, wants_decode=True, hashes=())
    targets = [placer.place_moved(demand, source, ()) for _ in range(40)]
    assert {each and each.id for each in targets} == {sick, well}
    breakers.failed(sick, time.monotonic())
    targets = [placer.place_moved(demand, source, ()) for _ in range(40)]
    assert {each and each.id for each in targets} == {well}
    last = placer.place_moved(demand, source, [well])
    assert last is not None  # there is no other: those to avoid are asked before nobody is
    dispatch = placer.dispatch_moved(last, demand)
    assert found(table, last.id.name).num_active == 1
    dispatch.end()


async def test_a_session_comes_back_to_its_workers() -> None:
    table, _ = two_pools()
    placer = placer_of(table)
    asked = request(session_id="s")
    first = await place(placer, asked)
    placer.dispatch(asked, first, len(PROMPT)).end()
    for _ in range(20):
        again = await place(placer, asked)
        assert [worker.id for worker in again.workers] == [worker.id for worker in first.workers]
    others = {tuple(worker.id.name for worker in (await place(placer, request())).workers) for _ in range(60)}
    assert len(others) == 4


def test_sessions_that_were_served_last_are_remembered() -> None:
    table, _ = two_pools()
    sessions = Sessions(2)
    on_p0, on_p1 = (Placement(found(table, name), found(table, "d0")) for name in ("p0", "p1"))
    for session_id in ("a", "b", "a", "c", ""):
        sessions.served(session_id, on_p0)
    assert len(sessions) == 2
    assert sessions.workers_of("b") == sessions.workers_of("") == ()
    assert sessions.workers_of("a") == (WorkerId("p0", "e1"), WorkerId("d0", "e1"))
    sessions.served("a", on_p1)
    assert sessions.workers_of("a") == (WorkerId("p1", "e1"), WorkerId("d0", "e1"))
    nothing = Sessions(0)
    nothing.served("a", on_p0)
    assert len(nothing) == 0


def test_predictions_are_compared_with_what_came_of_them() -> None:
    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, labels) or 0.0

    def read() -> list[float]:
        tokens = "pdserve_router_prefix_tokens_total"
        pairs = [(pool, kind) for pool in ("prefill", "decode") for kind in ("predicted", "found")]
        return [
            value("pdserve_router_ttft_observed_ratio_count"),
            value("pdserve_router_ttft_observed_ratio_sum"),
            *(value(tokens, pool=pool, kind=kind) for pool, kind in pairs),
        ]

    before = read()
    clock = RequestClock(now=iter([0.0, 1.0, 1.5]).__next__)
    clock.placed()
    clock.attempt_token()
    metrics.observe_ttft(Placement(None, None), clock)  # nothing was predicted
    metrics.observe_ttft(Placement(None, None, ttft_s=0.25), clock)
    usage = pb.Usage(prefill=pb.PromptTokens(computed=10, cached=16), disaggregated=True)
    usage.decode.cached_tokens = 4
    metrics.observe_prefix(Placement(None, None, num_cached_tokens=20, num_held_tokens=8), usage)
    assert [after - was for was, after in zip(before, read(), strict=True)] == [1, 2.0, 20, 16, 8, 4]
