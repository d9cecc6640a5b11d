"""The worker table alone: registration, load as it is counted, roles, and what is left of a worker that is gone."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from model.kv_layout import KVLayout
from protos import workers_pb2
from protos.errors import FailedPrecondition, InvalidArgument, NotFound
from router.candidate import Candidate, Role, WorkerId
from router.demand import Demand
from router.messages import status_of
from router.placement import Placement, place
from router.profile import WorkerProfile
from router.worker import Replaced, Worker, WorkerLoad, WorkerState
from router.workers import WorkerTable

LAYOUT = KVLayout("m1", "float32", 2, 2, 8, block_size=16)
READY = WorkerLoad(WorkerState.READY, num_free_blocks=100)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> WorkerTable:
    return WorkerTable("t1", clock)


def profile(name: str, role: Role, epoch: str = "e1", layout: KVLayout = LAYOUT, **fields: Any) -> WorkerProfile:
    known = WorkerProfile(WorkerId(name, epoch), f"{name}:1", role, True, "tiny", "t1", layout, num_blocks=100)
    return replace(known, **fields)


def candidate(table: WorkerTable, name: str) -> Candidate:
    (found,) = [each for each in table.snapshot() if each.id.name == name]
    return found


def two_pools(table: WorkerTable) -> tuple[Worker, Worker]:
    return table.register(profile("p", Role.PREFILL), READY), table.register(profile("d", Role.DECODE), READY)


def placement_of(table: WorkerTable) -> Placement:
    return place(table.snapshot(), Demand(3, 3, True), (), random.Random(1))


def test_load_is_counted_at_dispatch_and_taken_back_at_the_end(table: WorkerTable) -> None:
    two_pools(table)
    before = list(table.snapshot())
    dispatch = table.dispatch(placement_of(table), num_tokens=40, num_blocks=3)
    assert candidate(table, "p").num_queued_tokens == 40
    assert (candidate(table, "d").num_active, candidate(table, "d").num_free_blocks) == (1, 97)
    dispatch.prefilled()
    assert candidate(table, "p").num_queued_tokens == 0
    assert (candidate(table, "d").num_active, candidate(table, "d").num_free_blocks) == (1, 100)
    dispatch.end()
    dispatch.end()
    assert list(table.snapshot()) == before


def test_report_takes_over_what_it_can_have_seen(table: WorkerTable, clock: Clock) -> None:
    prefill, _ = two_pools(table)
    table.dispatch(placement_of(table), num_tokens=40, num_blocks=3)
    clock.now += 0.01
    table.report(prefill, replace(READY, queued_prefill_tokens=7))
    assert candidate(table, "p").num_queued_tokens == 47  # the report may have been under way before
    clock.now += 1.0
    table.report(prefill, replace(READY, queued_prefill_tokens=30))
    assert candidate(table, "p").num_queued_tokens == 30


def test_colocated_load_is_counted_once(table: WorkerTable) -> None:
    table.register(profile("b", Role.BOTH), READY)
    dispatch = table.dispatch(placement_of(table), num_tokens=40, num_blocks=3)
    assert (candidate(table, "b").num_queued_tokens, candidate(table, "b").num_active) == (40, 1)
    dispatch.end()
    assert (candidate(table, "b").num_queued_tokens, candidate(table, "b").num_active) == (0, 0)


def test_next_dispatch_goes_elsewhere_before_any_report(table: WorkerTable) -> None:
    for name in ("p0", "p1", "p2"):
        table.register(profile(name, Role.PREFILL), READY)
    for name in ("d0", "d1", "d2"):
        table.register(profile(name, Role.DECODE), READY)
    chosen = []
    for _ in range(3):
        placement = placement_of(table)
        table.dispatch(placement, num_tokens=10, num_blocks=1)
        chosen.append([worker.id.name for worker in placement.workers])
    assert sorted(chosen[index][0] for index in range(3)) == ["p0", "p1", "p2"]
    assert sorted(chosen[index][1] for index in range(3)) == ["d0", "d1", "d2"]


def test_lost_worker_is_shown_for_a_while_and_not_placed(table: WorkerTable, clock: Clock) -> None:
    prefill, _ = two_pools(table)
    table.lost(prefill)
    assert not candidate(table, "p").is_ready
    assert [worker.load.state for worker in table.workers()] == [WorkerState.READY, WorkerState.LOST]
    clock.now += 301
    assert [worker.profile.id.name for worker in table.workers()] == ["d"]


def test_silent_worker_gets_nothing_new_until_it_speaks(table: WorkerTable, clock: Clock) -> None:
    prefill, _ = two_pools(table)
    clock.now += 6
    assert not candidate(table, "p").is_ready
    table.report(prefill, READY)
    assert candidate(table, "p").is_ready


def test_states_that_are_shown_say_what_placement_goes_by(table: WorkerTable, clock: Clock) -> None:
    prefill, decode = two_pools(table)

    def seen(worker: Worker) -> tuple[WorkerState, bool]:
        return table.state(worker), candidate(table, worker.profile.id.name).is_ready

    clock.now += 4.9
    assert seen(prefill) == (WorkerState.READY, True)
    table.set_draining("d", True)
    assert seen(decode) == (WorkerState.DRAINING, False)
    clock.now += 0.1
    assert seen(prefill) == seen(decode) == (WorkerState.SILENT, False)
    assert table.silent() == [WorkerId("p", "e1"), WorkerId("d", "e1")]
    table.report(prefill, READY)
    table.lost(decode)
    clock.now += 60
    assert seen(decode) == (WorkerState.LOST, False)
    assert table.silent() == [WorkerId("p", "e1")]
    message = status_of(prefill, table.state(prefill), table.age_s(prefill))
    assert (message.load.state, message.reported_ago_s) == (workers_pb2.WORKER_STATE_SILENT, 60)


def test_unreachable_worker_gets_nothing_new_until_it_speaks(table: WorkerTable) -> None:
    prefill, _ = two_pools(table)
    table.unreachable(WorkerId("p", "another epoch"))
    assert candidate(table, "p").is_ready
    table.unreachable(WorkerId("p", "e1"))
    assert not candidate(table, "p").is_ready
    table.report(prefill, READY)
    assert candidate(table, "p").is_ready


def test_draining_worker_gets_nothing_new(table: WorkerTable) -> None:
    prefill, _ = two_pools(table)
    table.report(prefill, replace(READY, state=WorkerState.DRAINING))
    assert not candidate(table, "p").is_ready


async def test_restarted_worker_replaces_the_old_one(table: WorkerTable) -> None:
    old, _ = two_pools(table)
    new = table.register(profile("p", Role.PREFILL, epoch="e2"), READY)
    assert isinstance(await old.commands.get(), Replaced)
    assert candidate(table, "p").id == WorkerId("p", "e2")
    table.lost(old)
    table.report(old, READY)
    assert candidate(table, "p").is_ready and old.load.state is WorkerState.LOST
    assert new.load.state is WorkerState.READY


async def test_same_process_that_comes_back_keeps_its_role(table: WorkerTable) -> None:
    old, _ = two_pools(table)
    table.set_role("p", Role.DECODE)
    assert await old.commands.get() is Role.DECODE
    again = table.register(profile("p", Role.PREFILL), READY)
    assert again.role is Role.DECODE
    assert await old.commands.get() is None
    assert table.register(profile("p", Role.PREFILL, epoch="e2"), READY).role is Role.PREFILL


def test_load_of_a_replaced_worker_does_not_weigh_on_the_new_one(table: WorkerTable) -> None:
    two_pools(table)
    dispatch = table.dispatch(placement_of(table), num_tokens=40, num_blocks=3)
    table.register(profile("p", Role.PREFILL, epoch="e2"), READY)
    assert candidate(table, "p").num_queued_tokens == 0
    dispatch.end()
    assert candidate(table, "p").num_queued_tokens == 0


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"layout": replace(LAYOUT, model_digest="m2")}, "model_digest is 'm2' at x and 'm1' at those registered"),
        ({"layout": replace(LAYOUT, dtype="bfloat16")}, "dtype is 'bfloat16' at x and 'float32' at those registered"),
        ({"layout": replace(LAYOUT, block_size=32, num_layers=3)}, "num_layers is 3 at x and 2 at those registered"),
        (
            {"layout": replace(LAYOUT, drafter="eagle:1", num_layers=3)},
            "drafter is 'eagle:1' at x and '' at .*; they must have the same --drafter",
        ),
        ({"tokenizer_digest": "t2"}, "tokenizer_digest is 't2' at the worker and 't1' at the router"),
    ],
)
def test_worker_that_does_not_fit_is_refused(table: WorkerTable, change: dict[str, Any], problem: str) -> None:
    two_pools(table)
    with pytest.raises(FailedPrecondition, match=problem) as caught:
        table.register(profile("x", Role.BOTH, **change), READY)
    assert not caught.value.retryable
    assert [worker.profile.id.name for worker in table.workers()] == ["d", "p"]


def test_first_of_a_new_fleet_sets_the_layout(table: WorkerTable) -> None:
    prefill, decode = two_pools(table)
    other = replace(LAYOUT, model_digest="m2")
    table.lost(prefill)
    with pytest.raises(FailedPrecondition):
        table.register(profile("p", Role.PREFILL, epoch="e2", layout=other), READY)
    table.lost(decode)
    table.register(profile("p", Role.PREFILL, epoch="e2", layout=other), READY)
    assert table.layout == other


def test_tokenizers_of_workers_are_compared_where_the_router_has_none() -> None:
    table = WorkerTable()
    table.register(profile("p", Role.PREFILL, tokenizer_digest="t8"), READY)
    with pytest.raises(FailedPrecondition, match="tokenizer_digest is 't9'"):
        table.register(profile("d", Role.DECODE, tokenizer_digest="t9"), READY)


def test_nameless_worker_is_refused(table: WorkerTable) -> None:
    with pytest.raises(InvalidArgument, match="must not be empty"):
        table.register(profile("", Role.BOTH), READY)


def test_role_of_nobody_and_of_one_that_keeps_it(table: WorkerTable) -> None:
    two_pools(table)
    table.register(profile("fixed", Role.DECODE, flippable=False), READY)
    with pytest.raises(NotFound, match="no worker 'x' is registered; there are: d, fixed, p"):
        table.set_role("x", Role.BOTH)
    with pytest.raises(FailedPrecondition, match="'fixed' cannot change its role"):
        table.set_role("fixed", Role.BOTH)
    table.set_role("fixed", Role.DECODE)


def test_longest_sequence_is_what_the_largest_decoding_cache_holds(table: WorkerTable) -> None:
    assert table.common.max_sequence_tokens is None
    table.register(profile("p", Role.PREFILL, num_blocks=900), READY)
    assert table.common.max_sequence_tokens is None
    table.register(profile("d0", Role.DECODE, num_blocks=10), READY)
    table.register(profile("d1", Role.DECODE, num_blocks=20), READY)
    assert table.common.max_sequence_tokens == 20 * 16


async def test_waiting_ends_with_a_change_or_the_time() -> None:
    table = WorkerTable()
    waiting = asyncio.create_task(table.wait_changed(5))
    await asyncio.sleep(0)
    table.register(profile("p", Role.PREFILL), READY)
    await asyncio.wait_for(waiting, 1)
    await asyncio.wait_for(table.wait_changed(0.001), 1)


def test_registered_anew_by_the_same_process_a_worker_keeps_what_runs_there(table: WorkerTable) -> None:
    prefill, decode = two_pools(table)
    dispatch = table.dispatch(placement_of(table), num_tokens=40, num_blocks=3)
    table.set_draining("d", True)
    again = table.register(profile("d", Role.DECODE), READY)
    assert (set(again.dispatches), set(decode.dispatches)) == ({dispatch}, set())
    assert set(prefill.dispatches) == {dispatch}
    assert again.is_drained
    assert dispatch.leaving.is_set()
    table.set_draining("d", False)
    assert not dispatch.leaving.is_set()
    dispatch.end()
    assert not again.dispatches
    restarted = table.register(profile("d", Role.DECODE, epoch="e2"), READY)
    assert (len(restarted.dispatches), restarted.is_drained) == (0, False)


def test_attempt_is_told_that_its_decode_worker_leaves_though_that_was_not_ready(
    table: WorkerTable, clock: Clock
) -> None:
    _, decode = two_pools(table)
    dispatch = table.dispatch(placement_of(table), num_tokens=40, num_blocks=3)
    clock.now += 60.0  # silent for so long
    table.report(decode, WorkerLoad(WorkerState.DRAINING))
    assert dispatch.leaving.is_set()
    assert table.dispatch(Placement(None, candidate(table, "d")), num_tokens=0, num_blocks=1).leaving.is_set()
