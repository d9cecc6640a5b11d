"""Requests that are taken away from a decode worker that leaves: one unbroken answer, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest

from protos import workers_pb2
from protos.client import PdserveClient
from protos.errors import FailedPrecondition, Internal, NotFound, ResourceExhausted
from protos.values import Sampling, Summary
from tests.router.asking import PROMPT, answer
from tests.router.fakes import POLICY, FakeFleet, FakeWorker, Hook, plain_loop, ready_load, running_fleet

NUM_TOKENS = 120  # half a second: whoever is told to leave early on has long left


pytestmark = pytest.mark.usefixtures("told_one_by_one")


def slowly(worker: FakeWorker, num_tokens: int, then: Callable[[], None]) -> None:
    """Gives a token a few milliseconds; does `then` when the sequence has so many."""

    async def hook(attempt_id: str, count: int) -> None:
        if count == len(PROMPT) + num_tokens:
            then()
        await asyncio.sleep(0.004)

    worker.hooks["decode.token"] = hook


def drained_at(fleet: FakeFleet, num_tokens: int, names: tuple[str, ...] = ("d0", "d1")) -> None:
    """The worker that a sequence is on is drained as it has so many tokens."""
    for name in names:
        slowly(fleet.workers[name], num_tokens, lambda name=name: fleet.router.table.set_draining(name, True))  # type: ignore[misc]


def placed_on(fleet: FakeFleet) -> tuple[FakeWorker, FakeWorker]:
    """Where it decoded first, and the other."""
    first, other = fleet.workers["d0"], fleet.workers["d1"]
    if first.decodes and (not other.decodes or len(first.decodes[0].token_ids) == len(PROMPT)):
        return first, other
    return other, first


@pytest.mark.parametrize("how", ["drained", "reported"])
async def test_goes_on_elsewhere_without_a_break(fleet: FakeFleet, client: PdserveClient, how: str) -> None:
    def leave(worker: FakeWorker) -> Callable[[], None]:
        if how == "drained":
            return lambda: fleet.router.table.set_draining(worker.name, True)
        return lambda: worker.report(workers_pb2.WorkerLoad(state=workers_pb2.WORKER_STATE_DRAINING))

    for name in ("d0", "d1"):
        slowly(fleet.workers[name], 5, leave(fleet.workers[name]))
    tokens, chunks, summary = await answer(client, Sampling(max_tokens=NUM_TOKENS))
    assert tokens == plain_loop(PROMPT, NUM_TOKENS)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (NUM_TOKENS - 1) + ["length"]
    first, other = placed_on(fleet)
    (departure,), (arrival,) = first.departures, other.decodes
    assert (departure.attempt_id, departure.next_attempt_id) == (first.decodes[0].attempt_id, arrival.attempt_id)
    assert (departure.target.worker_id, departure.target.address) == (other.name, other.server.address)
    assert not arrival.prefill_here
    assert arrival.num_prompt_tokens == len(PROMPT)
    assert list(arrival.token_ids) == [*PROMPT, *tokens[: len(arrival.token_ids) - len(PROMPT)]]
    usage = summary.usage
    assert (usage.num_moves, usage.num_resumes, usage.num_retries, usage.disaggregated) == (1, 0, 0, True)
    assert (usage.decode_received_tokens, usage.decode_cached_tokens, usage.num_steps) == (20, 1, 101)
    assert (usage.prefill_computed_tokens, usage.prefill_cached_tokens) == (20, 1)
    assert [stage.name for stage in summary.timeline.stages] == ["tokenize", "queue", "prefill", "handover", "decode"]
    await fleet.settled()


async def test_moved_again_and_again(fleet: FakeFleet, client: PdserveClient) -> None:
    def swap(source: str, other: str) -> None:
        fleet.router.table.set_draining(other, False)
        fleet.router.table.set_draining(source, True)

    for source, other in (("d0", "d1"), ("d1", "d0")):

        async def hook(attempt_id: str, count: int, source: str = source, other: str = other) -> None:
            if count % 8 == 0:
                swap(source, other)
            await asyncio.sleep(0.004)

        fleet.workers[source].hooks["decode.token"] = hook
    tokens, _, summary = await answer(client, Sampling(max_tokens=230))
    assert tokens == plain_loop(PROMPT, 230)
    assert summary.usage.num_moves >= 2
    assert summary.usage.num_resumes == 0
    await fleet.settled()


async def test_moves_leave_all_attempts_for_failures(fleet: FakeFleet, client: PdserveClient) -> None:
    """Five moves, and then as many failures as a request may have."""
    num_failures = 0

    def num_moves() -> int:
        return sum(len(fleet.workers[name].departures) for name in ("d0", "d1"))

    for source, other in (("d0", "d1"), ("d1", "d0")):

        async def hook(attempt_id: str, count: int, source: str = source, other: str = other) -> None:
            nonlocal num_failures
            await asyncio.sleep(0.004)
            if count % 8 == 0 and num_moves() < 5:
                fleet.router.table.set_draining(other, False)
                fleet.router.table.set_draining(source, True)
            elif count % 8 == 0 and num_moves() == 5 and num_failures < POLICY.max_attempts - 1:
                fleet.router.table.set_draining(source, False)
                num_failures += 1
                raise Internal("as the test wants it")

        fleet.workers[source].hooks["decode.token"] = hook
    tokens, _, summary = await answer(client, Sampling(max_tokens=230))
    assert tokens == plain_loop(PROMPT, 230)
    assert (summary.usage.num_moves, summary.usage.num_resumes, num_failures) == (5, 3, 3)
    await fleet.settled()


async def test_prompts_of_a_worker_that_does_both_are_told_after_a_move() -> None:
    async with running_fleet(num_both=2) as fleet, PdserveClient(fleet.router.address) as client:
        for name, worker in fleet.workers.items():
            slowly(worker, 5, lambda name=name: fleet.router.table.set_draining(name, True))  # type: ignore[misc]
        tokens, _, summary = await answer(client, Sampling(max_tokens=NUM_TOKENS))
        assert tokens == plain_loop(PROMPT, NUM_TOKENS)
        assert (summary.usage.num_moves, summary.usage.disaggregated) == (1, False)
        assert sorted(len(worker.decodes) for worker in fleet.workers.values()) == [1, 1]
        await fleet.settled()


async def test_is_tried_again_while_there_is_no_room(fleet: FakeFleet, client: PdserveClient) -> None:
    drained_at(fleet, 3)
    num_refusals = 0

    async def full_at_first(attempt_id: str, _: int) -> None:
        nonlocal num_refusals
        if num_refusals < 2:
            num_refusals += 1
            raise ResourceExhausted("no blocks")

    for name in ("d0", "d1"):
        fleet.workers[name].hooks["handover.start"] = full_at_first
    tokens, _, summary = await answer(client, Sampling(max_tokens=200))
    assert tokens == plain_loop(PROMPT, 200)
    assert (num_refusals, summary.usage.num_moves, summary.usage.num_resumes) == (2, 1, 0)
    await fleet.settled()


async def test_worker_that_reports_too_few_blocks_is_not_asked(fleet: FakeFleet, client: PdserveClient) -> None:
    go_on = asyncio.Event()

    async def hold(attempt_id: str, count: int) -> None:
        if count == len(PROMPT) + 3:
            await go_on.wait()
        await asyncio.sleep(0.004)

    for name in ("d0", "d1"):
        fleet.workers[name].hooks["decode.token"] = hold
    answering = asyncio.create_task(answer(client, Sampling(max_tokens=NUM_TOKENS)))
    async with asyncio.timeout(5):
        while not any(fleet.workers[name].decodes for name in ("d0", "d1")):
            await asyncio.sleep(0.001)
        first, other = placed_on(fleet)
        other.report(ready_load(num_free_blocks=3))
        while any(w.num_free_blocks > 3 for w in fleet.router.table.snapshot() if w.id.name == other.name):
            await asyncio.sleep(0.001)
    fleet.router.table.set_draining(first.name, True)
    go_on.set()
    tokens, _, summary = await answering
    assert tokens == plain_loop(PROMPT, NUM_TOKENS)
    assert (summary.usage.num_moves, first.departures, other.decodes) == (0, [], [])
    await fleet.settled()


async def test_stays_once_it_is_no_longer_drained(fleet: FakeFleet, client: PdserveClient) -> None:
    def to_and_fro(name: str) -> Callable[[], None]:
        def act() -> None:
            fleet.router.table.set_draining(name, True)
            fleet.router.table.set_draining(name, False)

        return act

    for name in ("d0", "d1"):
        slowly(fleet.workers[name], 3, to_and_fro(name))
    tokens, _, summary = await answer(client, Sampling(max_tokens=NUM_TOKENS))
    assert tokens == plain_loop(PROMPT, NUM_TOKENS)
    assert summary.usage.num_moves == 0
    assert not any(fleet.workers[name].departures for name in ("d0", "d1"))
    await fleet.settled()


async def test_stream_that_ends_though_the_move_failed_is_resumed(fleet: FakeFleet, client: PdserveClient) -> None:
    """The worker says that it failed, and yet gives the sequence up: nothing is lost."""
    drained_at(fleet, 5)

    async def fail(attempt_id: str, _: int) -> None:
        raise FailedPrecondition("but its stream has ended")

    for name in ("d0", "d1"):
        fleet.workers[name].hooks["handover.left"] = fail
    tokens, _, summary = await answer(client, Sampling(max_tokens=NUM_TOKENS))
    assert tokens == plain_loop(PROMPT, NUM_TOKENS)
    assert (summary.usage.num_moves, summary.usage.num_resumes) == (0, 1)
    await fleet.settled()


async def test_worker_it_was_moved_to_dies(fleet: FakeFleet, client: PdserveClient) -> None:
    await fleet.add("d2", workers_pb2.ROLE_DECODE)  # one is drained, one dies, one is left
    drained_at(fleet, 5, ("d0", "d1", "d2"))
    dead: list[asyncio.Task[None]] = []

    def hook_of(worker: FakeWorker) -> Hook:
        async def die_as_it_arrives(attempt_id: str, num_tokens: int) -> None:
            if num_tokens > len(PROMPT) and not dead:
                dead.append(asyncio.create_task(worker.die()))
                await asyncio.sleep(5)  # cancelled by its own death

        return die_as_it_arrives

    for name in ("d0", "d1", "d2"):
        fleet.workers[name].hooks["decode.start"] = hook_of(fleet.workers[name])
    tokens, _, summary = await answer(client, Sampling(max_tokens=NUM_TOKENS))
    assert tokens == plain_loop(PROMPT, NUM_TOKENS)
    assert (summary.usage.num_moves, summary.usage.num_resumes, len(dead)) == (1, 1, 1)
    await dead[0]
    await fleet.settled()


async def test_client_leaves_while_it_is_moved(fleet: FakeFleet, client: PdserveClient) -> None:
    drained_at(fleet, 3)
    begun = asyncio.Event()

    async def hang(attempt_id: str, _: int) -> None:
        begun.set()
        await asyncio.sleep(30)

    for name in ("d0", "d1"):
        fleet.workers[name].hooks["handover.start"] = hang
    async with aclosing(client.generate(PROMPT, sampling=Sampling(max_tokens=200))) as parts:
        async for part in parts:
            assert not isinstance(part, Summary)
            if begun.is_set():
                break
    await fleet.settled()


async def test_drained_worker_gets_nothing_new_and_keeps_its_prompts(fleet: FakeFleet, client: PdserveClient) -> None:
    await client.set_draining("d0", True)
    await client.set_draining("p1", True)
    for _ in range(6):
        await answer(client, Sampling(max_tokens=3))
    assert (fleet.workers["d0"].decodes, fleet.workers["p1"].prefills) == ([], [])
    states = {worker.worker_id: worker.state for worker in (await client.get_status()).workers}
    assert states == {"d0": "draining", "d1": "ready", "p0": "ready", "p1": "draining"}
    await client.set_draining("d0", False)
    await client.set_draining("d1", True)
    await answer(client, Sampling(max_tokens=3))
    assert len(fleet.workers["d0"].decodes) == 1
    with pytest.raises(NotFound, match="there are: d0, d1, p0, p1"):
        await client.set_draining("d9", True)
