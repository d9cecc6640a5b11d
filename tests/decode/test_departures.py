"""A sequence that decodes leaves for another worker, over gRPC: it goes on there, or, whatever fails, where it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvtransfer.loopback_agent import LoopbackNetwork
from protos import decode_pb2, inference_pb2
from protos.channel import service_errors
from protos.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    ServiceError,
)
from tests.timed_calls import answer_to, decode_request, prompt_of, tokens_of
from tests.timed_worker import BLOCK, LAYOUT, TimedWorker, eventually, running

NUM_BLOCKS = 32
PROMPT = prompt_of(5 * BLOCK + 2)
MAX_TOKENS = 60


@asynccontextmanager
async def two_workers(target_blocks: int = NUM_BLOCKS) -> AsyncIterator[tuple[TimedWorker, TimedWorker]]:
    """Where it decodes, and where it is to go. Steps of the first are held."""
    network = LoopbackNetwork()
    source = TimedWorker(network, "decode-0", num_blocks=NUM_BLOCKS)
    target = TimedWorker(network, "decode-1", num_blocks=target_blocks)
    async with running(source, target):
        source.runner.hold()
        yield source, target


async def decoding_on(source: TimedWorker, max_tokens: int = MAX_TOKENS, num_tokens: int = 3) -> Any:
    """A stream that has given so many tokens; the next step is held."""
    request = decode_request("a", PROMPT, max_tokens=max_tokens, prefill_here=True)
    call = source.decode_stub.Decode(request)
    num_steps = -(-len(PROMPT) // 8)  # of the prompt, as many tokens at once as a step of these workers takes
    await eventually(lambda: source.runner.is_waiting)
    source.runner.let_run(num_steps + num_tokens - 1)
    await eventually(lambda: source.runner.num_steps == num_steps + num_tokens - 1 and source.runner.is_waiting)
    return call


def hand_over(source: TimedWorker, to: decode_pb2.DecodeTarget, **changes: Any) -> Any:
    fields: dict[str, Any] = {"attempt_id": "a", "next_attempt_id": "b", "target": to} | changes
    return source.decode_stub.HandOver(decode_pb2.HandOverRequest(**fields), timeout=10)


async def answered(call: Any) -> decode_pb2.HandOverResponse:
    with service_errors():
        response: decode_pb2.HandOverResponse = await call
    return response


async def test_goes_on_where_it_was_handed_over() -> None:
    async with two_workers() as (source, target):
        here = await decoding_on(source)
        handing = hand_over(source, target.target)
        await asyncio.sleep(0.05)
        source.runner.go_on()
        response = await answered(handing)
        messages = [message async for message in here]
        emitted = [token_id for message in messages for token_id in message.token_ids]
        assert not any(message.finish_reason for message in messages)
        assert not any(message.HasField("decode_stats") for message in messages)
        num_tokens = len(PROMPT) + len(emitted) - 1
        assert (response.num_tokens, num_tokens % BLOCK) == (num_tokens, BLOCK - 1)  # its last block lacks one token
        assert response.sent_bytes == (num_tokens // BLOCK + 1) * LAYOUT.block_bytes
        assert (response.stats.computed_tokens, response.stats.num_steps) == (len(PROMPT), 3 + len(emitted) - 1)
        assert response.pause_s < 2
        request = decode_request("b", [*PROMPT, *emitted[:-1]], max_tokens=MAX_TOKENS)
        request.num_prompt_tokens = len(PROMPT)
        rest = target.decode_stub.Decode(request)
        there = [message async for message in rest]
        assert [message.output_index for message in there][:1] == [len(emitted)]
        assert emitted + [t for message in there for t in message.token_ids] == answer_to(PROMPT, MAX_TOKENS)
        stats = there[-1].decode_stats
        assert (stats.received_tokens, stats.computed_tokens, stats.recomputed_tokens) == (num_tokens, 0, 0)
        assert there[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH


async def test_what_the_drafter_knows_goes_along() -> None:
    async with two_workers() as (source, target):
        restored: list[tuple[int, bytes]] = []
        source.runner.export_drafting = lambda drafting: b"known"  # type: ignore[method-assign]
        target.runner.restore_drafting = lambda _, num_tokens, state: restored.append((num_tokens, state))  # type: ignore[method-assign, assignment]
        here = await decoding_on(source)
        handing = hand_over(source, target.target)
        await asyncio.sleep(0.05)
        source.runner.go_on()
        response = await answered(handing)
        tokens = await tokens_of(here)
        rest = decode_request("b", [*PROMPT, *tokens[:-1]], max_tokens=MAX_TOKENS)
        rest.num_prompt_tokens = len(PROMPT)
        assert tokens + await tokens_of(target.decode_stub.Decode(rest)) == answer_to(PROMPT, MAX_TOKENS)
        assert restored == [(response.num_tokens, b"known")]


async def test_decodes_on_while_its_full_blocks_are_written() -> None:
    """Writes do not land: it decodes up to the place where it has to stand still, and no further."""
    async with two_workers() as (source, target):
        here = await decoding_on(source, num_tokens=1)
        source.hold_writes()
        handing = hand_over(source, target.target)
        await asyncio.sleep(0.05)
        source.runner.go_on()
        await eventually(lambda: source.runner.num_steps == 3 + 5)
        await asyncio.sleep(0.1)
        assert source.runner.num_steps == 3 + 5  # to 6 * BLOCK + 3 tokens with KV, from the step that was held
        assert not handing.done()
        source.land_writes()
        await answered(handing)
        tokens = await tokens_of(here)
        assert len(PROMPT) + len(tokens) - 1 == 6 * BLOCK + 3
        assert tokens == answer_to(PROMPT, len(tokens))
        rest = decode_request("b", [*PROMPT, *tokens[:-1]], max_tokens=MAX_TOKENS)
        rest.num_prompt_tokens = len(PROMPT)
        assert tokens + await tokens_of(target.decode_stub.Decode(rest)) == answer_to(PROMPT, MAX_TOKENS)


@pytest.mark.parametrize("failure", ["full", "stale", "unreachable", "writes", "commit"])
async def test_stays_if_it_cannot_leave(failure: str) -> None:
    async with two_workers(target_blocks=4 if failure == "full" else NUM_BLOCKS) as (source, target):
        here = await decoding_on(source)
        where = target.target
        if failure == "stale":
            where.epoch = "another"
        elif failure == "unreachable":
            where.address = "127.0.0.1:1"
        elif failure == "writes":
            source.agent.write = _failing  # type: ignore[method-assign, assignment]
        elif failure == "commit":
            target.decode.receiver.receive = _failing  # type: ignore[method-assign, assignment]
        handing = hand_over(source, where)
        await asyncio.sleep(0.05)
        source.runner.go_on()
        with pytest.raises(ServiceError):
            await answered(handing)
        assert await tokens_of(here) == answer_to(PROMPT, MAX_TOKENS)


def _failing(*_: object) -> None:
    raise RuntimeError("as the test wants it")


async def test_ends_before_it_could_leave() -> None:
    async with two_workers() as (source, target):
        here = await decoding_on(source, max_tokens=4, num_tokens=3)
        handing = hand_over(source, target.target)
        await asyncio.sleep(0.05)
        source.runner.go_on()
        with pytest.raises(FailedPrecondition, match="before it"):
            await answered(handing)
        assert await tokens_of(here) == answer_to(PROMPT, 4)


@pytest.mark.parametrize("moment", ["at", "reached"])
async def test_cancelled_in_the_moment_in_which_a_step_ends(moment: str) -> None:
    """What the scheduler is about to tell must not be found cancelled: the engine would end of it."""
    async with two_workers() as (source, target):
        here = await decoding_on(source)
        scheduler = source.decode.scheduler
        complete, schedule = scheduler.complete, scheduler.schedule
        handing = asyncio.create_task(
            source.decode.HandOver(
                decode_pb2.HandOverRequest(attempt_id="a", next_attempt_id="b", target=target.target),
                None,  # type: ignore[arg-type]
            )
        )

        def schedule_and_cancel(num_tokens: int) -> Any:
            if moment == "at" and source.decode._decoding["a"].halt is not None:
                handing.cancel()
            return schedule(num_tokens)

        def complete_and_cancel(*arguments: Any) -> None:
            decoding = source.decode._decoding["a"]
            is_last = decoding.halt is not None and decoding.sequence.num_computed_tokens == 6 * BLOCK + 2
            if moment == "reached" and is_last:
                handing.cancel()
            complete(*arguments)

        scheduler.schedule = schedule_and_cancel  # type: ignore[method-assign]
        scheduler.complete = complete_and_cancel  # type: ignore[method-assign, assignment]
        await asyncio.sleep(0.05)
        if moment == "reached":
            source.runner.let_run(1)  # from then on it is known where it is to stop
            await eventually(lambda: target.pool.num_used > 0)
            await asyncio.sleep(0.05)  # it waits for that
        source.runner.go_on()
        with pytest.raises(asyncio.CancelledError):
            await handing
        assert await tokens_of(here) == answer_to(PROMPT, MAX_TOKENS)


async def test_eight_are_handed_over_at_once_and_the_others_decode_on() -> None:
    network = LoopbackNetwork()
    options = {"num_blocks": 300, "max_running": 16, "max_step_tokens": 64}
    source, target = (TimedWorker(network, name, **options) for name in ("decode-0", "decode-1"))  # type: ignore[arg-type]
    async with running(source, target):
        source.runner.hold()
        asked = [prompt_of(BLOCK, first=index) for index in range(10)]
        requests = [
            decode_request(f"a{index}", prompt, max_tokens=MAX_TOKENS, prefill_here=True)
            for index, prompt in enumerate(asked)
        ]
        streams = [source.decode_stub.Decode(request) for request in requests]
        await eventually(lambda: source.runner.is_waiting and len(source.decode._decoding) == 10)
        source.runner.let_run(3)
        await eventually(lambda: source.runner.num_steps == 3 and source.runner.is_waiting)
        source.hold_writes()
        handing = [
            hand_over(source, target.target, attempt_id=f"a{index}", next_attempt_id=f"b{index}") for index in range(10)
        ]
        await eventually(lambda: sum(each.halt is not None for each in source.decode._decoding.values()) == 8)
        source.runner.go_on()
        await eventually(lambda: source.decode.scheduler.num_running == 8)  # the other two have come to their end
        assert len(source.decode.scheduler._halted) == 8
        source.land_writes()
        ended = await asyncio.gather(*map(answered, handing), return_exceptions=True)
        assert sum(isinstance(each, decode_pb2.HandOverResponse) for each in ended) == 8
        there = [
            (await tokens_of(stream), answer_to(prompt, MAX_TOKENS))
            for stream, prompt in zip(streams, asked, strict=True)
        ]
        assert sum(tokens == wanted for tokens, wanted in there) == 2
        assert all(tokens == wanted[: len(tokens)] for tokens, wanted in there)


async def test_one_that_does_not_decode_yet_takes_nobodys_turn() -> None:
    async with two_workers() as (source, target):
        request = decode_request("a", PROMPT, max_tokens=MAX_TOKENS, prefill_here=True)
        here = source.decode_stub.Decode(request)
        await eventually(lambda: source.runner.is_waiting)  # in its first chunk
        with pytest.raises(ResourceExhausted, match="waits here for its KV"):
            await answered(hand_over(source, target.target))
        source.runner.go_on()
        assert await tokens_of(here) == answer_to(PROMPT, MAX_TOKENS)


async def test_what_is_wrong_is_named() -> None:
    async with two_workers() as (source, target):
        here = await decoding_on(source)
        for changes, kind, field in (
            ({"attempt_id": "x"}, NotFound, "attempt_id"),
            ({"next_attempt_id": ""}, InvalidArgument, "next_attempt_id"),
            ({"next_attempt_id": "a"}, InvalidArgument, "next_attempt_id"),
            ({"target": decode_pb2.DecodeTarget(worker_id="decode-1")}, InvalidArgument, "target"),
            ({"target": source.target}, InvalidArgument, "target"),
        ):
            with pytest.raises(kind) as caught:
                await answered(hand_over(source, target.target, **changes))
            assert caught.value.field == field
        first, second = hand_over(source, target.target), hand_over(source, target.target, next_attempt_id="c")
        done, _ = await asyncio.wait([asyncio.ensure_future(answered(each)) for each in (first, second)], timeout=0.2)
        assert [type(each.exception()) for each in done] == [FailedPrecondition]  # the other waits for a step
        same = source.decode_stub.Decode(decode_request("a", PROMPT))
        with pytest.raises(AlreadyExists):
            await tokens_of(same)
        source.runner.go_on()
        await eventually(lambda: source.is_at_rest)
        assert (await tokens_of(here))[:3] == answer_to(PROMPT, 3)
        await eventually(lambda: target.is_at_rest, within_s=7)  # what nobody claims is given up after a lease
