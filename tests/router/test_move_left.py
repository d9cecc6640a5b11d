"""Clients that leave in the middle of a move of their request, or just after it: no load stays counted anywhere."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from protos.client import PdserveClient
from protos.errors import ResourceExhausted
from protos.values import Sampling
from router import move, relay
from tests.router.asking import PROMPT, answer
from tests.router.fakes import FakeFleet, plain_loop
from tests.router.test_move import NUM_TOKENS, drained_at

pytestmark = pytest.mark.usefixtures("told_one_by_one")


async def leaves_at(client: PdserveClient, reached: asyncio.Event) -> None:
    """A client that reads on until then, and breaks off."""

    async def read() -> None:
        async with aclosing(client.generate(PROMPT, sampling=Sampling(max_tokens=200))) as parts:
            async for _ in parts:
                pass

    reading = asyncio.create_task(read())
    await asyncio.wait_for(reached.wait(), 5)
    assert not reading.done()
    reading.cancel()
    await asyncio.wait([reading])


def load(fleet: FakeFleet) -> dict[str, tuple[int, int, int]]:
    """What placement sees."""
    return {
        worker.id.name: (worker.num_queued_tokens, worker.num_active, worker.num_free_blocks)
        for worker in fleet.router.table.snapshot()
    }


@pytest.mark.parametrize("moment", ["handover.start", "handover.left", "decode.left", "decode.start"])
async def test_workers_are_at_this_moment_of_the_move(fleet: FakeFleet, client: PdserveClient, moment: str) -> None:
    before = load(fleet)
    drained_at(fleet, 3)
    reached = asyncio.Event()

    async def hang(attempt_id: str, num_tokens: int) -> None:
        if moment == "decode.start" and num_tokens == len(PROMPT):
            return  # that is where it was placed first
        reached.set()
        await asyncio.sleep(30)

    for name in ("d0", "d1"):
        fleet.workers[name].hooks[moment] = hang
    await leaves_at(client, reached)
    await fleet.settled()
    assert load(fleet) == before


async def test_move_is_made_and_the_stream_has_not_ended(
    fleet: FakeFleet, client: PdserveClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker says that the sequence is elsewhere before its stream ends: nobody has asked for the move yet."""
    before = load(fleet)
    drained_at(fleet, 3)
    made = asyncio.Event()

    async def hang(attempt_id: str, _: int) -> None:
        await asyncio.sleep(30)

    async def moved_and_told(*arguments: Any) -> move.Move:
        result = await move.moved(*arguments)
        asyncio.get_running_loop().call_soon(made.set)
        return result

    for name in ("d0", "d1"):
        fleet.workers[name].hooks["decode.left"] = hang
    monkeypatch.setattr("router.relay.moved", moved_and_told)
    await leaves_at(client, made)
    await fleet.settled()
    assert load(fleet) == before


async def test_move_is_made_and_not_yet_followed(
    fleet: FakeFleet, client: PdserveClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load(fleet)
    drained_at(fleet, 3)
    made = asyncio.Event()
    not_followed = relay._not_followed

    async def hang_once_made(moving: asyncio.Task[move.Move], followed: move.Move | None) -> None:
        await not_followed(moving, followed)
        if followed is not None:
            made.set()
            await asyncio.sleep(30)

    monkeypatch.setattr("router.relay._not_followed", hang_once_made)
    await leaves_at(client, made)
    await fleet.settled()
    assert load(fleet) == before


@pytest.mark.parametrize("is_moved_later", [True, False])
async def test_a_failed_move_is_in_no_statistics(fleet: FakeFleet, client: PdserveClient, is_moved_later: bool) -> None:
    """It goes on at its source: whatever is told of it is what was done there, and its load stays there alone."""
    before = load(fleet)
    drained_at(fleet, 3)
    loads: list[dict[str, tuple[int, int, int]]] = []

    async def full(attempt_id: str, _: int) -> None:
        num_refusals = sum(len(fleet.workers[name].departures) for name in ("d0", "d1"))
        if num_refusals <= 2 or not is_moved_later:
            asyncio.get_running_loop().call_later(0.02, lambda: loads.append(load(fleet)))
            raise ResourceExhausted("no blocks")

    for name in ("d0", "d1"):
        fleet.workers[name].hooks["handover.start"] = full
    tokens, _, summary = await answer(client, Sampling(max_tokens=NUM_TOKENS))
    assert tokens == plain_loop(PROMPT, NUM_TOKENS)
    usage = summary.usage
    (source,) = [name for name in ("d0", "d1") if fleet.workers[name].departures]
    assert len(loads) >= 2
    for seen in loads:
        assert seen == before | {source: (0, 1, before[source][2])}
    assert (usage.num_moves, usage.num_resumes, usage.num_retries) == (int(is_moved_later), 0, 0)
    assert (usage.prompt_tokens, usage.output_tokens) == (len(PROMPT), NUM_TOKENS)
    done = (usage.decode_received_tokens, usage.decode_cached_tokens, usage.num_steps)
    at_its_source = (len(PROMPT) - 1, 1, 1)  # as the worker that ends the answer tells
    assert done == ((20, 1, 100 + 1) if is_moved_later else at_its_source)
    await fleet.settled()
    assert load(fleet) == before
