"""Clients that leave while their sequence is handed over, or just after: no block stays in use on either worker."""

from __future__ import annotations

import asyncio
import threading

import pytest

from protos.errors import FailedPrecondition, ServiceError
from tests.decode.test_departures import MAX_TOKENS, PROMPT, answered, decoding_on, hand_over, two_workers
from tests.timed_calls import answer_to, decode_request, tokens_of
from tests.timed_worker import LEASE_S, eventually


@pytest.mark.parametrize("who", ["stream", "request", "both"])
async def test_somebody_leaves_while_it_is_handed_over(who: str) -> None:
    async with two_workers() as (source, target):
        here = await decoding_on(source)
        source.hold_writes()
        handing = hand_over(source, target.target)
        await asyncio.sleep(0.05)
        source.runner.go_on()
        await eventually(lambda: target.pool.num_used > 0)
        await eventually(lambda: source.runner.num_steps == 3 + 5)  # it stands still
        if who != "request":
            here.cancel()
            await eventually(lambda: source.decode.scheduler.num_running == 0)
        if who != "stream":
            handing.cancel()
        if who == "request":  # though what was posted still moves
            assert await tokens_of(here) == answer_to(PROMPT, MAX_TOKENS)
        source.land_writes()
        if who == "stream":
            with pytest.raises(ServiceError):
                await answered(handing)
        await eventually(lambda: source.is_at_rest and target.is_at_rest, within_s=LEASE_S / 2)


@pytest.mark.parametrize("is_claimed", [True, False])
async def test_client_leaves_once_it_is_handed_over(is_claimed: bool) -> None:
    async with two_workers() as (source, target):
        here = await decoding_on(source)
        handing = hand_over(source, target.target)
        await asyncio.sleep(0.05)
        source.runner.go_on()
        await answered(handing)
        emitted = await tokens_of(here)
        await eventually(lambda: source.is_at_rest)
        assert target.pool.num_used > 0
        if is_claimed:
            target.runner.hold(after_steps=2)
            request = decode_request("b", [*PROMPT, *emitted[:-1]], max_tokens=MAX_TOKENS)
            request.num_prompt_tokens = len(PROMPT)
            there = target.decode_stub.Decode(request)
            await eventually(lambda: target.runner.is_waiting)
            there.cancel()
            await eventually(lambda: target.decode.scheduler.num_running == 0)
            target.runner.go_on()
        await eventually(lambda: target.is_at_rest, within_s=2.0 if is_claimed else LEASE_S + 2.0)


async def test_stream_that_ends_before_the_record_is_sent_ends_the_hand_over() -> None:
    """All is written and it stands still: nobody would claim what the other worker took now."""
    async with two_workers() as (source, target):
        exported, going_on = threading.Event(), threading.Event()

        def export(_: object) -> bytes:
            exported.set()
            assert going_on.wait(10)
            return b""

        source.runner.export_drafting = export  # type: ignore[method-assign, assignment]
        here = await decoding_on(source)
        handing = hand_over(source, target.target)
        await eventually(lambda: source.decode._decoding["a"].halt is not None)
        source.runner.go_on()
        await eventually(exported.is_set)
        here.cancel()
        await eventually(lambda: source.decode.scheduler.num_running == 0)
        going_on.set()
        with pytest.raises(FailedPrecondition, match="the stream ended before"):
            await answered(handing)
        await eventually(lambda: source.is_at_rest and target.is_at_rest, within_s=LEASE_S / 2)  # by word, not by lease
